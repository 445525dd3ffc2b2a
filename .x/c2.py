exec(open('.x/comp.py').read())
S={"qkv":(6144,4096),"o":(4096,4096),"gate_up":(28672,4096),"down":(4096,14336)}
# block_t, block_o, splits, warps, ahead, slices, x_ahead, maxnreg
for kind,group,shape,T,t in [("int4",128,"gate_up",1,(1,64,1,4,2,1,True,0)),("int4",128,"gate_up",1,(1,64,1,4,3,1,True,128)),("int4",128,"gate_up",1,(1,64,1,4,2,1,False,0)),("int4",128,"gate_up",1,(1,64,1,8,2,2,True,80)),
  ("int4",128,"o",1,(1,16,1,8,2,8,True,64)),("int4",128,"down",1,(1,16,1,8,2,8,True,80)),("e4m3",0,"gate_up",1,(1,64,1,4,2,1,True,80)),("int4",128,"gate_up",8,(8,128,1,4,1,1,False,128)),("e4m3",0,"gate_up",16,(16,64,1,4,2,1,False,128))]:
    O,I=S[shape]
    x=torch.zeros(T,I,dtype=torch.bfloat16)
    D.launch_direct(x,weight(kind,O,I,group),None,shape=="gate_up",t)
    show(last[-1],f"{kind}_{shape}_{T}_{t}".replace(' ','').replace('(','').replace(')',''))
