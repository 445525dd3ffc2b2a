"""DiffLlama targets (differential attention) against transformers, in float32: logits, and text through the whole runtime.

Keeps out: heads paired across groups, a lambda of another layer or rounded to 16 bits, prefix and suffix subtracted before they
are merged, a value half that goes with the wrong keys.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from toolkit.checkpoints.load import load_target
from toolkit.models import Zoo, ragged_prompts
from toolkit.oracles.texts import hold_captured_text, hold_text, hold_text_after_shared_prefixes
from toolkit.prompts import dense_logits, paged_logits
from torch import Tensor

from specdec import SamplingParams, SpecConfig
from specdec.attention.eager.dense import DenseAttention
from specdec.models.causal_lm import CausalLM
from specdec.models.config import read_json
from specdec.models.diffllama.config import parse_diffllama

CPU = torch.device("cpu")
NAMES = ["diffllama", "diffllama-mha", "diffllama-gqa"]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    return load_target(folder, parse_diffllama(read_json(folder / "config.json"), str(folder)), 256, CPU, dtype)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(zoo: Zoo, name: str) -> None:
    """In one pass, in chunks of a prompt, and without a cache."""
    prompts = ragged_prompts(40, 5, seed=3)
    hf = zoo.hf(name)
    with torch.inference_mode():
        want = torch.cat([hf(torch.tensor([prompt])).logits[0] for prompt in prompts])
        model = load(zoo.target(name))
        close = dict(atol=1e-5 * float(want.abs().max()), rtol=1e-5)
        torch.testing.assert_close(paged_logits(model, prompts), want, **close)
        torch.testing.assert_close(paged_logits(model, prompts, chunk=9), want, **close)
        torch.testing.assert_close(dense_logits(model, prompts[-1]), want[-len(prompts[-1]) :], **close)


@pytest.mark.parametrize("name", NAMES)
def test_asked_rows_are_those_of_the_whole_pass(zoo: Zoo, name: str) -> None:
    """Keeps out: a last layer that answers other rows than those asked for, or stores the keys of those alone."""
    model, ids, rows_R = load(zoo.target(name)), torch.tensor(ragged_prompts(40, 4, seed=5)[-1]), torch.tensor([3, 0])
    with torch.inference_mode():
        prompts = ragged_prompts(40, 4, seed=5)
        ends = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0) - 1
        torch.testing.assert_close(
            paged_logits(model, prompts, last=True), paged_logits(model, prompts)[ends], atol=1e-5, rtol=1e-5
        )
        whole, some = (
            model(ids, torch.arange(len(ids)), DenseAttention(model.config.layer_kinds), rows_R=rows).hidden_TH
            for rows in (None, rows_R)
        )
    torch.testing.assert_close(some, whole[rows_R], atol=1e-5, rtol=1e-5)


# ---- text ----

CASES = [
    ("diffllama", "eagle3", (4, 4, 16), 1),
    ("diffllama", "eagle1", (3, 8, 24), 64),
    ("diffllama-mha", "eagle3-window", (4, 2, 9), 16),
    ("diffllama-gqa", "eagle3-full", (3, 8, 20), 16),
    ("diffllama-gqa", "eagle1", (4, 1, 5), 64),
    ("diffllama-mha", "eagle1-two-layers", (3, 4, 12), 1),
]


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(("name", "head", "shape", "page_size"), CASES, ids=lambda v: str(v).replace(" ", ""))
def test_text_is_that_of_transformers(zoo: Zoo, name: str, head: str, shape: tuple[int, int, int], page_size: int) -> None:
    """Chains and trees at any page size, prompts longer than a chunk, rows that change owners."""
    decoder = zoo.decoder(name, head, SpecConfig(*shape), page_size=page_size, max_batch_size=3)
    hold_text(zoo, name, decoder)


def test_sampled_text_does_not_depend_on_drafts(zoo: Zoo) -> None:
    """Keeps out: a tree whose nodes see other logits than plain decoding does."""
    decoder = zoo.decoder("diffllama-gqa", "eagle3", SpecConfig(4, 4, 16), page_size=16, max_batch_size=3)
    sampling = [SamplingParams(max_tokens=20, temperature=0.9, top_p=0.95, seed=seed) for seed in range(5)]
    prompts = ragged_prompts(40, 5, seed=9)
    drafted, plain = (decoder.generate(prompts, sampling, speculate=speculate) for speculate in (True, False))
    assert [out.token_ids for out in drafted] == [out.token_ids for out in plain]


def test_prefixes_are_shared(zoo: Zoo) -> None:
    """Keeps out: a shared prefix whose halves are subtracted before each row's own keys are merged."""
    hold_text_after_shared_prefixes(zoo, "diffllama-gqa", (3, 4, 12))


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "shape", "page_size"), [("diffllama-mha", (4, 4, 16), 16), ("diffllama-gqa", (3, 1, 4), 5)])
def test_captured_rounds_write_the_same(zoo: Zoo, name: str, shape: tuple[int, int, int], page_size: int) -> None:
    """Keeps out: a lambda or a view of the cache that a graph freezes."""
    hold_captured_text(zoo, name, shape, page_size)


# ---- strictness ----


def test_keys_alone_are_not_quantised(zoo: Zoo) -> None:
    """Keeps out: a cache in which a pair's two keys do not lie side by side."""
    with pytest.raises(
        ValueError, match="reads differential attention in .*fp8 or int8, got .*int8_keys.*kv_cache_dtype='int8'"
    ):
        zoo.decoder("diffllama", kv_cache_dtype="int8_keys")


def rewritten(folder: Path, to: Path, tensors: dict[str, Tensor] | None = None, **config: Any) -> Path:
    to.mkdir()
    raw = {**json.loads((folder / "config.json").read_text()), **config}
    (to / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value != "drop"}))
    save_file({**load_file(folder / "model.safetensors"), **(tensors or {})}, to / "model.safetensors")
    return to


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(num_key_value_heads=1), "num_key_value_heads must be even"),
        (dict(num_key_value_heads=3), "num_attention_heads must be a multiple of num_key_value_heads"),
        (dict(attention_dropout=0.1), "attention_dropout must be 0"),
        (dict(sliding_window=8), "sliding_window must be absent, null or false"),
        (dict(mlp_bias=True), "mlp_bias must be absent, null or false"),
        (dict(hidden_act="gelu"), "hidden_act must be 'silu'"),
        (dict(lambda_std_dev="wide"), "lambda_std_dev must be a finite number"),
        (dict(lambda_init=0.3), "unknown config keys lambda_init"),
        (dict(head_dim=16), "must have shape"),
        (dict(num_hidden_layers=5), "num_hidden_layers is 5, but the checkpoint holds 4 layers"),
    ],
    ids=str,
)
def test_what_would_change_the_model_is_an_error(zoo: Zoo, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """Keeps out: a config of a newer relative that loads and writes nonsense."""
    with pytest.raises(ValueError, match=message):
        load(rewritten(zoo.target("diffllama"), tmp_path / "changed", **change))


def test_broken_lambdas_are_refused(zoo: Zoo, tmp_path: Path) -> None:
    """Keeps out: a factor of NaN or infinity, which would only show as text."""
    name, folder = "model.layers.1.self_attn.lambda_q1", zoo.target("diffllama")
    with pytest.raises(ValueError, match=f"{name}.*holds NaN or infinity"):
        load(rewritten(folder, tmp_path / "nan", {name: torch.full((8,), torch.nan)}))
    with pytest.raises(ValueError, match="lambda of inf"):
        large = {name.replace("q1", letter): torch.full((8,), 9.0) for letter in ("q1", "k1")}
        load(rewritten(folder, tmp_path / "large", large))
    with pytest.raises(ValueError, match="must have shape"):
        load(rewritten(folder, tmp_path / "wide", {name: torch.zeros(16)}))
