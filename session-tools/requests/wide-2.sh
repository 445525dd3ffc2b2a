# products of 65 to 512 rows: the other numbers of rows, beside cuBLAS and today's, and whole layers
LIMIT=90 ROWS=192,128,256,96,384,512 timeout 118 python3 -P sweep/wide_sweep.py 2>&1
