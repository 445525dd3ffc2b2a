"""Rows of the engine that begin with the same pages read them together, and write and accept what they do alone.

Keeps out: a group that saves less than another, a row that leaves and is still a member, sharing where it does not pay.
"""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from toolkit.deepseek import DeepseekZoo
from toolkit.driver import Driver
from toolkit.families import Families
from toolkit.models import Zoo, ragged_prompts
from toolkit.prompts import SYSTEM, assert_same

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.engine.pages.sharing import NO_GROUP, best_group, common_length


def groups_by_force(rows: list[list[int]]) -> int:
    """The most reads that any group of rows saves."""
    best = 0
    for size in range(2, len(rows) + 1):
        for group in itertools.combinations(rows, size):
            common = min(common_length(group[0], other) for other in group)
            best = max(best, (size - 1) * common)
    return best


def test_the_best_group_is_the_best() -> None:
    """Keeps out: a choice that follows one row which shares little, while the others share much."""
    assert best_group([[1, 2, 3], [1, 9], [1, 2, 3], [1, 2, 3]]) == ([0, 2, 3], 3)
    assert best_group([]) == best_group([[1]]) == best_group([[1], [2]]) == best_group([[], []]) == NO_GROUP
    rng = random.Random(0)
    for _ in range(200):
        rows = [[rng.choice([1, 1, 1, 2]) for _ in range(rng.randrange(6))] for _ in range(rng.randrange(7))]
        found = best_group(rows)
        members = [rows[row] for row in found.rows]
        assert all(row[: found.pages] == members[0][: found.pages] and len(row) >= found.pages for row in members)
        assert max(0, len(members) - 1) * found.pages == groups_by_force(rows)


def test_common_length() -> None:
    rng = random.Random(0)
    for _ in range(300):
        a, b = ([rng.randrange(2) for _ in range(rng.randrange(9))] for _ in range(2))
        assert common_length(a, b) == next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


# ---- in the engine ----


def pair(zoo: Zoo, target: str, kind: str | None, spec: SpecConfig | None, **more: Any) -> tuple[SpecDecoder, SpecDecoder]:
    """A decoder that shares whenever there is anything to share, and one that keeps nothing."""
    settings = {"page_size": 4, "max_batch_size": 4, "max_seq_len": 96, **more}
    sharing = zoo.decoder(target, kind, spec, **settings, prefix_caching=True)
    Driver(sharing).set_least_shared(1)
    return sharing, zoo.decoder(target, kind, spec, **settings)


CASES = [
    ("llama", "eagle3", SpecConfig(4, 1, 5), 1), ("llama", "eagle1-two-layers", SpecConfig(3, 2, 7), 16),
    ("llama", None, None, 4), ("mistral", "eagle3-window", SpecConfig(3, 4, 12), 4),
    ("qwen2", "eagle1-window", SpecConfig(3, 3, 8), 4),
]  # fmt: skip


@pytest.mark.slow_cases(keep=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "kind", "spec", "page_size", "depth"), [(*case, i % 2) for i, case in enumerate(CASES)], ids=str
)
def test_text_and_drafts_stay_the_same(
    zoo: Zoo, target: str, kind: str | None, spec: SpecConfig | None, page_size: int, depth: int,
) -> None:  # fmt: skip
    """Requests of different lengths come and go, some strangers among them: groups grow, shrink, change and vanish."""
    sharing, alone = pair(zoo, target, kind, spec, page_size=page_size, max_seq_len=200)
    Driver(sharing).set_depth(depth)
    seen = Driver(sharing).watch_sharing()
    x, y, z = ragged_prompts(40, 3, seed=2)
    prompts = [[*SYSTEM, 1], [*SYSTEM, 2, 3], x, [*SYSTEM, *[4] * 6], [*SYSTEM, *[4] * 8], y, [*SYSTEM, 5], z]
    params = [SamplingParams(max_tokens=length) for length in (9, 24, 3, 17, 30, 12, 5, 21)]
    assert_same(sharing.generate(prompts, params), alone.generate(prompts, params))
    first = set(seen)
    assert_same(sharing.generate(prompts, params), alone.generate(prompts, params))
    assert {tokens for _, tokens in seen} and len(set(seen)) >= 3 and max(seen)[0] >= 3, (first, seen)
    assert max(tokens for _, tokens in seen) >= (len(SYSTEM) - 1) // page_size * page_size
    Driver(sharing).assert_nothing_leaked()


class FamilyZoo(Zoo):
    """Targets through transformers."""

    def target(self, name: str) -> Path:
        return Families(self.root).target(name)


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", ["v3", "gemma3", "gpt-oss", "llama4"])
def test_other_targets_share_too(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    """Latents, windows and chunks among full layers, sinks: found and shared, they write what they write alone."""
    zoo = (DeepseekZoo if name == "v3" else FamilyZoo)(tmp_path_factory.mktemp("others"))
    sharing, alone = pair(zoo, name, "eagle3", SpecConfig(3, 2, 7))
    seen = Driver(sharing).watch_sharing()
    prompts, sampling = [[*SYSTEM, 1], [*SYSTEM, 2, 3], [*SYSTEM, 4, 5, 6]], SamplingParams(max_tokens=14)
    want = alone.generate(prompts, sampling)
    for _ in range(2):
        got = sharing.generate(prompts, sampling)
        assert_same(got, want)
    assert (3, 36) in seen and all(out.stats.cached_tokens == 36 for out in got)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["round", "step"])
@pytest.mark.parametrize("spec", [SpecConfig(3, 4, 12), SpecConfig(4, 1, 5)], ids=str)
def test_graphs_stay_right_when_membership_changes(zoo: Zoo, spec: SpecConfig, graphs: str) -> None:
    """Keeps out: a captured round that remembers who shared when it was captured, prompts' graphs that start at 0."""
    sharing, _ = pair(zoo, "llama", "eagle3", spec, max_seq_len=200, device="cuda", cuda_graphs=graphs, attention="triton")
    seen = Driver(sharing).watch_sharing()
    prompts = [[*SYSTEM, i, *tail] for i, tail in enumerate(ragged_prompts(40, 9, seed=1))]
    prompts[4:4] = ragged_prompts(40, 4, seed=2)
    params = [SamplingParams(max_tokens=length) for length in (9, 24, 3, 17, 30, 12, 5, 21, 8, 28, 14, 6, 19)]
    want = [zoo.greedy("llama", prompt, 30)[: p.max_tokens] for prompt, p in zip(prompts, params, strict=True)]
    for _ in range(4):
        got = sharing.generate(prompts, params)
        assert [out.token_ids for out in got] == want
        assert sharing.generate(prompts, params, speculate=False)[3].token_ids == want[3]
    assert len(set(seen)) >= 3 and Driver(sharing).num_graphs("prefill") > 0
    Driver(sharing).assert_nothing_leaked()


@pytest.mark.slow
def test_auto_with_pauses(zoo: Zoo) -> None:
    """Paused rounds and catching up share as well."""
    sharing, alone = pair(zoo, "llama", "eagle3", SpecConfig("auto", 3, 12), max_seq_len=128)
    seen = Driver(sharing).watch_sharing()
    prompts, sampling = [[*SYSTEM, 1], [*SYSTEM, 2], [*SYSTEM, 3]], SamplingParams(max_tokens=40)
    for decoder in (sharing, alone):
        Driver(decoder).script_levels(3, 0, 0, 0, 2, 0, *[3] * 4, *[0] * 9, 3)
    alone.generate(prompts, sampling)  # both have prefilled their pages before they are compared
    sharing.generate(prompts, sampling)
    for decoder in (sharing, alone):
        Driver(decoder).script_levels(3, 0, 0, 0, 2, 0, *[3] * 4, *[0] * 9, 3)
    assert_same(sharing.generate(prompts, sampling), alone.generate(prompts, sampling))
    assert (3, 36) in seen


def test_sharing_starts_where_it_pays(zoo: Zoo) -> None:
    """Keeps out: graphs with one more state to merge for a page that two rows have in common."""
    sharing, _ = pair(zoo, "llama", "eagle3", SpecConfig(3, 4, 12))
    Driver(sharing).set_least_shared(2 * 36)
    seen = Driver(sharing).watch_sharing()
    prompts = [[*SYSTEM, 1], [*SYSTEM, 2], [*SYSTEM, 3]]
    sharing.generate(prompts[:2], SamplingParams(max_tokens=9))
    sharing.generate(prompts[:2], SamplingParams(max_tokens=9))
    assert not seen
    sharing.generate(prompts, SamplingParams(max_tokens=9))
    assert seen and set(seen) == {(3, 36)}


def test_the_shared_read_is_used(zoo: Zoo) -> None:
    """Members whose own tables say nothing of the shared pages still write the right text: they read them through the one."""
    sharing, alone = pair(zoo, "llama", "eagle3", SpecConfig(3, 4, 12))
    prompts, sampling = [[*SYSTEM, 1], [*SYSTEM, 2], [*SYSTEM, 3]], SamplingParams(max_tokens=20)
    want = alone.generate(prompts, sampling)
    sharing.generate(prompts, SamplingParams(max_tokens=1))
    driver = Driver(sharing)

    def blind() -> None:
        if len(driver.running) == 3:
            driver.blind_tables(rows=3, pages=36 // 4)
        else:
            driver.cancel_all()

    driver.before_each_round(blind)
    requests = [driver.submit(prompt, sampling) for prompt in prompts]
    driver.run_until_idle()
    got = [request.output.token_ids for request in requests]
    shortest = min(map(len, got))
    assert shortest > 9 and [ids[:shortest] for ids in got] == [out.token_ids[:shortest] for out in want]
