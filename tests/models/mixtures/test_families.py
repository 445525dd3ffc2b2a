"""Targets with mixtures under ordinary heads against transformers, in float32: logits, and text through the whole runtime.

Keeps out: a router that chooses or weighs otherwise, a shared expert without its gate, a dense layer taken for a mixture, a
part of each head that is turned otherwise, weights that nobody reads.
"""

from pathlib import Path

import pytest
import torch
from toolkit.checkpoints.load import load_target
from toolkit.checkpoints.mixtures import MIXTURES, MixtureZoo, fuse
from toolkit.models import ragged_prompts
from toolkit.oracles.texts import hold_captured_text, hold_text, hold_text_after_shared_prefixes
from toolkit.prompts import paged_logits

from specdec import SpecConfig
from specdec.models.causal_lm import CausalLM
from specdec.models.mixtures.layer import MixtureOfExperts
from specdec.models.registry import choose_target
from specdec.parallel.shard import WHOLE, Shard

CPU = torch.device("cpu")
PROMPTS = ragged_prompts(40, 5, seed=3)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> MixtureZoo:
    return MixtureZoo(tmp_path_factory.mktemp("mixtures"))


def load(folder: Path, shard: Shard = WHOLE) -> CausalLM:
    return load_target(folder, choose_target(folder, "native").config, 128, CPU, torch.float32, shard)


@pytest.mark.parametrize("name", MIXTURES)
@torch.inference_mode()
def test_logits_are_those_of_transformers(zoo: MixtureZoo, name: str) -> None:
    """Whole prompts and chunks of them."""
    hf, model = zoo.hf(name), load(zoo.target(name))
    want = torch.cat([hf(torch.tensor([prompt])).logits[0] for prompt in PROMPTS])
    close = dict(atol=1e-5 * float(want.abs().max()), rtol=1e-5)
    torch.testing.assert_close(paged_logits(model, PROMPTS), want, **close)
    torch.testing.assert_close(paged_logits(model, PROMPTS, chunk=9), want, **close)


@pytest.mark.parametrize("name", ["qwen3-moe", "qwen2-moe", "mixtral", "glm4-moe", "hy3"])
def test_fused_experts_are_the_same_model(zoo: MixtureZoo, tmp_path: Path, name: str) -> None:
    """Keeps out: ups taken for gates, an expert's rows under another's, in files as transformers 5 computes with them."""
    apart, fused = load(zoo.target(name)), load(fuse(zoo.target(name), tmp_path / "fused"))
    for (own, a), (_, b) in zip(apart.state_dict().items(), fused.state_dict().items(), strict=True):
        assert torch.equal(a, b), own


CASES = [
    ("qwen3-moe", (4, 4, 16), 16),
    ("qwen2-moe", (4, 1, 5), 1),
    ("mixtral-window", (3, 8, 24), 5),
    ("glm4-moe", (4, 4, 16), 1),
    ("ernie", (4, 2, 9), 5),
    ("hy3", (3, 4, 12), 16),
    ("dots1", (4, 1, 5), 16),
]


@pytest.mark.slow_cases
@pytest.mark.parametrize(("name", "shape", "page_size"), CASES, ids=lambda v: str(v).replace(" ", ""))
def test_text_is_that_of_transformers(zoo: MixtureZoo, name: str, shape: tuple[int, int, int], page_size: int) -> None:
    """Chains and trees at any page size, prompts longer than a chunk, rows that change owners."""
    hold_text(zoo, name, zoo.decoder(name, "eagle3", SpecConfig(*shape), page_size=page_size, max_batch_size=3))


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", ["qwen3-moe-tied", "glm4-moe-biased", "ernie-tied"])
def test_text_after_shared_prefixes(zoo: MixtureZoo, name: str) -> None:
    """Keeps out: cached pages whose keys another layer's kind would have to store otherwise."""
    hold_text_after_shared_prefixes(zoo, name, (4, 1, 5))


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "shape", "page_size"), CASES, ids=lambda v: str(v).replace(" ", ""))
def test_captured_rounds_write_the_same(zoo: MixtureZoo, name: str, shape: tuple[int, int, int], page_size: int) -> None:
    """Keeps out: experts whose number the host read while capturing."""
    hold_captured_text(zoo, name, shape, page_size)


@pytest.mark.parametrize("name", ["qwen2-moe", "glm4-moe-biased", "hy3-biased"])
@torch.inference_mode()
def test_ranks_hold_shares_of_each_expert(zoo: MixtureZoo, name: str) -> None:
    """The shares of two ranks add up to the whole.  Keeps out: a gate or a correction that is cut, or counted twice."""
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    whole, *shares = (load(zoo.target(name), shard) for shard in (Shard(), Shard(0, 2), Shard(1, 2)))
    mixtures = [[m for m in model.modules() if isinstance(m, MixtureOfExperts)] for model in (whole, *shares)]
    assert mixtures[0]
    for one, *parts in zip(*mixtures, strict=True):
        torch.testing.assert_close(sum(part(x) for part in parts), one(x), atol=1e-5, rtol=1e-5)
