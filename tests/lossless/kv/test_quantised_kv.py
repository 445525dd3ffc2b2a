"""Whole engines on 8-bit KV: the text is the target's own over a cache of the same dtype, whatever the tree.

The oracle has no cache: one dense forward over the whole text, in which keys and values are rounded as the cache would.
Passes of other shapes differ in the last bit, and a value midway between two steps then falls to either side.  So a token
counts as the best if it is within the noise of 8-bit KV of it, and texts must be equal where no token was as near as that.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from toolkit.driver import Driver
from toolkit.models import COMMON, HEADS, Zoo, ragged_prompts, save_target
from toolkit.oracles.stored import hold_stored_text, is_clearly_the_oracle_s_text

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.attention.caches.int8_keys import rounded_queries
from specdec.attention.caches.quant_cache import as_stored
from specdec.attention.eager.dense import DenseAttention
from specdec.cli.entry import build_parser
from specdec.cli.flags import engine_of
from specdec.engine.pages.groups import ALL
from specdec.loading.memory import kv_page_bytes
from specdec.lossless.reference import passes_of
from specdec.session import Session

CASES = [
    ("llama", "eagle3", (4, 1, 5), 1, 8, "int8"),
    ("llama", "eagle1", (3, 8, 40), 16, 3, "fp8"),
    ("llama3-tied-dim8", "eagle1", (5, 1, 6), 16, 3, "fp8"),
    ("llama-dim80-biases", "eagle3-full", (4, 4, 16), 64, 8, "int8"),
    ("mistral", "eagle1-window", (4, 2, 13), 5, 3, "int8"),
    ("qwen2", "eagle3", (5, 4, 30), 1, 3, "fp8"),
    ("qwen3", "eagle1-two-layers", (3, 3, 10), 64, 1, "int8"),
    ("qwen3", "eagle3-window", (3, 2, 7), 4, 8, "fp8"),
    ("llama-dim80-biases", "eagle3", (4, 2, 9), 4, 3, "int8_keys"),
    ("mistral", "eagle1-window", (3, 3, 10), 5, 3, "int8_keys queries"),
    ("qwen3", "eagle3", (4, 1, 5), 16, 3, "int8 queries"),
]
STORED = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "int8_keys": torch.uint8}  # the buffer of keys and values


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("target", "head", "shape", "page_size", "batch", "kind"), CASES, ids=lambda v: str(v).replace(" ", "")
)
def test_generate_equals_the_oracle(
    zoo: Zoo, target: str, head: str, shape: tuple[int, int, int], page_size: int, batch: int, kind: str
) -> None:
    """Keeps out: scales that a commit does not move, or of another request's page; a draft that changes the text."""
    kept, rounds_queries = kind.removesuffix(" queries"), kind.endswith("queries")
    settings: dict[str, Any] = dict(page_size=page_size, max_batch_size=batch, kv_cache_dtype=kept, int8_queries=rounds_queries)
    decoder = zoo.decoder(target, head, SpecConfig(*shape), **settings)
    prompts = ragged_prompts(COMMON["vocab_size"], 7)[::-1]
    sampling = [SamplingParams(max_tokens=n) for n in (20, 7, 24, 1, 13, 2, 18)]
    hold_stored_text(decoder, prompts, sampling)
    for cache in Driver(decoder).caches:
        assert cache.buffers["kv"].dtype == STORED[kept]


@pytest.mark.slow
def test_8_bit_text_is_not_16_bit_text(zoo: Zoo) -> None:
    """Keeps out: a test suite that would pass with the setting ignored."""
    prompts, sampling = ragged_prompts(40, 8), SamplingParams(max_tokens=24)
    texts = [
        [out.token_ids for out in zoo.decoder("llama", "eagle1", kv_cache_dtype=kind).generate(prompts, sampling)]
        for kind in ("auto", "int8", "fp8")
    ]
    assert texts[0] != texts[2] and texts[1] != texts[2]


def test_sampled_text_does_not_depend_on_speculation(zoo: Zoo) -> None:
    decoder = zoo.decoder("llama", "eagle3", SpecConfig(4, 3, 12), kv_cache_dtype="int8")
    prompts = ragged_prompts(40, 4, seed=3)
    sampling = [SamplingParams(max_tokens=16, temperature=1.0, seed=seed) for seed in range(4)]
    outputs = [decoder.generate(prompts, sampling, speculate=speculate) for speculate in (True, False)]
    assert [out.token_ids for out in outputs[0]] == [out.token_ids for out in outputs[1]]


@pytest.mark.parametrize("kind", ["auto", "fp8", "int8", "int8_keys"])
def test_the_pool_is_counted_in_the_bytes_it_takes(zoo: Zoo, kind: str) -> None:
    """Keeps out: a pool sized for 16 bit, which would hold half as many requests as it could."""
    decoder = zoo.decoder("llama", "eagle3", page_size=4, max_batch_size=2, kv_cache_dtype=kind)
    taken = sum(buffer.nbytes for cache in Driver(decoder).caches for buffer in cache.buffers.values())
    assert decoder.head is not None
    configs = [decoder.model.config, decoder.head.config.model]
    assert taken == Driver(decoder).pages_allocated * kv_page_bytes(configs, decoder.settings, (ALL,))[0]


def test_a_wrong_setting_is_refused(zoo: Zoo) -> None:
    with pytest.raises(
        ValueError, match="kv_cache_dtype must be 'auto', 'fp8', 'int8', 'int8_keys' or 'fp8_ds_mla', got 'fp16'"
    ):
        zoo.decoder("llama", kv_cache_dtype="fp16")


# ---- a checkpoint's own scales ----

NAMES = ["{}.k_scale {}.v_scale", "{}.attn.k_scale {}.attn.v_scale", "{}.k_proj.k_scale {}.v_proj.v_scale",
         "{}.k_proj.output_scale {}.v_proj.output_scale"]  # fmt: skip


def add(folder: Path, tensors: dict[str, Any]) -> Path:
    path = folder / "model.safetensors"
    save_file({**load_file(path), **tensors}, path)
    return folder


@pytest.mark.slow_cases
@pytest.mark.parametrize("names", NAMES, ids=lambda names: names.split(" ")[0])
def test_a_checkpoint_s_scales_are_used(tmp_path: Path, names: str) -> None:
    """Keeps out: scales that load and are then computed anew, a key's on values, one layer's on another, one head's on all."""
    layers, scales = range(4), torch.rand(4, 2, 2) + 0.5
    tensors: dict[str, Any] = {"model.layers.0.self_attn.q_scale": torch.ones(1)}
    for layer in layers:
        for i, name in enumerate(names.format(*2 * [f"model.layers.{layer}.self_attn"]).split()):
            one = layer == 2  # per tensor, a number without dimensions
            tensors[name] = scales[layer, i, 0].clone() if one else scales[layer, i].clone()
    scales[2, :, 1] = scales[2, :, 0]
    target = add(save_target(tmp_path / "target", "llama"), tensors)
    head = HEADS["eagle3"](tmp_path / "head", target)
    add(head, {"midlayer.self_attn.k_scale": torch.tensor([0.7]), "midlayer.self_attn.v_scale": torch.tensor([0.9])})
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_seq_len": 64}
    decoder = SpecDecoder.from_pretrained(target, head, kv_cache_dtype="fp8", **settings)
    (out,) = decoder.generate([[1, 2, 3]], SamplingParams(max_tokens=12))
    for layer in layers:
        assert torch.equal(Driver(decoder).cache("target").view(layer).scale_2K, scales[layer])
    assert Driver(decoder).cache("draft").view(0).scale_2K.tolist() == [[pytest.approx(0.7)] * 2, [pytest.approx(0.9)] * 2]
    is_clearly_the_oracle_s_text(decoder, out)
    for kind in ("auto", "int8"):  # which need none
        SpecDecoder.from_pretrained(target, head, kv_cache_dtype=kind, **settings).generate(
            [[1, 2]], SamplingParams(max_tokens=3)
        )


K_SCALE, V_SCALE = "model.layers.1.self_attn.k_scale", "model.layers.1.self_attn.v_scale"


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({K_SCALE: torch.ones(1)}, "'model.layers.1.self_attn.v_scale' is missing"),
        (
            {K_SCALE: torch.ones(3), V_SCALE: torch.ones(1)},
            "k_scale must be one positive .* or one for each of 2 kv heads",
        ),
        ({K_SCALE: torch.ones(1), V_SCALE: torch.zeros(1)}, "v_scale must be one positive number"),
        ({K_SCALE: torch.ones(1), V_SCALE: torch.tensor([torch.nan])}, "v_scale must be one positive number"),
        ({"model.layers.1.mlp.k_scale": torch.ones(1)}, "not part of this architecture: model.layers.1.mlp.k_scale"),
        (
            {K_SCALE: torch.ones(1), V_SCALE: torch.ones(1), "model.layers.1.self_attn.k_proj.k_scale": torch.ones(1)},
            "not part of this architecture: .*k_proj.k_scale",
        ),
    ],
)
def test_scales_that_can_not_be_meant_are_refused(tmp_path: Path, tensors: dict[str, Any], match: str) -> None:
    """Keeps out: one scale of a pair, scales for another number of heads, 0 and NaN, two different scales for one layer."""
    target = add(save_target(tmp_path, "llama"), tensors)
    with pytest.raises(ValueError, match=match):
        SpecDecoder.from_pretrained(target, device="cpu", dtype="float32", max_seq_len=64)


FP8_KV = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "tensor"}
WEIGHTS = {"group_0": {"weights": {"num_bits": 8, "type": "float"}, "targets": ["Linear"]}}


@pytest.mark.parametrize(
    ("scheme", "loads"),
    [
        ({"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": FP8_KV}, True),
        ({"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}, True),
        ({"quant_method": "compressed-tensors", "config_groups": WEIGHTS, "kv_cache_scheme": FP8_KV}, False),
        ({"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {**FP8_KV, "type": "int"}}, False),
        ({"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": None}, False),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, False),
        ({"quant_method": "fp8"}, False),
    ],
)
def test_a_scheme_of_keys_and_values_alone_loads(tmp_path: Path, scheme: dict[str, Any], loads: bool) -> None:
    """Keeps out: quantised weights read as plain ones, scales of int8 taken for fp8's."""
    target = add(save_target(tmp_path, "llama"), {K_SCALE: torch.ones(1), V_SCALE: torch.ones(1)})
    raw = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**raw, "quantization_config": scheme}))
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_seq_len": 64, "kv_cache_dtype": "fp8"}
    if loads:
        SpecDecoder.from_pretrained(target, **settings)
        return
    with pytest.raises(
        ValueError,
        match="config_groups|is not quantised .* this matrix is in fp8|kv_cache_scheme: type must be 'float', got 'int'",
    ):
        SpecDecoder.from_pretrained(target, **settings)


def test_the_near_tie_check_reads_what_the_cache_would_give_back(zoo: Zoo) -> None:
    """Keeps out: texts over 8-bit KV judged by logits over the exact values, or of the exact queries, which differ."""
    decoder = zoo.decoder("llama", kv_cache_dtype="int8_keys", int8_queries=True)
    ids = ragged_prompts(40, 5)[4]
    passes = passes_of(Session(decoder))
    with torch.inference_mode():
        got_V = passes.logits(passes.hidden(ids))[-1]
    kinds, cache = decoder.model.config.layer_kinds, Driver(decoder).cache("target")
    with torch.inference_mode():
        rounded_V, exact_q_V, exact_kv_V = (
            decoder.model.logits(
                decoder.model(
                    torch.tensor(ids), torch.arange(len(ids)), DenseAttention(kinds, as_stored=store, queries_as_read=queries)
                ).hidden_TH
            )[-1]
            for store, queries in ((as_stored(cache), rounded_queries), (as_stored(cache), None), (None, rounded_queries))
        )
    torch.testing.assert_close(got_V, rounded_V, rtol=1e-5, atol=1e-5)
    assert (got_V - exact_q_V).abs().max() > 1e-3 and (got_V - exact_kv_V).abs().max() > 1e-3


def test_the_command_line_passes_it_on() -> None:
    for command in (["generate", "x"], ["bench"]):
        args = build_parser().parse_args([*command, "--kv-cache-dtype", "fp8"])
        assert engine_of(args).kv_cache_dtype == "fp8"
