# int4: rounds with the best tiles that int4-2 left in /tmp/best.json (run it after int4-2, on the same machine)
timeout 117 python3 -P .x/rounds2.py best:int4:none:plain:1:1024+5,8,32:1:1024 best:fp8:none:plain:1:1024+5,8,32:1:1024+plain:32:1024 best:fp8:fp8:5,8,32:1:1024
