"""What others make of the same files: compressed-tensors itself, where it is installed, and ranks that hold a part each."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from toolkit.heads.compressed import compressed_by_its_own
from toolkit.models import save_target
from toolkit.oracles.quantised import SCHEMES, SIZES, save_quantised

from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.frame import check_tensors, load_family, open_target
from specdec.models.linear import Linear
from specdec.models.registry import choose_target, family_of
from specdec.models.schemes.config import parse_quantization
from specdec.models.sharding import share_of
from specdec.parallel.shard import WHOLE, Shard

SHAPE = (256, 384)


def read(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> torch.Tensor:
    """What the matrix "m" of these tensors stands for."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    checkpoint = Checkpoint(folder, quantization=parse_quantization(json.loads(json.dumps(config)), "config.json"))
    format = checkpoint.format_of("m")
    assert format is not None
    rows = format.read(checkpoint, "m", SHAPE, torch.device("cpu"))
    assert rows is not None
    checkpoint.finish()
    return rows.dense(torch.float32)


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(
    "preset", ["FP8", "FP8_DYNAMIC", "FP8_BLOCK", "W4A16", "W4A16_ASYM", "W8A16", "NVFP4A16", "NVFP4", "MXFP4A16", "MXFP4"]
)
def test_compressed_tensors_own_files(tmp_path: Path, preset: str) -> None:
    """Keeps out: a layout that our own writer and reader agree about, and compressed-tensors does not."""
    pytest.importorskip("compressed_tensors")
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)) / SHAPE[1] ** 0.5
    written, config, numbers = compressed_by_its_own({"m": weight}, preset, [], tmp_path)
    found, wanted = read(tmp_path, written, config), numbers["m"]
    rtol = 2**-6 if wanted.dtype == torch.bfloat16 else 2e-7
    torch.testing.assert_close(found, wanted.float(), rtol=rtol, atol=0)


def test_compressed_tensors_reading_of_others_files(tmp_path: Path) -> None:
    """compressed-tensors' converters of AWQ, ModelOpt's nvfp4 and DeepSeek's fp8.  Keeps out: nibbles in another order."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
    from compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer import FP8BlockDequantizer
    from compressed_tensors.entrypoints.convert.converters.modelopt_nvfp4 import ModelOptNvfp4Converter

    def written(name: str) -> dict[str, torch.Tensor]:
        tensors, _ = SCHEMES[name].write(*SHAPE, torch.Generator().manual_seed(0))
        return {f"m.{ending}": tensor.contiguous() for ending, tensor in tensors.items()}

    own = written("awq")
    made = AutoAWQConverter(group_size=32).process(dict(own))
    scale = made["m.weight_scale"].float()
    qvalues = unpack_from_int32(made["m.weight_packed"], 4, torch.Size(SHAPE)).float()
    zero_points = unpack_from_int32(made["m.weight_zero_point"], 4, scale.shape, packed_dim=0).float()
    numbers = (qvalues - zero_points.repeat_interleave(32, 1)) * scale.repeat_interleave(32, 1)
    torch.testing.assert_close(read(tmp_path, own, SCHEMES["awq"].config), numbers, rtol=2e-7, atol=0)

    own = written("deepseek fp8")
    numbers = FP8BlockDequantizer(targets=["m"]).process(dict(own))["m.weight"]
    found = read(tmp_path, own, SCHEMES["deepseek fp8"].config)
    torch.testing.assert_close(found.to(numbers.dtype), numbers, rtol=0, atol=0)

    own = written("modelopt nvfp4")
    made = ModelOptNvfp4Converter(targets=["m"]).process(dict(own))
    as_theirs = read(tmp_path, made, SCHEMES["nvfp4"].config)
    torch.testing.assert_close(read(tmp_path, own, SCHEMES["modelopt nvfp4"].config), as_theirs, rtol=1e-6, atol=0)


def matrices(folder: Path, quantize: str, shard: Shard) -> dict[tuple[str, str], torch.Tensor]:
    """What a rank holds of each part of each matrix, in numbers."""
    config = choose_target(folder, quantize=quantize).config
    family = family_of(config.family)
    assert family is not None
    checkpoint = open_target(folder, config)
    check_tensors(checkpoint, family, config)
    model = load_family(family, checkpoint, config, 64, torch.device("cpu"), torch.float32, shard)
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            own = module.rows(torch.arange(module.out_features)).detach()
            found |= {(name, part): own[module.parts.rows[part]] for part in module.parts.sizes}
    return found


CUT = (
    "fp8 tensor",
    "fp8 channel",
    "fp8 block",
    "w4a16 g32 asym",
    "w4a16 g0",
    "w8a16 g64",
    "awq",
    "gptq4 v1 asym",
    "mxfp4",
)


@pytest.mark.slow_cases(keep=4)
@pytest.mark.parametrize("name", [*CUT, "nvfp4", "modelopt nvfp4", "deepseek fp8", "fp8", "int4"])
def test_what_ranks_hold_is_the_whole(tmp_path: Path, name: str) -> None:
    """Keeps out: a cut of quantised values without that of their scales or zero points, in any format."""
    sizes = SIZES | dict(num_hidden_layers=1, **({"hidden_size": 256, "head_dim": 64} if "deepseek" in name else {}))
    if name in SCHEMES:
        folder, quantize = save_quantised(tmp_path, SCHEMES[name], **sizes)[0], "none"
    else:  # both groups of int4: 128 and 32 columns, whole on either rank
        own = dict(head_dim=48, num_attention_heads=4, num_key_value_heads=2, intermediate_size=256)
        folder, quantize = save_target(tmp_path, "llama", **sizes | own), name
    whole = matrices(folder, quantize, WHOLE)
    ranks = [matrices(folder, quantize, Shard(rank, 2)) for rank in range(2)]
    for key, numbers in whole.items():
        dim = int(key[0].endswith(("o_proj", "down_proj")))
        torch.testing.assert_close(torch.cat([rank[key] for rank in ranks], dim), numbers, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["gptq4 in act order", "w4a16 g32 asym in act order"])
def test_ranks_can_not_share_columns_in_act_order(tmp_path: Path, name: str) -> None:
    """Keeps out: a rank that takes its run of sorted columns, which are others than those of its inputs; ranks that are started
    before that shows; and a nearest number of them that is refused in turn.
    """
    folder = save_quantised(tmp_path, SCHEMES[name], num_hidden_layers=1)[0]
    config = choose_target(folder).config
    for size in (2, 3, 4):
        with pytest.raises(ValueError, match=rf"got {size}; nearest setting that works: tensor_parallel_size=1"):
            share_of(config, Shard(0, size))
    with pytest.raises(ValueError, match=r"intermediate_size, which are in act order .desc_act, actorder., evenly, got 2"):
        share_of(config, Shard(0, 2))
