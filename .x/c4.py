exec(open('.x/comp.py').read())
from specdec.ops.quantised.linear_hopper import launch_quantised_hopper
from specdec.ops.quantised.tiles import HopperTiles
S={"qkv":(6144,4096),"o":(4096,4096),"gate_up":(28672,4096),"down":(4096,14336)}
for kind,group,shape,T,t in [("int4",128,"gate_up",32,(32,128,256,1,4,2,0)),("int4",128,"gate_up",32,(32,256,256,1,8,4,0)),("int4",128,"gate_up",32,(32,256,128,1,8,8,0)),("e4m3",0,"gate_up",32,(32,256,128,1,8,4,0)),("int4",128,"o",32,(32,64,256,2,4,4,0)),("int4",128,"gate_up",64,(64,256,128,1,8,5,0))]:
    O,I=S[shape]
    x=torch.zeros(T,I,dtype=torch.bfloat16)
    launch_quantised_hopper(x,weight(kind,O,I,group),None,shape=="gate_up",HopperTiles(*t))
    show(last[-1],f"wg_{kind}_{shape}_{T}_{t}".replace(' ','').replace('(','').replace(')',''))
