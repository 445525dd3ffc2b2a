import sys, torch, re, subprocess, tempfile
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
class NoGpu:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
driver.set_active(NoGpu())
last=[]
def of_grid(kernel, grid):
    def launch(*a, **o):
        last.append(kernel.run(*a, grid=grid, warmup=True, **o))
    return launch
JITFunction.__getitem__ = of_grid
class D: pass

import specdec.ops.quantised.linear_hopper as H
H.chained = lambda d: dict(PDL=True, launch_pdl=True)
from specdec.ops.quantised.codes import Codes, row_bytes
z=torch.zeros(1024,dtype=torch.int32)

H.arrivals_of=lambda d:z
def weight(kind,O,I,group): return Codes(kind, torch.zeros(O,row_bytes(kind,I),dtype=torch.uint8), torch.zeros(O,I//(group or I)), None, I, group)
def show(k,name):
    cub=k.asm['cubin']; f=tempfile.NamedTemporaryFile(suffix='.cubin'); f.write(cub); f.flush()
    b='/work/main/.venv/lib/python3.11/site-packages/triton/backends/nvidia/bin/'
    res=subprocess.run([b+'cuobjdump','-res-usage',f.name],capture_output=True,text=True).stdout
    m=re.search(r'REG:(\d+) STACK:(\d+) SHARED:(\d+)',res)
    sass=subprocess.run([b+'nvdisasm','-c',f.name],capture_output=True,text=True).stdout
    open(f'/tmp/{name}.sass','w').write(sass)
    ins=re.findall(r'^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([A-Z0-9_.]+)',sass,re.M)
    from collections import Counter
    c=Counter(i.split('.')[0] for i in ins)
    print(name, 'regs',m.groups() if m else res[-300:], 'smem', k.metadata.shared, 'n', len(ins), dict(c.most_common(18)), {i:n for i,n in Counter(ins).items() if i.startswith(('LDG','LDL','STL'))})
