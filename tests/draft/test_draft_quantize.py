"""`draft_quantize`: heads of every kind rounded as they are loaded, beside targets that are not."""

import re
from typing import Any

import pytest
import torch
from toolkit.checkpoints.plans import plan_memory
from toolkit.heads import block_zoo  # noqa: F401  (adds kinds to the zoo)
from toolkit.models import Zoo

from specdec import SamplingParams, SpecConfig
from specdec.models.linear import Linear
from specdec.options import EngineOptions

KEPT = re.compile("markov|convolutions|selector")  # small matrices, on which the choice of every token rests
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]
SETTINGS: dict[str, Any] = {"max_batch_size": 2, "max_seq_len": 96}


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize("kind", ["eagle3", "eagle1", "p-eagle", "dflash", "dflash2", "dspark-gated"])
@pytest.mark.parametrize("to", ["fp8", "int4"])
def test_a_rounded_head_changes_no_text(zoo: Zoo, kind: str, to: str) -> None:
    """Keeps out: an option that is read and does nothing, a rounded target, a shared output layer that is rounded for the head,
    and a plan of 16 bits for weights that take 8 or 4.
    """
    spec = SpecConfig(3, 2, 6)
    with zoo.decoder("llama", kind, spec, draft_quantize=to, **SETTINGS) as decoder:
        made = decoder.generate(PROMPTS, SamplingParams(max_tokens=24))
        head = decoder.head
        assert isinstance(head, torch.nn.Module) and sum(one.stats.drafted for one in made)
        assert not any(module.quantised for module in decoder.model.modules() if isinstance(module, Linear))
        matrices = {name: module for name, module in head.named_modules() if isinstance(module, Linear)}
        plain = {name for name, module in matrices.items() if module.quantised is None and not KEPT.search(name)}
        shared = {"lm_head"} if matrices["lm_head"] is decoder.model.lm_head else set()
        assert plain - {"confidence"} == shared and len(matrices) > 4
        own = sum(weight.nbytes for weight in set(head.parameters()) - set(decoder.model.parameters()))
    for one, prompt in zip(made, PROMPTS, strict=True):
        assert one.token_ids == zoo.greedy("llama", prompt, 24)
    options = EngineOptions(dtype="float32", draft_quantize=to, **SETTINGS)
    parts = plan_memory(zoo.target("llama"), zoo.head("llama", kind), spec, options, 10**9).parts
    if kind in ("eagle3", "eagle1", "p-eagle"):  # plans of the others are a little off without rounding, too
        assert parts["weights of the draft head"] == own


@pytest.mark.parametrize("draft", [None, "ngram"])
def test_without_weights_of_its_own_there_is_nothing_to_round(zoo: Zoo, draft: str | None) -> None:
    """Keeps out: a setting that is taken and ignored."""
    with pytest.raises(ValueError, match=r"draft_quantize='fp8' would do nothing with draft=.*: draft_quantize='none'"):
        zoo.decoder("llama", draft, SpecConfig(3, 1, 4) if draft else None, draft_quantize="fp8")
