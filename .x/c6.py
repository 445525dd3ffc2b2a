exec(open('.x/comp.py').read())
import specdec.ops.quantised.linear_registers as R
from specdec.ops.quantised.tiles import RegisterTiles
R.chained=H.chained; R.arrivals_of=lambda d:z
S={"qkv":(6144,4096),"o":(4096,4096),"gate_up":(28672,4096),"down":(4096,14336)}
def weight2(kind,O,I,group,zeros=False):
    w=weight(kind,O,I,group)
    return w._replace(zeros_OG=torch.zeros(w.scales_OG.shape,dtype=torch.int8)) if zeros else w
for kind,group,zeros,shape,T,t in [("int4",128,False,"o",1,(1,16,1,8,8,2,0)),("int4",128,False,"gate_up",1,(1,64,1,4,1,2,0)),("int4",128,True,"gate_up",1,(1,64,1,4,1,2,0)),("int4",128,False,"down",6,(8,16,1,8,8,2,0)),("e4m3",0,False,"o",1,(1,16,1,8,8,4,0)),("e4m3",128,False,"gate_up",1,(1,64,1,4,1,2,0)),("int8",0,False,"o",8,(8,16,1,8,8,2,0)),("int4",0,False,"o",8,(8,16,1,8,8,2,0)),("int4",128,False,"o",8,(8,16,3,8,8,2,0))]:
    O,I=S[shape]
    x=torch.zeros(T,I,dtype=torch.bfloat16)
    R.launch_quantised_registers(x,weight2(kind,O,I,group,zeros),None,shape=="gate_up",RegisterTiles(*t))
    show(last[-1],f"r_{kind}{group}{zeros}_{shape}_{T}_{t}".replace(' ','').replace('(','').replace(')',''))
