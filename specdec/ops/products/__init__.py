"""All products of activations with weights: which kernel serves which rows, and the policy that is asked about such choices.

A weight is an object that multiplies (`Weight` in weight.py): `DenseWeight`, `LosslessWeight` (12 bits a value, beside the
dense weight) or `QuantisedWeight` (8 and 4 bits); experts.py and stacked.py multiply with stacks of matrices.  Each asks the
policy (numerics.py), whose answer (tiles/) names a kernel in kernels/ and its tiles, or leaves the product to a library.

M is the rows of x, N the rows of the weight, K the columns of both.

| kernel | bits | M | GPUs | why it stays |
|---|---|---|---|---|
| dense/stream_triton | 16, 32 | 1-64 | 9.0 and later | with a norm in front, cuBLAS never wins: it can't start early |
| dense/stream_hopper | 16 | 1-256 | those like an H200 | a layer of one row in 113 us instead of 124 |
| dense/one_row_hopper | 16 | 1-1 | those like an H200 | registers hold a small weight before x exists: 2.5 us in place of 4.8 |
| dense/held_rows_hopper | 16 | 2-192 | those like an H200 | the same with the tensor cores: 2.7 us in place of 4.9 |
| dense/large_n_triton | 16 | 65-192 | 9.0 and later | gate and up, and other large N, nearer to memory's speed than cuBLAS |
| dense/gated_hopper | 16 | 513- | those like an H200 | gate and up of prompts: SiLU-mul costs nothing |
| dense/tiled_triton | 16 | 65- | 9.0 | sums in stream_triton's order, for deterministic decoding; small weights |
| quantised/stream_triton | 8, 4 | 1-64 | 9.0 and later | forms and GPUs that the kernels for Hopper don't take |
| quantised/warp_hopper | 12, 8, 4 | 1-8 | 9.0 | latency: warps that multiply alone wait for each other once a step |
| quantised/warpgroup_hopper | 12, 8, 4 | 9-2048 | 9.0 | as above with wgmma; in 12 bits up to 64 rows |
| quantised/dequantise_triton | 8, 4 | 1- | all | the dense weight, for cuBLAS, where no kernel above multiplies |
| experts/mixture_triton | 8, 4 | 1- | 9.0 and later | 1.7 to 7 times as fast as dequantising first |
| experts/few_tokens_triton | 16, 8, 4 | 1-64 | 9.0 and later | a mixture in two launches: 24 us in place of 71 at one token |
| quantised/few_hopper | 8, 4 | 1-8 | 9.0 | words go from memory to the tensor cores: a layer in 29 us in place of 43 |
| experts/router_triton | 16, 32 | 1-256 | 8.0, 9.0 and later | logits and choice in one launch: 6 us in place of 23 |
| experts/norm_router_triton | 16 | 1-1 | 8.0, 9.0 and later | one token's router and the norm in front of it: a launch less |
| experts/router_many_triton | 16, 32 | 257- | 8.0, 9.0 and later | as above: a program reads the whole weight |
| experts/grouped_hopper | 16 | 65- | 9.0 | many rows an expert: the activation costs nothing |
| experts/stacked_triton | 16 | 1- | 9.0 and later | sorted pairs, up to 64 an expert; in one order of sums: heads, routers |

Measured: benchmarks/products/README.md.  cuBLAS, or torch's grouped product (grouped.py), takes the rest on a GPU; a CPU,
autograd and traces take the definitions.
"""
