"""Compiles the kernels that read packed weights for a Hopper GPU, on a machine that needs none.  Run it in a process of its
own, with the folder of tests on the path."""

import torch

from specdec.ops.products.formats.lossless import pack_weight
from specdec.ops.products.gpus import H200
from specdec.ops.products.kernels.quantised import hopper_launch
from specdec.ops.products.tiles.lossless import packed_tiles
from toolkit.attention.compiled.hopper import compile_only

if __name__ == "__main__":
    compiled_names: set[str] = set()
    compile_only(compiled_names)
    hopper_launch.chained = lambda device: {"PDL": True, "launch_pdl": True}  # type: ignore[attr-defined, assignment]
    for T, O, I, gated in ((1, 1024, 512, False), (6, 16384, 256, True), (32, 4096, 1024, False), (60, 16384, 256, True)):
        packed, tiles = pack_weight(0.02 * torch.randn(O, I).bfloat16()), packed_tiles(T, O, I, gated, H200)
        assert packed is not None and tiles is not None
        hopper_launch.launch_quantised_hopper(torch.zeros(T, I, dtype=torch.bfloat16), packed, None, gated, tiles, not gated)
    print(*sorted(compiled_names))
