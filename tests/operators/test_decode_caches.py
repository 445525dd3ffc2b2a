"""Decode passes over caches in 8 bits and over sparse latents, exported, compiled and saved, against the direct pass."""

from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest
import torch
from toolkit.deepseek import SPARSES, DeepseekZoo, save_sparse
from toolkit.models import Zoo
from toolkit.operators.passes import PAGE, check, copied, directly, inputs, load
from toolkit.trees import random_masks

from specdec.attention.caches.quant_cache import FP8_MAX, HEADROOM, QuantView
from specdec.operators import DecodePass, export_decode
from specdec.operators.given_cache import SCALE, check_cache_dtype

CASES = [
    ("v32-dense-biases", "auto"), ("llama", "fp8"), ("v3-wide-latents", "fp8_ds_mla"), ("glm-shared", "auto"),
    ("v32-wide", "fp8_ds_mla"), ("diffllama", "fp8"),
]  # fmt: skip
FEW = (CASES[1], CASES[3], CASES[4])  # an export takes seconds of a CPU; a GPU has all

OWN = {  # name: of which sparse target, and what differs from it; a layer takes a second to trace
    "v32-wide": ("v32-dense-biases", dict(kv_lora_rank=128, num_hidden_layers=2)),
    "v32-layer": ("v32-dense-biases", dict(num_hidden_layers=1)),
    "glm-shared": ("glm-shared", dict(num_hidden_layers=3, indexer_types=["full", "full", "shared"])),
}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("shallow"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def folder(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a random target of that name."""
    deepseeks, sparse = DeepseekZoo(tmp_path_factory.mktemp("deepseeks")), tmp_path_factory.mktemp("sparse")

    def found(name: str) -> Path:
        if name in OWN and not (sparse / name).is_dir():
            save_sparse(sparse / name, OWN[name][0], **OWN[name][1])
        if name in SPARSES and not (sparse / name).is_dir():
            save_sparse(sparse / name, name)
        return sparse / name if (sparse / name).is_dir() else (deepseeks if name.startswith("v") else zoo).target(name)

    return found


@pytest.mark.slow_cases
@pytest.mark.parametrize(("name", "dtype"), FEW)
def test_a_saved_program_serves_all_shapes(folder: Callable[[str], Path], name: str, dtype: str) -> None:
    """Keeps out: a scale, or how many keys a query selects, frozen into the graph; a layer that reads another one's choice."""
    decode, file = DecodePass(load(folder(name)), PAGE, dtype), BytesIO()
    torch.export.save(export_decode(decode), file)
    file.seek(0)
    program = torch.export.load(file).module()
    for lens, N in (([5, 0, 9], 1), ([1, 30], 4), ([3] * 6, 7)):
        check(decode, program, inputs(decode, lens, N, extra=0))


@pytest.mark.slow_cases
@pytest.mark.parametrize(("name", "dtype"), FEW)
def test_a_node_of_a_tree_gets_the_logits_of_its_path(folder: Callable[[str], Path], name: str, dtype: str) -> None:
    """Keeps out: a node that selects a sibling's key, and a path that the selection misses."""
    decode = DecodePass(load(folder(name)), PAGE, dtype)
    program = export_decode(decode, trees=True).module()
    given, masks_BNN = inputs(decode, [9, 0, 17], 6), random_masks(3, 6, seed=6)
    with torch.no_grad():
        logits_BNV = program(*copied(given), masks_BNN)
    for b, node in ((0, 0), (0, 5), (1, 3), (2, 4), (2, 5)):
        path = masks_BNN[b, node].nonzero()[:, 0]
        alone = (given[0][b : b + 1, path], given[1][b : b + 1], given[2][b : b + 1], copied(given)[3])
        torch.testing.assert_close(logits_BNV[b, node], directly(decode, alone)[0, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.slow_cases(keep=1)
@pytest.mark.parametrize(("name", "dtype"), [("v32-layer", "auto"), ("llama", "fp8")])
def test_compiled_whole_it_equals_the_direct_pass(folder: Callable[[str], Path], name: str, dtype: str) -> None:
    """Keeps out: a graph break between the indexer and attention, or at a cache in 8 bits."""
    torch._dynamo.reset()
    decode = DecodePass(load(folder(name)), PAGE, dtype)
    program = torch.compile(decode, fullgraph=True, backend="aot_eager")
    for lens, N, extra in (([1, 2], 1, 0), ([7, 20], 2, 2)):  # the indexer's queries may read all keys of the first
        check(decode, program, inputs(decode, lens, N, extra=extra))


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_on_a_gpu_a_traced_pass_equals_the_direct_one(folder: Callable[[str], Path], name: str, dtype: str) -> None:
    """Keeps out: kernels of a traced pass that get their cache, or the selected keys, in another way than in a direct one."""
    decode = DecodePass(load(folder(name), "cuda"), PAGE, dtype)
    torch._dynamo.reset()
    compiled = torch.compile(decode, fullgraph=True, backend="eager")
    for program in (export_decode(decode).module(), compiled):
        for lens, N in (([5, 0, 9], 1), ([7, 40], 1), ([1, 6], 3)):
            check(decode, program, inputs(decode, lens, N), 1e-4)


def test_scales_are_set_once_from_the_first_tokens(zoo: Zoo) -> None:
    """Keeps out: scales that differ from those that the runtime would set, and passes over a cache that has none yet."""
    decode = DecodePass(load(zoo.target("llama")), PAGE, "fp8")
    tokens_BN, table_BW, lens_B, _ = inputs(decode, [0, 0], 6)
    cache, other, untouched = (decode.new_cache(table_BW.numel() * PAGE) for _ in range(3))
    assert all(layer[SCALE].isnan().all() for layer in cache)
    with torch.no_grad():
        assert decode(tokens_BN, table_BW, lens_B, untouched).isnan().all(), "a pass without scales is no silent mistake"
    logits_BNV = decode.set_scales(tokens_BN, table_BW, lens_B, cache)
    for mine, layer in zip(other, cache, strict=True):
        mine[SCALE].copy_(layer[SCALE])
    torch.testing.assert_close(logits_BNV, directly(decode, (tokens_BN, table_BW, lens_B, other)))
    slots_T = (table_BW[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1)[:, :6].flatten().long()
    for layer in cache:
        heads = QuantView(layer["kv"], scale_2K=layer[SCALE]).read(slots_T, torch.float32)
        largest_2K = torch.stack(heads, 1).abs().amax((0, 3))
        torch.testing.assert_close(largest_2K, layer[SCALE] * FP8_MAX / HEADROOM, rtol=0.07, atol=0)
    with pytest.raises(ValueError, match="set_scales needs kv_cache_dtype='fp8', got 'int8'"):
        DecodePass(decode.target, PAGE, "int8").set_scales(tokens_BN, table_BW, lens_B, cache)


def test_a_checkpoint_s_scales_are_kept(zoo: Zoo) -> None:
    """Keeps out: scales of a checkpoint that the first tokens overwrite."""
    target = load(zoo.target("llama"))
    attention = target.layers[1].self_attn
    attention.kv_scale_2K = torch.full((2, target.config.num_kv_heads), 0.5)
    decode = DecodePass(target, PAGE, "fp8")
    tokens_BN, table_BW, lens_B, _ = inputs(decode, [0], 6)
    cache = decode.new_cache(table_BW.numel() * PAGE)
    decode.set_scales(tokens_BN, table_BW, lens_B, cache)
    assert bool((cache[1][SCALE] == 0.5).all()) and not bool((cache[0][SCALE] == 0.5).any())


def test_an_old_gpu_refuses_float8(zoo: Zoo) -> None:
    """Keeps out: a kernel that does not compile where the setting's name would have said why."""
    config, gpu = load(zoo.target("llama")).config, torch.device("cuda")
    with pytest.raises(ValueError, match="'fp8' needs a GPU of compute capability 8.9 or later, got 8.0; nearest.*='auto'"):
        check_cache_dtype(config, "fp8", gpu, lambda _: (8, 0))
    check_cache_dtype(config, "fp8", gpu, lambda _: (9, 0))
    check_cache_dtype(config, "int8", gpu, lambda _: (8, 0))
