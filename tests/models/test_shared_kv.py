"""Targets of the Llama family whose layers share keys and values: what they compute, store and refuse.

Keeps out: keys of another layer than the source, a sharing layer that stores or costs memory, and rows left out of a prompt
that somebody reads.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from toolkit.attention.segments import ragged_causal_segment
from toolkit.models import save_eagle1, save_eagle3, save_target
from toolkit.oracles.reference import ReferenceBackend
from toolkit.oracles.sharing import SHARING, SharingZoo, write_sources
from torch import Tensor

from specdec.attention.attend import PagedAttention, PassTables
from specdec.attention.eager.dense import DenseAttention
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment
from specdec.attention.segment import AttentionPlan
from specdec.draft.load import load_head
from specdec.models.causal_lm import CausalLM
from specdec.models.kv import kv_read_bytes, make_cache
from specdec.models.registry import choose_target, load_chosen
from specdec.models.target import TargetOutput

CPU = torch.device("cpu")
LENGTHS = [40, 1, 17]
LAST = torch.tensor(LENGTHS).cumsum(0) - 1
PAGE = max(LENGTHS)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> SharingZoo:
    return SharingZoo(tmp_path_factory.mktemp("sharing"))


def load(folder: Path) -> CausalLM:
    target = load_chosen(choose_target(folder, "native"), folder, 128, CPU, torch.float32, cuda_graphs=False)
    assert isinstance(target, CausalLM)
    return target


def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(40, (n,), generator=generator) for n in LENGTHS]


@torch.no_grad()
def ours(model: CausalLM, aux_layers: tuple[int, ...] = (), rows_R: Tensor | None = None) -> TargetOutput:
    """All prompts as one ragged batch, one page each, through the reference attention.  Unwritten slots hold NaN."""
    ids = prompts()
    cache = make_cache(model, model.config, len(ids) * PAGE, "auto", torch.float32, CPU)
    cache.buffers["kv"].fill_(torch.nan)
    pages = PageTable(torch.arange(len(ids), dtype=torch.int32)[:, None], PAGE)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    plan = AttentionPlan((ragged_causal_segment(pages, LENGTHS, LENGTHS),), positions)
    last_plan = AttentionPlan((causal_segment(pages, torch.tensor(LENGTHS, dtype=torch.int32), 1),))
    slots = torch.cat([row * PAGE + torch.arange(n) for row, n in enumerate(LENGTHS)])
    attn = PagedAttention(ReferenceBackend(), cache, PassTables(plan, slots, last_plan))
    return model(torch.cat(ids), positions, attn, aux_layers, rows_R)


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


# ---- what they compute ----


@pytest.mark.parametrize("name", SHARING)
@torch.no_grad()
def test_forward_equals_the_oracle(zoo: SharingZoo, name: str) -> None:
    """Logits, and the output of every layer but the last."""
    model, hf = load(zoo.target(name)), zoo.hf(name)
    layers, H = model.config.num_layers, model.config.hidden_size
    out = ours(model, tuple(range(layers)))
    theirs = [hf(x[None], output_hidden_states=True) for x in prompts()]
    close(model.logits(out.hidden_TH), torch.cat([o.logits[0] for o in theirs]))
    assert out.aux_TA is not None
    for layer in range(layers - 1):
        want = torch.cat([o.hidden_states[layer + 1][0] for o in theirs])
        close(out.aux_TA[:, layer * H : (layer + 1) * H], want)


@torch.no_grad()
def test_copied_weights_are_the_same_model(tmp_path: Path) -> None:
    """Layers 1 and 3 share what layers 0 and 2 read: where layers 0 and 2 add nothing to the stream, layers 1 and 3 would
    compute the same keys and values from copies of the weights."""
    folder = save_target(tmp_path / "copies", "llama")
    tensors = load_file(folder / "model.safetensors")
    for source, layer in ((0, 1), (2, 3)):
        here, there = f"model.layers.{source}.", f"model.layers.{layer}."
        for part in ("input_layernorm", "self_attn.k_proj", "self_attn.v_proj"):
            tensors[f"{there}{part}.weight"] = tensors[f"{here}{part}.weight"].clone()
        for part in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"{here}{part}.weight"].zero_()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    copies = ours(load(folder))
    shared = ours(load(write_sources(folder, [0, 0, 2, 2])))
    close(shared.hidden_TH, copies.hidden_TH)


@pytest.mark.parametrize("name", SHARING)
@torch.no_grad()
def test_attention_without_a_cache_agrees(zoo: SharingZoo, name: str) -> None:
    """Training and near-tie checks run whole rows: keys of the source are there, and queries of some rows find them."""
    model = load(zoo.target(name))
    ids, positions = prompts()[0], torch.arange(LENGTHS[0])
    for rows in (None, torch.tensor([3, LENGTHS[0] - 1])):
        attn = DenseAttention(model.config.layer_kinds, kv_layers=model.config.kv_source)
        hidden = model(ids, positions, attn, rows_R=rows).hidden_TH
        whole = ours(model).hidden_TH[: LENGTHS[0]]
        close(hidden, whole if rows is None else whole[rows])


# ---- what they store ----


@pytest.mark.parametrize("name", SHARING)
def test_sharing_layers_store_nothing(zoo: SharingZoo, name: str) -> None:
    """Bytes, buffers and moves are those of the layers that store, and each layer reads its source's keys."""
    model, sources = load(zoo.target(name)), SHARING[name][1]
    config, stored = model.config, sorted(set(SHARING[name][1]))
    a_layer = 2 * config.num_kv_heads * config.head_dim * 4
    assert kv_read_bytes(config, "auto", torch.float32, context=3) == 3 * len(sources) * a_layer
    cache = make_cache(model, config, 12, "auto", torch.float32, CPU)
    assert cache.bytes == 12 * len(stored) * a_layer
    assert all(cache.view(layer) is cache.view(source) for layer, source in enumerate(sources))
    assert len({id(cache.view(layer)) for layer in stored}) == len(stored)
    kv = cache.buffers["kv"].random_()
    before = kv.clone()
    cache.move(torch.tensor([[3, 5, 7]]), torch.tensor([[0, 2]]))
    before[:, 5] = before[:, 7]
    assert torch.equal(kv, before)


def test_fp8_scales_go_to_the_layers_that_store(zoo: SharingZoo, tmp_path: Path) -> None:
    """Keeps out: scales of a checkpoint counted by the layers that store, and scales of a layer that stores nothing, unread."""
    folder = shutil.copytree(zoo.target("pairs"), tmp_path / "scaled")
    tensors = load_file(folder / "model.safetensors")
    scales = {f"model.layers.2.self_attn.{letter}_scale": torch.tensor(0.5 * n) for n, letter in enumerate("kv", start=1)}
    save_file(tensors | scales, folder / "model.safetensors", metadata={"format": "pt"})
    model = load(folder)
    cache = make_cache(model, model.config, 8, "fp8", torch.float32, CPU)
    assert [cache.view(layer).needs_scale for layer in range(4)] == [True, True, False, False]  # type: ignore[attr-defined]
    assert cache.view(3).scale_2K.tolist() == [[0.5, 0.5], [1.0, 1.0]]  # type: ignore[attr-defined]
    stray = {name.replace("layers.2", "layers.3"): scale for name, scale in scales.items()}
    save_file(tensors | stray, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.3\.self_attn\.k_scale"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "aux_layers", "cut"),
    [("half", (0, 1), 2), ("half", (0,), 2), ("half", (2,), 3), ("half", (3,), None), ("crossed", (), 2), ("pairs", (), 3)],
)
@torch.no_grad()
def test_layers_run_the_rows_that_are_read(zoo: SharingZoo, name: str, aux_layers: tuple[int, ...], cut: int | None) -> None:
    """From layer `cut` on, three rows of 58; captured outputs have all, and nothing that is returned changes."""
    model = load(zoo.target(name))
    rows: dict[int, int] = {}
    for number, layer in enumerate(model.layers):
        layer.mlp.register_forward_hook(lambda m, args, out, number=number: rows.__setitem__(number, len(out)))
    whole, some = ours(model, aux_layers), ours(model, aux_layers, LAST)
    T, R, layers = sum(LENGTHS), len(LENGTHS), model.config.num_layers
    assert [rows[number] for number in range(layers)] == [R if cut is not None and n >= cut else T for n in range(layers)]
    close(some.hidden_TH, whole.hidden_TH[LAST])
    if aux_layers:
        assert some.aux_TA is not None and whole.aux_TA is not None
        close(some.aux_TA, whole.aux_TA)


# ---- what is refused ----


def rewrite(folder: Path, tmp_path: Path, **changes: Any) -> Path:
    raw = json.loads((folder / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return tmp_path


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ("0,1,1,1", "kv_source must be null or a list of 4 layer numbers, one a layer, got '0,1,1,1'"),
        ([0, 1, 1], "kv_source must be null or a list of 4 layer numbers, one a layer, got [0, 1, 1]"),
        ([0, 1, 1, 1.0], "kv_source must be null or a list of 4 layer numbers, one a layer, got [0, 1, 1, 1.0]"),
        ([False, 1, 1, 1], "kv_source must be null or a list of 4 layer numbers, one a layer, got [False, 1, 1, 1]"),
        ([0, 2, 2, 2], "kv_source[1] must be 1 or the number of an earlier layer, got 2"),
        ([0, 1, -1, 1], "kv_source[2] must be 2 or the number of an earlier layer, got -1"),
        ([0, 0, 1, 3], "kv_source[2] must name a layer that stores its own keys and values, got 1, which reads those of "
         "layer 0; nearest: 0"),
    ],
)  # fmt: skip
def test_broken_lists_are_refused(zoo: SharingZoo, tmp_path: Path, sources: Any, message: str) -> None:
    folder = rewrite(zoo.target("half"), tmp_path, kv_source=sources)
    with pytest.raises(ValueError, match=re.escape(f"{folder}/config.json: {message}") + "$"):
        choose_target(folder)


def test_layers_of_two_windows_do_not_share(zoo: SharingZoo, tmp_path: Path) -> None:
    """Keeps out: a full layer that reads keys of a windowed one, whose pages are gone."""
    folder = rewrite(zoo.target("windows"), tmp_path, kv_source=[0, 1, 1, 1])
    with pytest.raises(ValueError, match=r"layer 2 \(window 6\) shares the keys and values of layer 1 \(full\)"):
        choose_target(folder)


def test_weights_fit_the_list(zoo: SharingZoo, tmp_path: Path) -> None:
    """Keeps out: keys of a sharing layer that are in the checkpoint and silently unread; a source without keys."""
    folder = save_target(tmp_path / "whole", "llama")
    rewrite(folder, folder, kv_source=[0, 1, 1, 1])
    with pytest.raises(ValueError, match=r"layers\.2\.self_attn\.k_proj"):
        load(folder)
    write_sources(folder, [0, 1, 1, 1])
    rewrite(folder, folder, kv_source=[0, 1, 1, 3])
    with pytest.raises(ValueError, match=r"layers\.3\.self_attn\.k_proj"):
        load(folder)


def test_only_our_own_modules_read_the_key(zoo: SharingZoo, tmp_path: Path) -> None:
    """Keeps out: transformers' code, which ignores the key; and heads, whose layers store their own."""
    with pytest.raises(ValueError, match="unknown config keys kv_source, which transformers does not read"):
        choose_target(zoo.target("half"), "transformers")
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    with pytest.raises(ValueError, match="transformers does not know kv_source either"):
        choose_target(rewrite(zoo.target("half"), tmp_path, rope_parameters=yarn))
    target = load(zoo.target("half"))
    for save in (save_eagle1, save_eagle3):
        head = save(tmp_path / save.__name__, zoo.target("half"), kv_source=[0])
        with pytest.raises(ValueError, match="kv_source must be absent: each layer of a head stores its own"):
            load_head(head, target, 64, CPU, torch.float32)


def test_a_null_is_no_list(zoo: SharingZoo, tmp_path: Path) -> None:
    config = choose_target(rewrite(save_target(tmp_path, "llama"), tmp_path, kv_source=None)).config
    assert config.kv_source == (0, 1, 2, 3) and config.first_sharing_layer == 4
