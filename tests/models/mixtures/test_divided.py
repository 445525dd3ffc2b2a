"""Whole experts divided over ranks: their outputs add up to what one rank computes, in every scheme and for every count.

Shapes: T tokens, H hidden size, E experts, K experts of a token (top_k).
"""

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit.checkpoints.gpt_oss import save_gpt_oss
from toolkit.checkpoints.load import load_target
from toolkit.checkpoints.mixtures import fuse, save_mixture
from toolkit.models import ragged_prompts, save_eagle3
from toolkit.oracles.quantised import SCHEMES, as_quantised
from toolkit.parallel.decoders import with_ranks

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.loading.load import check_pair
from specdec.models.mixtures.dividing import (
    ExpertSharing,
    ExpertSizes,
    choose_sharing,
    chosen_by,
    chosen_of_fullest,
    exchanged_bytes,
    held_by_rank,
    numbers_of,
    summed_bytes,
)
from specdec.models.mixtures.layer import MixtureOfExperts
from specdec.models.mixtures.rules import ExpertsConfig
from specdec.models.registry import choose_target
from specdec.models.schemes.rules import Rule
from specdec.models.sharding import misfit, share_of, with_sharing
from specdec.ops.products.routing import RouterRule
from specdec.options import EngineOptions
from specdec.parallel.shard import Shard

DIVIDED = ExpertSharing(True, "")
FIVE: dict[str, Any] = dict(  # on 4 ranks: 2, 2, 1 and none
    num_hidden_layers=1, hidden_size=64, head_dim=128, intermediate_size=64, moe_intermediate_size=64, num_experts=5,
    num_experts_per_tok=2, mlp_only_layers=[],
)  # fmt: skip


def mixtures(folder: Path, ranks: int, quantize: str = "none") -> list[MixtureOfExperts]:
    """The last layer's mixture on one rank, and then on each of several that divide its experts."""
    config, found = with_sharing(choose_target(folder, "native", quantize).config, DIVIDED), []
    for shard in (Shard(), *(Shard(rank, ranks) for rank in range(ranks))):
        model = load_target(folder, config, 64, torch.device("cpu"), torch.float32, shard)
        found.append([m for m in model.modules() if isinstance(m, MixtureOfExperts)][-1])
    return found


@torch.inference_mode()
def hold_sums(whole: MixtureOfExperts, ranks: list[MixtureOfExperts]) -> None:
    """One token, for which single experts are dequantised or copied, and more."""
    for T in (1, 30):
        x_TH = torch.randn(T, whole.gate_up_proj.in_features, generator=torch.Generator().manual_seed(T))
        want = whole(x_TH).double()
        got = sum(rank(x_TH).double() for rank in ranks)
        torch.testing.assert_close(got, want, atol=1e-6 * float(want.abs().max()), rtol=1e-5)


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize("scheme", ["", "deepseek fp8", "w8a16 g0 asym", "w4a16 g32 asym", "gptq4 v1", "awq", "nvfp4", "mxfp4"])
def test_ranks_add_up_to_the_whole(tmp_path: Path, scheme: str) -> None:
    """Keeps out: an expert under another one's number or scales, one that two ranks have, a rank that no experts break."""
    folder = save_mixture(tmp_path / "plain", "qwen3-moe", **FIVE)
    if scheme:
        folder = as_quantised(folder, tmp_path / "quantised", SCHEMES[scheme])
    whole, *ranks = mixtures(folder, 4)
    assert [len(rank.experts.held) for rank in ranks] == [2, 2, 1, 0]
    assert bool(scheme) == (ranks[0].down_proj.quantised is not None)
    for name in ("gate_up_proj", "down_proj"):
        sizes = [sum(p.nbytes for p in each.get_submodule(name).parameters()) for each in (whole, *ranks)]
        assert sizes[0] == sum(sizes[1:]) and sizes[-1] == 0
    hold_sums(whole, ranks)


@pytest.mark.parametrize("kind", ["mxfp4", "unquantised", "int4 at load", "fused", "shared", "groups"])
def test_ranks_of_other_families_add_up(tmp_path: Path, kind: str) -> None:
    """Keeps out: a bias that several ranks add, or another expert's; a shared expert or its gate that each rank has whole."""
    quantize = "none"
    if kind in ("mxfp4", "unquantised"):
        sizes = dict(num_local_experts=3, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
        folder = save_gpt_oss(tmp_path / "oss", **sizes)[kind == "unquantised"]  # type: ignore[arg-type]
    elif kind == "shared":
        folder = save_mixture(tmp_path / "m", "qwen2-moe", num_hidden_layers=1, num_experts=5)
    elif kind == "groups":
        folder = save_mixture(tmp_path / "m", "glm4-moe", num_hidden_layers=2)
    else:
        folder, quantize = save_mixture(tmp_path / "m", "qwen3-moe", **FIVE), "int4" if kind == "int4 at load" else "none"
        folder = fuse(folder, tmp_path / "fused") if kind == "fused" else folder
    whole, *ranks = mixtures(folder, 4, quantize)
    hold_sums(whole, ranks)


@torch.inference_mode()
def test_a_rank_hears_no_expert_of_others(tmp_path: Path) -> None:
    """All tokens choose the first rank's experts, and all numbers of the others' are NaN.

    Keeps out: an expert that is read though no pair of its rank chose it; pairs of others at the weight 0, times NaN."""
    whole, first, *others = mixtures(save_mixture(tmp_path / "m", "qwen3-moe", **FIVE), 4)
    x_TH = torch.rand(9, 64) + 0.5
    for each in (whole, first, *others):
        each.router.weight.copy_(torch.tensor([5.0, 4.0, 0, 0, 0])[:, None].expand(5, 64))
    for other in others:
        for stack in (other.gate_up_proj, other.down_proj):
            stack.weight_ENK.fill_(torch.nan)  # type: ignore[union-attr]
    for T in (1, 9):
        assert all(torch.equal(other(x_TH[:T]), torch.zeros(T, 64)) for other in others)
        torch.testing.assert_close(first(x_TH[:T]), whole(x_TH[:T]))


def qwen(folder: Path) -> Path:
    return save_mixture(folder, "qwen3-moe", num_experts=5)


def gpt_oss(folder: Path) -> Path:
    return save_gpt_oss(folder, num_local_experts=3, num_hidden_layers=3)[0]


@pytest.mark.slow_cases
@pytest.mark.parametrize(("save", "size"), [(qwen, 2), (gpt_oss, 4)], ids=["qwen3-moe", "gpt-oss"])
def test_ranks_write_what_one_writes(tmp_path: Path, save: Callable[[Path], Path], size: int) -> None:
    """Greedily and sampled, with trees; gpt-oss in mxfp4 on a rank without experts.

    Keeps out: a rank that chooses otherwise than another; settings that other processes can't be told."""
    target = save(tmp_path / "target")
    head = save_eagle3(tmp_path / "head", target)
    samplings = [SamplingParams(max_tokens=8), SamplingParams(max_tokens=8, temperature=0.9, seed=3)]

    def use(decoder: SpecDecoder) -> tuple[list[list[int]], str]:
        outputs = decoder.generate(ragged_prompts(40, 2, seed=3), samplings)
        assert pickle.loads(pickle.dumps(decoder.settings)) == decoder.settings
        return [out.token_ids for out in outputs], decoder.settings.by_option()["expert_parallel"]

    more: Any = {"dtype": torch.float32, "max_batch_size": 3, "smoke": False}
    one, way = with_ranks(target, head, SpecConfig(3, 2, 6), 1, use, **more)
    assert way == "auto"
    assert with_ranks(target, head, SpecConfig(3, 2, 6), size, use, **more, expert_parallel="experts") == (one, "experts")


# ---- counting and choosing ----


@pytest.mark.parametrize(
    ("E", "K", "N", "T"), [(128, 8, 2, 1), (128, 8, 8, 6), (128, 8, 2, 48), (32, 4, 8, 1), (32, 4, 4, 8), (3, 2, 4, 2)]
)
def test_expected_reads_are_counted_ones(E: int, K: int, N: int, T: int) -> None:
    """Against choices at random, counted.  Keeps out: a mean in place of the rank that all wait for."""
    generator = torch.Generator().manual_seed(0)
    choices = torch.rand(200, T, E, generator=generator).topk(K, -1).indices.flatten(1).tolist()
    counted = torch.tensor([[len({*own} & {*choice}) for own in numbers_of(E, N)] for choice in choices], dtype=torch.float32)
    assert abs(float(counted.sum(1).mean()) / chosen_by(T, E, K) - 1) < 0.02
    assert abs(float(counted.max(1).values.mean()) / chosen_of_fullest(T, E, K, N) - 1) < 0.09


def test_what_is_sent() -> None:
    """The numbers of dividing.py's first lines.  Keeps out: a claim about exchanges that the count does not bear out."""
    qwen, gpt = (ExpertsConfig(E, 768, RouterRule(K, "softmax"), divided=True) for E, K in ((128, 8), (32, 4)))

    def saved(experts: ExpertsConfig, ranks: int) -> float:
        return 1 - exchanged_bytes(7, 2880, ranks, experts) / summed_bytes(7, 2880, ranks)

    assert [round(100 * saved(*case), 1) for case in ((qwen, 2), (qwen, 8), (gpt, 8))] == [0.2, 16.6, 28.5]
    assert saved(replace(qwen, shared_size=8), 8) == 0
    assert summed_bytes(1, 4096, 2) == 4096 * 2, "half of a row to the other rank, and half of it back"


def test_the_way_that_reads_less_is_chosen() -> None:
    """Keeps out: whole experts where few tokens leave ranks idle; parts of 192 columns, of which kernels read 256."""
    qwen = ExpertsConfig(128, 768, RouterRule(8, "softmax"))
    few_bits, dense = ExpertSizes(2048, 4, steps=True), ExpertSizes(2048, 16, steps=False)
    ways = {
        (sizes.bits, T, N): choose_sharing(qwen, sizes, T, N) for sizes in (few_bits, dense) for T in (1, 48) for N in (2, 4)
    }
    assert {case for case, way in ways.items() if way.divided} == {(4, 48, 4)}
    assert "a rank reads 80.1 MB of a layer's experts for 48 tokens" in ways[4, 48, 4].reason
    assert "with whole experts the fullest one 75" in ways[4, 48, 4].reason
    assert held_by_rank(replace(qwen, divided=True), 2) == "64 of 128 experts a rank"
    assert held_by_rank(replace(qwen, count=5, divided=True), 4) == "2, 1 or 0 of 5 experts a rank"


def test_auto_takes_what_ranks_can_share(tmp_path: Path) -> None:
    """Keeps out: 25 columns of an expert refused, though whole experts can be divided; a setting that nobody reads."""
    folder = save_mixture(tmp_path / "odd", "qwen3-moe", moe_intermediate_size=25)

    def way(**settings: Any) -> ExpertSharing | None:
        options = EngineOptions(device="cpu", dtype="float32", **settings)
        return check_pair(folder, None, None, options).settings.experts

    assert way() is None
    found = way(tensor_parallel_size=2)
    assert found == (True, "2 ranks can't share the target's moe_intermediate_size 25 evenly")
    with pytest.raises(ValueError, match="moe_intermediate_size 25 evenly, got 2; .*size=1, or expert_parallel='experts'"):
        way(tensor_parallel_size=2, expert_parallel="tensor")
    with pytest.raises(ValueError, match="got tensor_parallel_size=1; nearest setting that works: expert_parallel='auto'"):
        way(expert_parallel="experts")
    config = with_sharing(choose_target(folder).config, DIVIDED)
    assert [share_of(config, Shard(rank, 2)).experts.held for rank in range(2)] == [range(4), range(4, 8)]  # type: ignore


# A family, its sizes, how ranks share it, which of its matrices are quantised, and what four ranks can't share.
MISFITS: list[tuple[str, dict[str, Any], bool, str, str]] = [
    ("mixtral", {"intermediate_size": 64}, False, r"block_sparse_moe\.experts", "intermediate_size 64 in whole groups of 32"),
    ("mixtral", {"intermediate_size": 64}, True, r"block_sparse_moe\.experts", ""),
    ("hy3", {"moe_intermediate_size": 64}, True, r"shared_mlp", "width of the shared experts 64 in whole groups of 32"),
    ("qwen3-moe", {"intermediate_size": 50, "mlp_only_layers": []}, False, "none", ""),  # no layer has so many columns
    ("qwen3-moe", {"intermediate_size": 50, "mlp_only_layers": [0]}, False, "none", "intermediate_size 50"),
]


@pytest.mark.parametrize(("name", "sizes", "divided", "quantised", "why"), MISFITS)
def test_what_ranks_cannot_share(
    tmp_path: Path, name: str, sizes: dict[str, Any], divided: bool, quantised: str, why: str
) -> None:  # fmt: skip
    """Keeps out: ranks that are started, and then find that a family's own names have groups that they can't cut; a width that
    no layer has, refused."""
    folder = save_mixture(tmp_path / "m", name, **sizes)
    config = with_sharing(choose_target(folder, quantize="int4").config, ExpertSharing(divided, ""))
    assert config.quantization is not None
    kept = (Rule("regex", rf"^(?!.*{quantised}).*$"),)
    assert misfit(replace(config, quantization=replace(config.quantization, kept=kept)), 4) == why
