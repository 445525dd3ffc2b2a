"""rounds with the tiles of /tmp/best3.json: argv: ws|today:quantize:draft:case+case..."""
import sys, json, os, time
sys.path.insert(0,'benchmarks'); sys.path.insert(0,'.x')
import torch
import specdec.ops.quantised.linear as L
import specdec.ops.quantised.tiles as Q
from specdec.ops.quantised.linear_hopper import launch_quantised_hopper
import ws
SH={(6144,4096):"qkv",(4096,4096):"o",(28672,4096):"gate_up",(4096,14336):"down"}
best={}
if os.path.exists("/tmp/best3.json"):
    for T,kind,shape,how,t in json.load(open("/tmp/best3.json")): best[T,kind,shape]=(how,tuple(t))
which="today"
Q_reg=L.register_tiles
L.register_tiles=lambda *a: None
tiles_of,launch=L._tiles,L._launch
def _tiles(x,weight,gated):
    if which=="ws" and x.is_cuda and x.dim()==2 and x.dtype==torch.bfloat16:
        T=x.shape[0]; key=(1 if T==1 else 6 if T<=8 else 32 if 16<T<=32 else 0,weight.kind,SH.get((weight.codes_OJ.shape[0],weight.columns)))
        if key in best and best[key][0]!="H": return best[key]
    return tiles_of(x,weight,gated)
def _launch(x,weight,bias,gated,tiles):
    if type(tiles) is tuple: return (ws.launch_wide if tiles[0]=="W" else ws.launch_sliced)(x,weight,bias,gated,tiles[1])[1]
    return launch(x,weight,bias,gated,tiles)
L._tiles,L._launch=_tiles,_launch
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
