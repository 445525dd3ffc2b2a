"""Shares of a model: what ranks compute from their shares is, joined, what the whole model computes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from toolkit.checkpoints.load import load_target
from toolkit.deepseek import DeepseekZoo, SparseZoo
from toolkit.differential.defined import OptionsZoo
from toolkit.models import Zoo, save_target
from toolkit.parallel.ranks import ThreadGroup, on_ranks
from torch import Tensor

from specdec.attention.eager.dense import DenseAttention
from specdec.models.causal_lm import CausalLM
from specdec.models.checkpoints.kv_scales import kv_scales
from specdec.models.config import ModelConfig
from specdec.models.registry import choose_target
from specdec.models.sharding import join, misfit, share_of
from specdec.models.target import TargetOutput
from specdec.parallel.shard import WHOLE, Shard

T = 9
ZOOS: dict[type[Zoo], tuple[str, ...]] = {
    Zoo: ("llama", "llama3-tied-dim8", "llama-dim80-biases", "qwen2", "qwen3", "diffllama-mha", "diffllama-gqa"),
    DeepseekZoo: ("v2-lite", "v3", "v3-no-q-lora", "v2-dense-biases"),
    SparseZoo: ("v32-dense-biases", "glm"),
    OptionsZoo: ("shared pairs", "alibi"),
}
NAMES = [(zoo, name) for zoo, names in ZOOS.items() for name in names]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[type[Zoo], str], Path]:
    zoos = {zoo: zoo(tmp_path_factory.mktemp("zoo")) for zoo in ZOOS}
    return lambda zoo, name: zoos[zoo].target(name)


def load(folder: Path, shard: Shard = WHOLE) -> CausalLM:
    return load_target(folder, choose_target(folder, "native").config, 64, torch.device("cpu"), torch.float32, shard)


@torch.no_grad()
def outputs(model: CausalLM, x_TH: Tensor) -> list[tuple[Tensor, Tensor]]:
    """What attention and MLP of each layer make of x, each on its own."""
    attn = DenseAttention(model.config.layer_kinds, kv_layers=model.config.kv_source)
    rotation = model.rotary.at(torch.arange(T))
    return [(layer.self_attn(x_TH, rotation, attn, i), layer.mlp(x_TH)) for i, layer in enumerate(model.layers)]  # type: ignore


@pytest.mark.slow_cases(keep=6)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("zoo", "name"), NAMES, ids=[name for _, name in NAMES])
def test_terms_of_all_ranks_add_up(zoo: type[Zoo], name: str, size: int, folder_of: Any) -> None:
    """Keeps out: a gate that is cut across gate and up, heads that a rank gets from another one's run, a bias added twice."""
    whole = load(folder := folder_of(zoo, name))
    if why := misfit(whole.config, size):
        with pytest.raises(ValueError, match=f"can share the target's {why} evenly, got {size}; nearest setting"):
            load(folder, Shard(0, size))
        return
    ranks = [load(folder, Shard(rank, size)) for rank in range(size)]
    x_TH = torch.randn(T, whole.config.hidden_size, generator=torch.Generator().manual_seed(size))
    for terms, want in zip(zip(*(outputs(rank, x_TH) for rank in ranks)), outputs(whole, x_TH)):
        for mine, its in zip(zip(*terms), want):
            torch.testing.assert_close(torch.stack(mine).sum(0), its, rtol=1e-4, atol=1e-5)
    if not whole.config.tie_embeddings:
        logits_TV = torch.cat([rank.logits(x_TH) for rank in ranks], dim=-1)
        torch.testing.assert_close(logits_TV, whole.logits(x_TH), rtol=1e-4, atol=1e-5)


@pytest.mark.slow_cases(keep=6)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("zoo", "name"), NAMES, ids=[name for _, name in NAMES])
def test_ranks_compute_the_whole_model(zoo: type[Zoo], name: str, size: int, folder_of: Any) -> None:
    """Keeps out: an output that is captured, or handed on, before the partial sums of all ranks are in it."""
    whole = load(folder := folder_of(zoo, name))
    if misfit(whole.config, size):
        return
    ids_T, positions_T = torch.randint(0, 40, (T,), generator=torch.Generator().manual_seed(size)), torch.arange(T)

    def passed(model: CausalLM) -> TargetOutput:
        return model(
            ids_T,
            positions_T,
            DenseAttention(model.config.layer_kinds, kv_layers=model.config.kv_source),
            (0, 2),
            torch.tensor([3, T - 1]),
        )

    def on_rank(group: ThreadGroup) -> TargetOutput:
        model = load(folder, Shard(group.rank, group.size))
        join(model, group)
        out = passed(model)
        assert group.exchanges == 2 * model.config.num_layers
        return out

    with torch.inference_mode():
        want = passed(whole)
    outs = on_ranks(size, on_rank)
    for out in outs:
        torch.testing.assert_close(out, want, rtol=1e-3, atol=1e-4)
        assert all(torch.equal(mine, first) for mine, first in zip(out, outs[0]))


def test_a_rank_holds_its_share(folder_of: Any) -> None:
    """Keeps out: a rank that holds the whole model and computes a part of it."""
    folder = folder_of(Zoo, "qwen3")
    ranks = [load(folder, Shard(0, size)) for size in (1, 2, 4)]
    held = [sum(p.numel() for name, p in rank.layers.named_parameters() if "proj" in name) for rank in ranks]
    twice_held = 4 * 2 * 24 * 32 // 2  # 2 key/value heads on 4 ranks: in 4 layers, half of a head of keys and of values more
    assert held[1] == held[0] // 2 and held[2] == held[0] // 4 + twice_held


def test_scales_of_keys_and_values_go_with_their_heads(tmp_path: Path) -> None:
    """Keeps out: the first heads' scales on every rank; scales refused because a rank holds fewer heads than there are."""
    folder, scale_2K = save_target(tmp_path, "llama"), torch.tensor([[0.5, 2.0], [0.25, 4.0]])
    path = folder / "model.safetensors"
    names = [f"model.layers.1.self_attn.{letter}_scale" for letter in "kv"]
    save_file({**load_file(path), **dict(zip(names, scale_2K))}, path)
    for size, heads in ((2, [0, 1]), (4, [0, 0, 1, 1])):  # on 4 ranks, neighbours hold the same head
        for rank, head in enumerate(heads):
            model = load(folder, Shard(rank, size))
            (scale,) = [scale for scale in kv_scales(model, model.config.layer_kinds) if scale is not None]
            assert scale.tolist() == scale_2K[:, head : head + 1].tolist()


def test_uneven_vocabularies_are_cut_in_runs() -> None:
    """Keeps out: tokens of the end of a vocabulary that no rank holds, or that two do."""
    for count, size in [(40, 4), (41, 4), (5, 4), (3, 4)]:
        pieces = [range(count)[Shard(rank, size).piece(count)] for rank in range(size)]
        assert [token for piece in pieces for token in piece] == list(range(count))


@pytest.mark.parametrize(("heads", "kv_heads", "size", "nearest"), [(12, 4, 8, 4), (6, 2, 4, 2), (8, 3, 2, 1), (32, 8, 5, 4)])
def test_sizes_that_do_not_fit(heads: int, kv_heads: int, size: int, nearest: int) -> None:
    """Keeps out: a nearest setting that does not work either."""
    config = ModelConfig("llama", 96, 480, 2, heads, kv_heads, 8, 40, 1e-5)
    with pytest.raises(ValueError, match=f"evenly, got {size}; nearest setting that works: tensor_parallel_size={nearest}$"):
        share_of(config, Shard(0, size))
    assert share_of(config, Shard(0, nearest)).num_heads == heads // nearest
