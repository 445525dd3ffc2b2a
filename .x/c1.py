exec(open('.x/comp.py').read())
S={"qkv":(6144,4096),"o":(4096,4096),"gate_up":(28672,4096),"down":(4096,14336)}
for kind,group,shape,T,t in [("int4",128,"o",1,(1,16,1,8,4,8,True,0)),("int4",128,"gate_up",1,(1,16,1,1,4,1,True,0)),("e4m3",0,"o",1,(1,16,1,8,4,8,True,0)),("int4",128,"down",6,(8,16,1,8,4,8,True,0)),("int4",128,"gate_up",6,(8,32,1,1,4,1,True,128)),("e4m3",0,"gate_up",1,(1,16,1,2,4,1,True,128))]:
    O,I=S[shape]
    x=torch.zeros(T,I,dtype=torch.bfloat16)
    D.launch_direct(x,weight(kind,O,I,group),None,shape=="gate_up",t)
    show(last[-1],f"{kind}_{shape}_{T}")
