"""The experts that rounds choose, counted by the device, against a count by hand of what each router answered."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from toolkit.bench import traced
from toolkit.checkpoints.mixtures import MixtureZoo, save_mixture
from toolkit.driver import Driver
from toolkit.inside.warm_ups import WarmUps
from toolkit.models import ragged_prompts
from toolkit.mtp_layers.targets import MtpZoo
from torch import nn

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.bench.budget import ChosenExperts, RoundBytes
from specdec.bench.byte_limit import byte_limit
from specdec.bench.measurement import Measurement
from specdec.bench.profile import Workload, chosen_experts
from specdec.bench.show.budget_report import print_budgets
from specdec.models.config import ModelConfig, RopeConfig
from specdec.models.making import making
from specdec.models.mixtures.counter import ExpertCounter, mixtures_of
from specdec.models.mixtures.layer import MixtureOfExperts
from specdec.models.mixtures.router import Router
from specdec.models.mixtures.rules import ExpertsConfig
from specdec.ops.products.routing import RouterRule
from specdec.session import Session

PROMPTS = ragged_prompts(40, 3, seed=11)
LLAMA = ModelConfig(
    family="llama", hidden_size=64, intermediate_size=96, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=40,
    rms_norm_eps=1e-5, rope=RopeConfig(1e4), max_position=64,
)  # fmt: skip
LONG = [SamplingParams(max_tokens=24)] * 3


@pytest.fixture(scope="module")
def mtp(tmp_path_factory: pytest.TempPathFactory) -> MtpZoo:
    return MtpZoo(tmp_path_factory.mktemp("mtp"))


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> MixtureZoo:
    return MixtureZoo(tmp_path_factory.mktemp("mixtures"))


class ByHand:
    """What routers answer, and which columns of an extend hold tokens, as seen from outside.  It takes the drafter's place."""

    def __init__(self, decoder: SpecDecoder) -> None:
        driver = Driver(decoder)
        self.last: list[int] | None = None
        self.answers = list[tuple[nn.Module, list[list[int]], list[int] | None]]()
        if driver.drafter is not None:
            self.inner = driver.drafter
            driver.replace_drafter(self)
        routers = [part for model in (decoder.model, decoder.head) for part in model.modules() if isinstance(part, Router)]
        for router in routers:
            router.register_forward_hook(self.routed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def routed(self, router: nn.Module, given: Any, answer: Any) -> None:
        self.answers.append((router, answer[1].tolist(), self.last))

    def extend(self, state: Any, needs: Any, new: Any) -> None:
        self.last = new.last_B.tolist()
        self.inner.extend(state, needs, new)
        self.last = None

    def seen(self) -> Counter[nn.Module]:
        """Distinct experts by router, of the first three of four rows, since the answers were cleared."""
        found = Counter[nn.Module]()
        for router, ids, last in self.answers:
            columns = len(ids) // 4
            counts = [columns if last is None or columns == 1 else last[row] + 1 for row in range(3)]
            found[router] += len({e for row in range(3) for c in range(counts[row]) for e in ids[row * columns + c]})
        return found


def by_round(session: Session, rounds: int) -> list[list[int]]:
    """What each of the next rounds chose, by mixture, while all prompts run."""
    found = []
    with session.counted_experts() as take, Workload(session, PROMPTS, LONG, speculate=True).running():
        for _ in range(rounds):
            take()
            session.step()
            found.append([*take().values()])
    return found


def padded(decoder: SpecDecoder) -> SpecDecoder:
    Driver(decoder).pad_rows()
    return decoder


CASES = [("glm4", None), ("glm4", (3, 3, 8)), ("glm4-three-normed", (4, 1, 5)), ("v3", (3, 1, 4))]


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_counts_are_those_of_the_routers(mtp: MtpZoo, name: str, shape: Any) -> None:
    """Keeps out: experts counted once a token, those of padded rows or of columns after the accepted tokens, passes of prompts,
    and a mixture that goes on counting afterwards."""
    spec = SpecConfig(*shape or (3, 1, 4))
    decoder = padded(mtp.decoder(name, "mtp", spec, max_batch_size=4))
    hold_by_hand(decoder, rounds=6, speculate=shape is not None)


def test_layers_that_run_one_row_of_each_sequence(mtp: MtpZoo) -> None:
    """An extend of many rows.  Keeps out: a row taken for a column."""
    decoder = padded(mtp.decoder("glm4-three-normed", "mtp", SpecConfig(3, 1, 4), max_batch_size=4))
    Driver(decoder).drafter.few_rows = 0
    hold_by_hand(decoder, rounds=2, speculate=True)


def hold_by_hand(decoder: SpecDecoder, rounds: int, speculate: bool) -> None:
    session, hand = Session(decoder), ByHand(decoder)
    with session.counted_experts() as take, Workload(session, PROMPTS, LONG, speculate).running():
        for _ in range(rounds):
            take(), hand.answers.clear()
            session.step()
            chosen = take()
            assert {mixture.router: count for mixture, count in chosen.items()} == hand.seen()
    assert {*chosen} == {*mixtures_of(session.model), *(mixtures_of(session.head) if speculate else ())}
    assert all(mixture.watch is None for mixture in chosen)


def test_of_divided_experts_the_fullest_rank_counts(mtp: MtpZoo) -> None:
    """Two ranks, of which one reads at least half of what is chosen.  Keeps out: the first rank's experts taken for all, or for
    those of the rank for which the others wait."""
    found = []
    for more in ({}, {"tensor_parallel_size": 2, "expert_parallel": "experts"}):
        with mtp.decoder("glm4", "mtp", SpecConfig(3, 2, 6), max_batch_size=3, **more) as decoder:
            found.append([*chosen_experts(Workload(Session(decoder), PROMPTS, LONG, speculate=True), rounds=4).values()])
    whole, fullest = found
    assert all(most <= each <= 2 * most for each, most in zip(whole, fullest, strict=True)) and sum(fullest) < sum(whole)


def test_transformers_mixtures_are_counted_as_ours(mixtures: MixtureZoo) -> None:
    """Keeps out: a limit that counts all experts where the target runs through transformers' code."""
    found = []
    for backend in ("native", "transformers"):
        decoder = mixtures.decoder("qwen3-moe", max_batch_size=3, backend=backend)
        chosen = chosen_experts(Workload(Session(decoder), PROMPTS, LONG, speculate=False), rounds=5)
        limit = byte_limit(decoder.model, None, None, batch=3, context=10, chosen=chosen)
        found.append(([*chosen.values()], limit.target_experts))
    assert found[0] == found[1] and found[0][1].chosen < 8


def test_the_limit_of_a_made_mixture(mtp: MtpZoo) -> None:
    """Every token chooses experts 0, 1 and 2 of 8.  Keeps out: all experts counted, in the draft's passes too; those of one
    pass counted for all; a router in float32 left out."""
    decoder = mtp.decoder("glm4", "mtp", SpecConfig(3, 2, 6), max_batch_size=3)
    session = Session(decoder)
    model, head = session.model, session.head
    assert head is not None
    for mixture in (*mixtures_of(model), *mixtures_of(head)):
        mixture.router.correction_E[:3] += 100
    expert, E, passes = 4 * 3 * 24 * model.config.hidden_size, 8, 3
    everything = byte_limit(model, head, SpecConfig(3, 2, 6), batch=3, context=10)
    chosen = chosen_experts(Workload(session, PROMPTS, LONG, speculate=True), rounds=5)
    limit = byte_limit(model, head, SpecConfig(3, 2, 6), batch=3, context=10, chosen=chosen)
    sparse = len(mixtures_of(model))
    assert limit.target_experts == ChosenExperts(sparse * 3 * expert, E, 3.0)
    assert limit.draft_experts == ChosenExperts(passes * 3 * expert, E, 3.0)
    assert everything.target_experts == ChosenExperts(sparse * E * expert, E, None)
    assert everything.target - limit.target == sparse * (E - 3) * expert
    assert everything.draft - limit.draft == passes * (E - 3) * expert


@pytest.mark.parametrize(("name", "quantize"), [("qwen3-moe", "int4"), ("qwen3-moe", "fp8"), ("ernie", "none")])
def test_experts_have_their_stored_bytes(tmp_path: Path, name: str, quantize: str) -> None:
    """Keeps out: experts in 8 or 4 bits counted in 16, or without their scales; a router whose weights are a buffer."""
    sizes = dict(hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_attention_heads=4)
    folder = save_mixture(tmp_path / "model", name, **sizes)
    model = SpecDecoder.from_pretrained(folder, device="cpu", dtype="float32", max_seq_len=64, quantize=quantize).model
    own = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    stored = [x.nbytes for mixture in own for stack in (mixture.gate_up_proj, mixture.down_proj) for x in stack.parameters()]
    none, every = (byte_limit(model, None, None, 1, 1, chosen=dict.fromkeys(own, each)).target for each in (0, 8))
    assert every - none == sum(stored) and every == byte_limit(model, None, None, 1, 1).target
    held = {x.data_ptr(): x.nbytes for x in model.parameters()} | {
        m.router.weight.data_ptr(): m.router.weight.nbytes for m in own
    }
    table = model.embed_tokens.weight
    unread = table.nbytes if table.data_ptr() != next(model.lm_head.parameters()).data_ptr() else 0
    assert every == sum(held.values()) - unread + table[0].nbytes


def test_the_report_says_what_was_counted() -> None:
    """Keeps out: a limit of which nobody knows whether it counts all experts."""
    counted, whole = ChosenExperts(10**9, 128, 18.25), ChosenExperts(10**9, 64, None)
    budget = traced(bytes=RoundBytes(2 * 10**9, 10**6, 10**9, 10**6, 6, counted, whole))
    out = io.StringIO()
    print_budgets(Measurement({}, {}, {}, {}, [], [budget], None), Console(file=out, width=80))
    assert "of that target experts, 18.2 of 128" in out.getvalue()
    assert "of that draft experts, all 64" in out.getvalue()


@pytest.mark.parametrize("whole", [False, True], ids=["phases", "whole rounds"])
def test_warm_ups_do_not_count(mtp: MtpZoo, whole: bool) -> None:
    """Keeps out: experts of the runs that come before a capture, which are for nothing."""
    plain, warmed = (padded(mtp.decoder("glm4", "mtp", SpecConfig(3, 3, 8), max_batch_size=4)) for _ in range(2))
    graphs = WarmUps([])
    Driver(warmed).use_graphs(graphs, whole)
    assert by_round(Session(plain), 4) == by_round(Session(warmed), 4) and graphs.calls > 4


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", ["round", "step", False])
def test_graphs_count_what_a_cpu_counts(mtp: MtpZoo, cuda_graphs: Any) -> None:
    """Keeps out: counts that a replay leaves as they were captured, those of a warm-up, and of the fourth, padded row."""
    made = {"cpu": padded(mtp.decoder("glm4", "mtp", SpecConfig(3, 3, 8), max_batch_size=4))}
    made["cuda"] = mtp.decoder("glm4", "mtp", SpecConfig(3, 3, 8), max_batch_size=4, device="cuda", cuda_graphs=cuda_graphs)
    found = {device: by_round(Session(decoder), 4) for device, decoder in made.items()}
    assert found["cuda"] == found["cpu"]
    before = Session(made["cuda"]).num_graphs
    assert by_round(Session(made["cuda"]), 4) == found["cpu"] and Session(made["cuda"]).num_graphs == before


def test_a_rank_counts_the_experts_that_it_holds() -> None:
    """Keeps out: experts of other ranks among those that a rank reads."""
    experts = ExpertsConfig(8, 24, RouterRule(3, "softmax"), divided=True, own=range(2, 5))
    with making(torch.device("cpu"), torch.float32):
        mixture = MixtureOfExperts(replace(LLAMA, experts=experts), experts)
    for parameter in mixture.parameters():
        parameter.data.normal_(generator=torch.Generator().manual_seed(1))
    counter, x_TH = ExpertCounter(mixture), torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    counter.attach(True)
    with torch.inference_mode(), counter.counting():
        mixture(x_TH)
    chosen = set(mixture.router(x_TH)[1].flatten().tolist()) & {2, 3, 4}
    assert counter.take() == {mixture: len(chosen)} and 0 < len(chosen) < 3
