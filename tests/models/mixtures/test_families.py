"""Targets with mixtures under ordinary heads against transformers, in float32: logits, and text through the whole runtime.

Keeps out: a router that chooses or weighs otherwise, a shared expert without its gate, a dense layer taken for a mixture, a
part of each head that is turned otherwise, weights that nobody reads.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit.checkpoints.load import load_target
from toolkit.checkpoints.mixtures import MIXTURES, MixtureZoo, fuse
from toolkit.models import ragged_prompts
from toolkit.oracles.texts import hold_captured_text, hold_text, hold_text_after_shared_prefixes
from toolkit.parallel.decoders import with_ranks
from toolkit.prompts import paged_logits

from specdec import SamplingParams, SpecConfig, SpecDecoder
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


@pytest.mark.slow_cases(keep=5)
@pytest.mark.parametrize("name", MIXTURES)
@torch.inference_mode()
def test_logits_are_those_of_transformers(zoo: MixtureZoo, name: str) -> None:
    """Whole prompts and chunks of them."""
    hf, model = zoo.hf(name), load(zoo.target(name))
    want = torch.cat([hf(torch.tensor([prompt])).logits[0] for prompt in PROMPTS])
    close = dict(atol=1e-5 * float(want.abs().max()), rtol=1e-5)
    torch.testing.assert_close(paged_logits(model, PROMPTS), want, **close)
    torch.testing.assert_close(paged_logits(model, PROMPTS, chunk=9), want, **close)


@pytest.mark.parametrize("name", ["qwen3-moe", "qwen2-moe", "mixtral", "glm4-moe", "hy3", "minimax"])
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
    ("minimax", (4, 2, 9), 5),
    ("olmoe", (3, 1, 4), 1),
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


@pytest.mark.slow_cases(keep=1)
@pytest.mark.parametrize("name", ["minimax", "qwen2-moe-normed", "glm4-moe-biased", "olmoe"])
def test_two_ranks_write_what_one_writes(zoo: MixtureZoo, name: str) -> None:
    """Keeps out: outputs of experts that no rank adds up; a rank that chooses otherwise than the other one;
    heads normed by a rank's own values alone."""

    def use(decoder: SpecDecoder) -> list[list[int]]:
        return [out.token_ids for out in decoder.generate(PROMPTS, SamplingParams(max_tokens=12))]

    spec, settings = SpecConfig(3, 2, 6), {"max_batch_size": 3, "max_seq_len": 80}
    one = use(zoo.decoder(name, "eagle3", spec, **settings))
    more: Any = {"dtype": torch.float32, "max_batch_size": 3, "smoke": False}
    assert with_ranks(zoo.target(name), zoo.head(name, "eagle3"), spec, 2, use, **more) == one


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


# A family, keys that its config.json gets, and what is said of them.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3-moe", {"num_experts_per_tok": 9}, "num_experts_per_tok must be at most num_experts 8, got 9"),
    ("qwen3-moe", {"mlp_only_layers": ["first"]}, "mlp_only_layers must be null or a list of layers' numbers"),
    ("qwen3-moe", {"mlp_only_layers": [1, 3]}, r"must hold numbers of layers from 0 to 2, .* got \[1, 3\]; nearest .* \[1\]"),
    ("qwen3-moe", {"mlp_only_layers": [0, 1]}, r"layer 0 is dense by mlp_only_layers .* layers 0, 2, got layer 2$"),
    ("qwen3-moe", {"mlp_only_layers": []}, r"layer 1 is a mixture by mlp_only_layers .* layers 0, 2, got layers 0 to 2$"),
    ("glm4-moe", {"first_k_dense_replace": 9}, "layer 1 is dense by first_k_dense_replace, .* layers 1 to 2, got no layer$"),
    ("glm4-moe", {"num_experts": 9}, "num_experts is another name of n_routed_experts, so both must be equal"),
    ("qwen3-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step must be a whole number of at least 1, got 0"),
    ("qwen3-moe", {"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
    ("qwen3-moe", {"moe_router": "sinkhorn"}, "unknown config keys moe_router"),
    ("qwen3-moe", {"moe_intermediate_size": 16}, r"must have shape \(16, 32\), got \(24, 32\).* moe_intermediate_size"),
    ("qwen3-moe", {"num_local_experts": 16}, r"must have shape \(16, 32\), got \(8, 32\).* num_experts and hidden_size"),
    ("qwen2-moe", {"shared_expert_intermediate_size": None}, "lacks shared_expert_intermediate_size"),
    ("mixtral", {"num_local_experts": None}, "lacks num_local_experts"),
    ("glm4-moe", {"n_group": 3}, "n_routed_experts must be a multiple of n_group"),
    ("glm4-moe", {"rope_parameters": {"partial_rotary_factor": 0.1}}, "must rotate an even number of the 16 values"),
    ("hy3", {"mlp_layer_types": ["dense"]}, "mlp_layer_types must be a list of 'dense' or 'sparse' for each layer"),
    ("minimax", {"scoring_func": "softmax"}, "scoring_func must be 'sigmoid', got 'softmax'"),
    ("minimax", {"shared_intermediate_size": 8}, "shared_intermediate_size must be 0, got 8"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv must be None, got 8.0"),
    ("ernie", {"moe_k": 9}, "moe_k must be at most moe_num_experts 8, got 9"),
]


@pytest.mark.parametrize(("name", "keys", "says"), REFUSED, ids=[f"{case[0]}-{next(iter(case[1]))}" for case in REFUSED])
def test_what_would_change_the_model_is_an_error(
    zoo: MixtureZoo, tmp_path: Path, name: str, keys: dict[str, Any], says: str
) -> None:
    """Keeps out: a key that changes the model and that nobody reads, and sizes that the checkpoint does not have."""
    folder = zoo.target(name)
    (tmp_path / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | keys))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(ValueError, match=says):
        load(tmp_path)
