"""Heads in 8 and 4 bits: each is the head of the numbers that its files stand for, by its own scheme and never its target's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit.checkpoints.load import load_target, read_target_config
from toolkit.heads.quantised import KINDS, WIDE, draft_scores, save_both
from toolkit.models import Zoo, save_target
from toolkit.oracles.quantised import SCHEMES, as_quantised

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.draft.eagle.head import EagleHead
from specdec.draft.load import load_head
from specdec.models.linear import Linear
from specdec.models.target import Target

CPU = torch.device("cpu")
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("wide"), **WIDE)


@pytest.fixture(scope="module")
def target(zoo: Zoo) -> Target:
    folder = zoo.target("llama")
    return load_target(folder, read_target_config(folder), 64, CPU, torch.float32)


CELLS = [(kind, scheme) for kind in KINDS for scheme in SCHEMES]
CELLS = [cell for step in range(23) for cell in CELLS[step::23]]  # 23: the first ones are of many kinds and formats


@pytest.mark.slow_cases(keep=20)
@pytest.mark.parametrize(("kind", "scheme"), CELLS)
@torch.inference_mode()
def test_scores_are_those_of_the_numbers(tmp_path: Path, zoo: Zoo, target: Target, kind: str, scheme: str) -> None:
    """Keeps out: scales of one part at another, values unpacked in another order, and a matrix that quietly stays as it was."""
    quantised, twin = (
        load_head(folder, target, 64, CPU, torch.float32) for folder in save_both(tmp_path, kind, SCHEMES[scheme], zoo)
    )
    few = [module for module in quantised.modules() if isinstance(module, Linear) and module.quantised]
    assert len(few) >= 4 and not any(module.quantised for module in twin.modules() if isinstance(module, Linear))
    found, wanted = draft_scores(quantised), draft_scores(twin)
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5 * float(wanted[wanted.isfinite()].abs().max()))


@pytest.mark.slow_cases(keep=4)
@pytest.mark.parametrize(
    ("kind", "scheme", "spec"),
    [
        ("eagle3", "fp8 channel", SpecConfig(3, 2, 6)),
        ("dflash2-all", "modelopt nvfp4", SpecConfig(3, 2, 6)),
        ("eagle1", "w4a16 g128", SpecConfig(3, 1, 4)),
        ("dspark", "w4a16 g32 asym", SpecConfig(4, 2, 8)),
        ("eagle3-layers", "awq", SpecConfig(3, 2, 6)),
        ("p-eagle", "nvfp4", SpecConfig(3, 2, 6)),
        ("dflash", "deepseek fp8", SpecConfig(4, 2, 8)),
        ("dflash2", "w8a16 g64", SpecConfig(4, 1, 5)),
        ("dspark-gated", "mxfp4", SpecConfig(4, 1, 5)),
        ("dspark-rnn", "fp8 block", SpecConfig(4, 2, 8)),
    ],
)
def test_texts_are_the_target_s_and_drafts_those_of_the_numbers(
    tmp_path: Path, zoo: Zoo, kind: str, scheme: str, spec: SpecConfig
) -> None:
    """Keeps out: a head that loads, and drafts from other numbers in a round than in a pass alone."""
    made = []
    for folder in save_both(tmp_path, kind, SCHEMES[scheme], zoo):
        with decoder(zoo.target("llama"), folder, spec) as one:
            outputs = one.generate(PROMPTS, SamplingParams(max_tokens=16))
        made.append([(out.token_ids, out.stats.rounds, out.stats.accepted) for out in outputs])
    assert made[0] == made[1] and all(rounds for _, rounds, _ in made[0])
    for (ids, *_), prompt in zip(made[0], PROMPTS, strict=True):
        assert ids == zoo.greedy("llama", prompt, 16)


def decoder(target: Path, head: Path, spec: SpecConfig, **settings: Any) -> SpecDecoder:
    merged = {"device": "cpu", "dtype": "float32", "max_seq_len": 96, "smoke": False, **settings}
    return SpecDecoder.from_pretrained(target, head, spec, **merged)


def quantised_of(model: torch.nn.Module) -> set[str]:
    return {str(module.quantised.kind) for module in model.modules() if isinstance(module, Linear) and module.quantised}


@pytest.mark.parametrize("of_target", ["none", "fp8 channel"])
@pytest.mark.parametrize("of_head", ["none", "fp8 channel", "w4a16 g128"])
def test_the_scheme_is_the_head_s_own(tmp_path: Path, zoo: Zoo, of_target: str, of_head: str) -> None:
    """Keeps out: a plain head under its target's scheme, of which nothing is accepted (vllm#9534), and the reverse."""
    plain = save_target(tmp_path / "plain", "llama", **WIDE)
    target = plain if of_target == "none" else as_quantised(plain, tmp_path / "few", SCHEMES[of_target])
    quantised, twin = save_both(tmp_path, "eagle3", SCHEMES[of_head if of_head != "none" else "fp8 channel"], zoo)
    with decoder(target, twin if of_head == "none" else quantised, SpecConfig(3, 2, 6)) as one:
        assert isinstance(one.head, EagleHead) and isinstance(one.model, torch.nn.Module)
        kinds = {"none": set(), "fp8 channel": {"e4m3"}, "w4a16 g128": {"int4"}}
        assert (quantised_of(one.model), quantised_of(one.head)) == (kinds[of_target], kinds[of_head])
        assert one.head.lm_head.quantised is None and one.head.fc.quantised is None  # which the config's ignore names


@pytest.mark.slow_cases
@pytest.mark.parametrize("scheme", ["w4a16 g128", "modelopt fp8"])
def test_a_small_model_in_few_bits_drafts(tmp_path: Path, zoo: Zoo, scheme: str) -> None:
    """Keeps out: a small model under its target's scheme, and a head's reading of a model's files."""
    twin = save_target(tmp_path / "plain", "llama", **WIDE)
    made = []
    for folder in (as_quantised(twin, tmp_path / "few", SCHEMES[scheme]), twin):
        with decoder(zoo.target("llama"), folder, SpecConfig(3, 2, 6)) as one:
            outputs = one.generate(PROMPTS, SamplingParams(max_tokens=16))
            assert isinstance(one.head, torch.nn.Module) and isinstance(one.model, torch.nn.Module)
            assert bool(quantised_of(one.head)) == (folder != twin) and not quantised_of(one.model)
        made.append([(out.token_ids, out.stats.rounds, out.stats.accepted) for out in outputs])
    assert made[0] == made[1] and [ids for ids, *_ in made[0]] == [zoo.greedy("llama", prompt, 16) for prompt in PROMPTS]
