"""rounds with tiles that the sweep found: argv: FILE, then quantize:draft:case+case..."""
import sys, json, os, time
sys.path.insert(0,'benchmarks')
import torch
import specdec.ops.quantised.linear as L
from specdec.ops.quantised.tiles import HopperTiles, hopper_tiles
SHAPES={(6144,4096):"qkv",(4096,4096):"o",(28672,4096):"gate_up",(4096,14336):"down"}
# the head's own shapes take the policy's tiles
best={}
for row in json.load(open(sys.argv[1]))["layers"]:
    if "best" in row:
        for name,t in row["best"].items(): best[row["kind"],{1:1,6:8}.get(row["T"],row["T"]),name]=HopperTiles(*t)
FIXED={}
def tiles_of(T,O,I,kind,group,zeros,gated):
    own=hopper_tiles(T,O,I,kind,group,zeros,gated)
    if own is None: return None
    key=(kind,own.block_t,SHAPES.get((O,I)))
    return FIXED.get(key) or best.get(key) or own
L.hopper_tiles=tiles_of
from rounds import round_8b as R
def main():
    t0=time.time(); rows=[]; last=None
    for arg in sys.argv[2:]:
        quantize,draft,cases=arg.split(":",2)
        if last!=(quantize,draft):
            model=head=None; torch.cuda.empty_cache()
            torch.manual_seed(0)
            with torch.no_grad():
                model,head=R.random_pair(4096,torch.device("cuda",0))
                R.round_weights(model,quantize,but=model.lm_head)
                if draft!="none": R.round_weights(head,draft)
            torch.cuda.empty_cache(); last=quantize,draft
        for name in cases.split("+"):
            case=next(case for case in R.CASES if case.name==name)
            rows.append({**R.measure(model,head,case,60,"round"),"quantize":quantize,"draft_quantize":draft})
            print(quantize,draft,f"{time.time()-t0:.0f}s"); R.show(rows[-1])
            torch.cuda.empty_cache()
            json.dump({"device":torch.cuda.get_device_name(),"date":time.strftime("%Y-%m-%d"),"weights":"random","dtype":"bfloat16","read_bandwidth":R.this_gpu().read_bandwidth,"rows":rows},open(os.environ.get("R","/tmp")+"/rounds.json","w"))
main()
