"""Layers that share keys and values in transformers' models (Gemma 3n, Gemma 4): found by the trace, stored once, cut short.

Keeps out: keys stored again for layers that share them, a source guessed from a config that the code reads otherwise, and rows
left out of layers that take their tokens in another way.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from toolkit.driver import Driver
from toolkit.families import FAMILIES, Families, assert_greedy, save_family
from toolkit.models import ragged_prompts, save_eagle1, save_eagle3
from torch import Tensor, nn
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.attention.eager.dense import DenseAttention
from specdec.engine.pages.groups import ALL
from specdec.loading.memory import kv_page_bytes
from specdec.models.registry import choose_target, load_chosen
from specdec.models.transformers_backend.attention import AttentionCall
from specdec.models.transformers_backend.last_rows import Cut, rows_in
from specdec.models.transformers_backend.load import rows_are_enough
from specdec.models.transformers_backend.parts import Unsupported
from specdec.models.transformers_backend.target import TransformersTarget
from specdec.models.transformers_backend.trace import _kv_source
from specdec.train.head import train_head
from specdec.train.settings import HeadRun

CPU = torch.device("cpu")
NAMES = ("gemma3n", "gemma4")
SOURCES = (0, 1, 2, 1, 2, 1)  # the last three layers share; layers 2 and 1 are the last earlier ones of their types
PROMPTS = ragged_prompts(40, 5, seed=11)
SAMPLING = [SamplingParams(max_tokens=n) for n in (24, 9, 16, 1, 20)]


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Families:
    return Families(tmp_path_factory.mktemp("families"))


def load(folder: Path) -> TransformersTarget:
    target = load_chosen(choose_target(folder, "transformers"), folder, 128, CPU, torch.float32, cuda_graphs=False)
    assert isinstance(target, TransformersTarget)
    return target


def decoder_of(families: Families, name: str, spec: SpecConfig | None, head: Path | None, **settings: Any) -> SpecDecoder:
    merged = {"device": "cpu", "dtype": "float32", "max_seq_len": 128, "backend": "transformers", **settings}
    return SpecDecoder.from_pretrained(families.target(name), head, spec, **merged)


# ---- what is read ----


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", NAMES)
def test_sources_are_found_and_stored_once(families: Families, name: str) -> None:
    decoder = decoder_of(families, name, None, None, page_size=4)
    assert decoder.model.config.kv_source == SOURCES and decoder.model.config.first_sharing_layer == 3
    assert kv_page_bytes([decoder.model.config], decoder.settings, (ALL,)) == (4 * 3 * 2 * 2 * 16 * 4,)
    assert sum(buffers["kv"].shape[0] for buffers in Driver(decoder).cache("target").buffers_of.values()) == 3


def call(layer: int, key: Tensor, value: Tensor) -> AttentionCall:
    return AttentionCall(nn.Identity(), key, key, value, None, None, None, None, None, {})


def test_tensors_tell_who_shares() -> None:
    """Keeps out: equal tensors taken for shared ones, and layers that share only keys."""
    a, b, c = (torch.zeros(1) for _ in range(3))
    assert _kv_source([call(0, a, b), call(1, c, c), call(2, a, b), call(3, c, c)]) == (0, 1, 0, 1)
    assert _kv_source([call(0, a, b), call(1, torch.zeros(1), torch.zeros(1))]) == (0, 1)
    with pytest.raises(Unsupported, match="layer 1 reads the keys of layer 0 and the values of layer 1; expected both of one"):
        _kv_source([call(0, a, b), call(1, a, c)])


@pytest.mark.parametrize(
    ("name", "keys"),
    [("gemma3n", dict(altup_lr_multiplier=1.0, query_pre_attn_scalar=256)), ("gemma4", dict(num_global_key_value_heads=None))],
)
def test_keys_of_published_configs_are_known(families: Families, tmp_path: Path, name: str, keys: dict[str, Any]) -> None:
    raw = json.loads((families.target(name) / "config.json").read_text()) | keys
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert choose_target(tmp_path).config.kv_source == SOURCES


def test_heads_of_two_widths_are_refused(tmp_path: Path) -> None:
    """As published Gemma 4 models have them, which specdec's own modules run."""
    save_family(tmp_path, "gemma4_text", 0, **FAMILIES["gemma4"][1] | {"global_head_dim": 32})
    with pytest.raises(ValueError, match=r"all layers must have the same heads.* \[\(4, 2, 16, 16\), \(4, 2, 32, 32\)\]"):
        choose_target(tmp_path, "transformers")


def test_features_of_several_streams_are_refused(families: Families, tmp_path: Path) -> None:
    """Keeps out: a head that silently reads one of Gemma 3n's streams; heads of the final hidden state fit."""
    head = save_eagle3(tmp_path, families.target("gemma3n"))
    with pytest.raises(ValueError, match=r"EAGLE-3 head reads .* of this gemma3n_text target its layers hand on .*EAGLE-1/2"):
        decoder_of(families, "gemma3n", SpecConfig(3, 2, 6), head)


def test_no_head_is_trained_on_several_streams(families: Families, tmp_path: Path) -> None:
    """Keeps out: hours of a target's writing, before the first step of training says that it can't be."""
    text = tmp_path / "text.txt"
    text.write_text("a tale<|endoftext|>" * 400)
    with pytest.raises(ValueError, match="target: no head can be trained for .*gemma3n: its layers hand on"):
        train_head(HeadRun(width=64, longest_prompt=16), families.target("gemma3n"), [text], tmp_path / "out", device="cpu")


@pytest.mark.slow_cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cutoffs_are_transformers_own(families: Families, dtype: torch.dtype) -> None:
    """Keeps out: another share of Gemma 3n's sparse activations."""
    mlp = load(families.target("gemma3n")).decoder.layers[0].mlp  # type: ignore[index,union-attr]
    x = torch.randn(6, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
    want = Gemma3nTextMLP._gaussian_topk(mlp, x)
    assert torch.equal(mlp._gaussian_topk(x), want) and 0.05 < (want > 0).float().mean() < 0.4


@torch.inference_mode()
def test_tokens_beyond_the_per_layer_table_take_its_first_row(families: Families, tmp_path: Path) -> None:
    """Keeps out: a read after the table's end, which on a GPU ends the process.  Two rows with the first row's values, at the
    end of a longer table, say the same."""
    whole, short = families.target("gemma3n"), tmp_path / "short"
    shutil.copytree(whole, short)
    name = "model.embed_tokens_per_layer.weight"
    tensors = load_file(whole / "model.safetensors")
    raw = json.loads((whole / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(raw | {"vocab_size_per_layer_input": 38}))
    save_file(tensors | {name: tensors[name][:38].clone()}, short / "model.safetensors", metadata={"format": "pt"})
    target = load(whole)
    target.decoder.embed_tokens_per_layer.weight[38:] = tensors[name][0]  # type: ignore[union-attr,index]
    ids, positions = torch.tensor([5, 38, 7, 39]), torch.arange(4)
    states = [
        model(ids, positions, DenseAttention(model.config.layer_kinds, kv_layers=SOURCES)).hidden_TH
        for model in (target, load(short))
    ]
    torch.testing.assert_close(*states)


# ---- what is written ----


@pytest.mark.slow_cases
@pytest.mark.parametrize(("name", "page_size", "shape"), [
    ("gemma3n", 1, (4, 4, 16)), ("gemma3n", 64, (5, 1, 6)), ("gemma4", 16, (3, 8, 24)),
])  # fmt: skip
def test_generate_equals_transformers(
    families: Families, tmp_path: Path, name: str, page_size: int, shape: tuple[int, int, int]
) -> None:
    """Trees, with prompts in chunks, kept prefixes, and caches that start as NaN.  The last layers run the last rows where the
    head reads outputs of early layers."""
    target = families.target(name)
    features = dict(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]})
    head = save_eagle1(tmp_path, target) if name == "gemma3n" else save_eagle3(tmp_path, target, **features)
    settings = dict(page_size=page_size, prefill_chunk=7, prefix_caching=True, max_batch_size=3)
    decoder = decoder_of(families, name, SpecConfig(*shape), head, **settings)
    Driver(decoder).poison_free_slots(torch.nan)
    for _ in range(2):
        outputs = decoder.generate(PROMPTS, SAMPLING)
        for out in outputs:
            assert_greedy(families.hf(name), out)
    plain = decoder.generate(PROMPTS, SAMPLING, speculate=False)
    assert [out.token_ids for out in plain] == [out.token_ids for out in outputs]
    Driver(decoder).assert_nothing_leaked()


# ---- the last layers ----


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(
    ("name", "aux_layers", "cut"),
    [("gemma3n", (), 3), ("gemma4", (), 3), ("gemma4", (1,), 3), ("gemma4", (3,), 4), ("gemma4", (5,), None)],
)
@torch.inference_mode()
def test_the_last_layers_run_the_rows_that_are_read(
    families: Families, name: str, aux_layers: tuple[int, ...], cut: int | None
) -> None:
    target, rows = load(families.target(name)), dict[int, int]()
    for number, layer in enumerate(target.parts.layers):
        layer.mlp.register_forward_hook(lambda m, args, out, number=number: rows.__setitem__(number, out.shape[-2]))
    ids, positions, last = torch.arange(20) % 40, torch.arange(20), torch.tensor([7, 19])
    attn = DenseAttention(target.config.layer_kinds, kv_layers=SOURCES)
    whole = target(ids, positions, attn, aux_layers)
    some = target(ids, positions, attn, aux_layers, last)
    assert [rows[number] for number in range(6)] == [2 if cut is not None and number >= cut else 20 for number in range(6)]
    torch.testing.assert_close(some.hidden_TH, whole.hidden_TH[last], atol=1e-5, rtol=1e-5)
    if aux_layers:
        assert some.aux_TA is not None and whole.aux_TA is not None
        torch.testing.assert_close(some.aux_TA, whole.aux_TA, atol=1e-5, rtol=1e-5)


def test_rows_are_taken_of_what_belongs_to_tokens() -> None:
    """Keeps out: a matrix with as many columns as there are tokens; keys of the whole pass."""
    cut = Cut(0, 5, torch.tensor([1, 4]))
    x, keys = torch.randn(3, 1, 5, 4), {"full": torch.randn(1, 2, 5, 4)}
    assert torch.equal(rows_in(x, cut), x[:, :, [1, 4]])
    assert rows_in(keys, cut) is keys and rows_in(None, cut) is None
    pair = rows_in((x, torch.randn(1, 5)), cut)
    assert pair[0].shape == (3, 1, 2, 4) and pair[1].shape == (1, 5)


def test_a_model_that_takes_tokens_otherwise_runs_them_all(families: Families, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: states of other tokens, where a layer's arguments lie otherwise than the rule of rows says."""
    target = load(families.target("gemma4"))
    assert target.cuts_rows and rows_are_enough(target)
    monkeypatch.setattr(
        "specdec.models.transformers_backend.last_rows.rows_in",
        lambda argument, cut: argument[..., : len(cut.rows_R), :] if isinstance(argument, Tensor) else argument,
    )
    assert not rows_are_enough(target)
