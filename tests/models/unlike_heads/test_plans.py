"""What plans, ranks and `specdec inspect` say of targets with unlike heads, against what is held.

Keeps out: bytes of another kind's heads, a rank's share of another kind's, and a width that a command takes for all layers.
"""

from pathlib import Path
from typing import Any

import pytest
import toolkit.unlike.targets  # noqa: F401 (its targets)
import torch
from toolkit.checkpoints.load import load_target
from toolkit.models import Zoo
from toolkit.parallel.ranks import ThreadGroup, on_ranks
from torch import Tensor

from specdec import cli
from specdec.attention.eager.dense import DenseAttention
from specdec.loading.about.inspect_target import _sizes, target_facts
from specdec.loading.plan import tensor_bytes
from specdec.models.causal_lm import CausalLM
from specdec.models.config import ModelConfig
from specdec.models.kv import make_cache, token_bytes_by_kind
from specdec.models.registry import check_chosen, choose_target
from specdec.models.sharding import join, misfit, share_of
from specdec.parallel.shard import WHOLE, Shard

CPU, T = torch.device("cpu"), 9
NAMES = ("mimo", "mimo-alike", "gemma", "gemma-small", "gemma-mixture")


def load(folder: Path, shard: Shard = WHOLE) -> CausalLM:
    return load_target(folder, choose_target(folder, "native").config, 64, CPU, torch.float32, shard)


@torch.inference_mode()
def logits(model: CausalLM) -> Tensor:
    """[T, V] of this rank's run of the vocabulary, for tokens that ask for all rows but the first."""
    ids_T = torch.randint(0, 40, (T,), generator=torch.Generator().manual_seed(3))
    attn = DenseAttention(model.config.layer_kinds, kv_layers=model.config.kv_source)
    return model.logits(model(ids_T, torch.arange(T), attn, (0,), torch.arange(1, T)).hidden_TH)


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_ranks_compute_the_whole_model(zoo: Zoo, name: str, size: int) -> None:
    """In most of these cases some layers alone have fewer key/value heads than there are ranks."""
    folder = zoo.target(name)
    whole = load(folder)
    copies = {share_of(whole.config, Shard(0, size)).heads_of(layer).kv_copies for layer in range(whole.config.num_layers)}
    assert misfit(whole.config, size) == "" and (
        len(copies) == 2 or name == "gemma-small" or (name, size) == ("gemma-mixture", 2)
    )

    def on_rank(group: ThreadGroup) -> Tensor:
        model = load(folder, Shard(group.rank, group.size))
        join(model, group)
        return logits(model)

    torch.testing.assert_close(torch.cat(on_ranks(size, on_rank), dim=-1), logits(whole), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_a_plan_counts_what_a_rank_holds(zoo: Zoo, name: str, size: int) -> None:
    """Bytes of weights by headers alone, and of a cache by the config alone."""
    folder = zoo.target(name)
    choice = choose_target(folder, "native")
    checkpoint, own = check_chosen(choice, folder), share_of(choice.config, Shard(0, size))
    model = load(folder, Shard(0, size))
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    spare = {name for name in tensors if name.endswith("rotary.table") or name.startswith("other_rotaries")}
    spare |= {"lm_head.weight"} if own.tie_embeddings else set()
    held = sum(x.nbytes for name, x in tensors.items() if name not in spare)
    assert tensor_bytes(checkpoint, own, torch.float32, set()) == held
    cache = make_cache(model, own, 10, "auto", torch.float32, CPU)
    assert cache.bytes == 10 * sum(token_bytes_by_kind(own, "auto", torch.float32).values())


def sizes(config: ModelConfig) -> dict[str, Any]:
    return _sizes(config, {})


def test_inspect_says_them_by_kind(zoo: Zoo) -> None:
    found = sizes(choose_target(zoo.target("mimo"), "native").config)
    assert found["heads, kv heads, head_dim"] == {"full": [4, 1, 16, "values 12"], "window 6": [4, 2, 16, "values 12"]}
    assert found["by kind of layer"] == {"full": 2 * 4 * 28, "window 6": 2 * 4 * 2 * 28}  # float32
    assert found["rope"]["full"]["theta"] == 5e3 and found["rope"]["window 6"]["theta"] == 1e2
    found = sizes(choose_target(zoo.target("gemma-small"), "native").config)
    assert found["heads, kv heads, head_dim"] == {"window 6": [4, 1, 16], "full": [4, 1, 24]}
    assert found["by kind of layer"] == {"window 6": 2 * 4 * 32, "full": 4 * 48} and found["layers that store keys"] == 3


def test_inspect_of_a_folder_that_transformers_saved(zoo: Zoo, capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: lists that lose their last bracket, and a width of full layers that is said to be absent (512) though
    per_layer_config holds it."""
    folder = zoo.target("gemma")
    assert "global_head_dim" not in target_facts(folder)["meanings"]
    assert cli.main(["inspect", str(folder)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "window 6: [4, 4, 16], full: [4, 1, 24]" in said and "theta: 5000.0, share: 0.25}" in said
