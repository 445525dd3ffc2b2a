"""Products with weights in 8 or 4 bits, which are converted in registers on their way to the tensor cores.

The kernels for Hopper GPUs read packed weights (ops/packed) too.
"""
