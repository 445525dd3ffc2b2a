"""rounds with the tiles of best.json (or the policy): argv: best|policy|today, then quantize:draft_quantize:case,case..."""
import sys, json, os, time
sys.path.insert(0,'benchmarks')
import torch
import specdec.ops.quantised.linear as L
import specdec.ops.quantised.tiles as Q
SH={(6144,4096):"qkv",(4096,4096):"o",(28672,4096):"gate_up",(4096,14336):"down"}
best={}
if os.path.exists("/tmp/best.json"):
    for T,kind,shape,name,t in json.load(open("/tmp/best.json")): best[T,kind,shape]=getattr(Q,name)(*t)
own=Q.register_tiles
which="policy"
def register_tiles(T,O,I,kind,group,zeros,gated):
    if which=="today": return None
    key=(1 if T==1 else 6 if T<=8 else 16 if T<=16 else 32 if T<=32 else 64,kind,SH.get((O,I)))
    if which=="best" and key in best: return best[key]
    return own(T,O,I,kind,group,zeros,gated)
L.register_tiles=register_tiles
from rounds import round_8b as R
def main():
    global which
    t0=time.time(); rows=[]; last=None
    for arg in sys.argv[1:]:
        which,quantize,draft,cases=arg.split(":",3)
        if last!=(quantize,draft):
            model=head=None; torch.cuda.empty_cache()
            torch.manual_seed(0)
            with torch.no_grad():
                model,head=R.random_pair(4096,torch.device("cuda",0))
                R.round_weights(model,quantize,but=model.lm_head)
                if draft!="none": R.round_weights(head,draft)
            torch.cuda.empty_cache(); last=quantize,draft
        for case in R.CASES:
            if case.name in cases.split("+"):
                rows.append(R.measure(model,head,case,40,"round")); rows[-1]|={"tiles":which,"quantize":quantize,"draft_quantize":draft}
                print(which,quantize,draft,f"{time.time()-t0:.0f}s"); R.show(rows[-1])
                torch.cuda.empty_cache()
        json.dump(rows,open(os.environ.get("R","/tmp")+"/rounds.json","w"))
main()
