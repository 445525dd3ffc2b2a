"""Rows that begin with the same pages read them once: three states instead of two, and the same attention, text and drafts.

Keeps out: a shared page that is read twice or by a stranger, windows that forget where the shared part ends, a row that leaves
and is still a member, a padded row that turns the others into NaN.

Shapes: B sequences, n queries of each, H heads, K kv heads, D head dim.
"""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit.deepseek import DeepseekZoo
from toolkit.driver import Driver
from toolkit.families import Families
from toolkit.models import Zoo, ragged_prompts
from toolkit.prompts import SYSTEM, assert_same
from torch import Tensor

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.attention.attend import PagedAttention
from specdec.attention.backend import Backend
from specdec.attention.caches.kv_cache import MHACache
from specdec.attention.eager.reference import ReferenceBackend
from specdec.attention.eager.torch_backend import TorchBackend
from specdec.attention.kinds import FULL, LayerKind
from specdec.attention.plan import causal_segment, prefix_segment
from specdec.attention.segment import AttentionPlan, Segment, last_positions
from specdec.attention.shared import SharedPrefix, split_shared
from specdec.batch.state import BatchState
from specdec.engine.pages.sharing import NOBODY, best_group, common_length


def groups_by_force(rows: list[list[int]]) -> int:
    """The most reads that any group of rows saves."""
    best = 0
    for size in range(2, len(rows) + 1):
        for group in itertools.combinations(rows, size):
            common = min(common_length(group[0], other) for other in group)
            best = max(best, (size - 1) * common)
    return best


def test_the_best_group_is_the_best() -> None:
    """Keeps out: a group that is led by a row which shares little, while the others share much."""
    assert best_group([[1, 2, 3], [1, 9], [1, 2, 3], [1, 2, 3]]) == ([0, 2, 3], 3)
    assert best_group([]) == best_group([[1]]) == best_group([[1], [2]]) == best_group([[], []]) == NOBODY
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


# ---- attention ----

KINDS = (FULL, LayerKind(window=3), LayerKind(window=14), LayerKind(chunk=5), LayerKind(chunk=64))


class World:
    """Four rows: two members that share `shared` tokens, one stranger, one of padding.  Unread slots hold NaN."""

    def __init__(self, page_size: int, shared: int, fresh: int, dtype: torch.dtype, device: str, kinds: Any = KINDS) -> None:
        self.page_size, self.fresh, self.device, self.dtype = page_size, fresh, device, dtype
        self.lens = [shared + 5, shared + 2 * page_size + 1, 9, 0]
        width = -(-(max(self.lens) + fresh) // page_size) + 1
        table = (torch.randperm(4 * width, generator=torch.Generator().manual_seed(shared)).view(4, width) + 1).int()
        table[3] = 0
        table[1, : shared // page_size] = table[0, : shared // page_size]
        self.cache = MHACache(len(kinds), (4 * width + 1) * page_size, 2, 16, dtype=dtype, device=device, kinds=kinds)
        self.cache.kv.fill_(torch.nan)
        for row, length in enumerate(self.lens):
            at = torch.arange(length + fresh)
            slots = table[row, at // page_size].long() * page_size + at % page_size
            self.cache.kv[:, slots.to(device)] = torch.randn(len(kinds), len(at), 2, 2, 16, dtype=dtype, device=device)
        self.table, self.lens_B = table.to(device), torch.tensor(self.lens, dtype=torch.int32, device=device)
        state = BatchState.empty(4, width, 0, 0, device=device, dtype=dtype)
        self.shared = SharedPrefix.empty(state.page_table_BW, 10)
        if shared:
            self.shared.set([0, 1], table[0, : shared // page_size].tolist(), shared)

    def plans(self, n: int, tree: bool) -> tuple[AttentionPlan, AttentionPlan]:
        """The same reads, as they were and shared: a chain's causal rows, or a prefix and one-query suffixes."""
        if not tree:
            own = causal_segment(self.table, self.lens_B + n, n, self.page_size)
            positions, suffix = last_positions(own), None
        else:
            own = prefix_segment(self.table, self.lens_B, n, self.page_size)
            depth = torch.arange(n, device=self.device).clamp(max=2)
            positions = (self.lens_B.long()[:, None] + depth).flatten()
            at = self.lens_B[:, None, None] + torch.stack([torch.zeros_like(depth), depth], dim=1)  # the root, and itself
            pages = self.table.long().gather(1, (at // self.page_size).flatten(1).long()).view(at.shape)
            slots = (pages * self.page_size + at % self.page_size).flatten(0, 1).int()
            suffix = Segment.of_slots(slots, (depth.repeat(4) > 0).int() + 1, self.lens_B)
        plain, split = (AttentionPlan(split_shared(own, shared), positions, suffix) for shared in (None, self.shared))
        return plain, split

    def attend(self, backend: Backend, plan: AttentionPlan, q_THD: Tensor) -> list[Tensor]:
        """What each layer's queries get."""
        attn = PagedAttention(backend, self.cache, plan, torch.zeros(0, dtype=torch.int64))
        return [
            backend.attend(q_THD, self.cache.view(layer), attn.prepared[kind])
            for layer, kind in enumerate(self.cache.kinds)
        ]  # fmt: skip


@pytest.mark.parametrize("tree", [False, True], ids=["causal", "tree"])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize(("page_size", "shared"), [(1, 7), (4, 0), (4, 16), (16, 32)])
def test_shared_equals_unshared(page_size: int, shared: int, n: int, tree: bool) -> None:
    """Every layer kind; members, a stranger and a padded row; nothing shared at all is a case like any other."""
    torch.manual_seed(page_size + n)
    world = World(page_size, shared, n, torch.float64, "cpu")
    q = torch.randn(4 * n, 4, 16, dtype=torch.float64)
    plain, split = world.plans(n, tree)
    want = world.attend(ReferenceBackend(), plain, q)
    for backend in (ReferenceBackend(), TorchBackend()):
        for got, right, kind in zip(world.attend(backend, split, q), want, KINDS, strict=True):
            assert not got[: 3 * n].isnan().any()
            torch.testing.assert_close(got[: 3 * n], right[: 3 * n], atol=1e-10, rtol=1e-10, msg=f"{backend.name} {kind}")


@pytest.mark.parametrize(("n", "tree", "page_size", "shared"), [(1, False, 4, 16), (3, False, 16, 32), (3, True, 4, 16)])
def test_kernels_share(n: int, tree: bool, page_size: int, shared: int) -> None:
    """The triton backend: three states in one merge."""
    pytest.importorskip("triton")
    from specdec.attention.kernels.triton_backend import TritonBackend

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(n)
    kinds = KINDS if device == "cuda" else KINDS[:2]
    world = World(page_size, shared, n, torch.float32, device, kinds)
    q = torch.randn(4 * n, 4, 16, device=device)
    plain, split = world.plans(n, tree)
    want = world.attend(ReferenceBackend(), plain, q)
    backend = TritonBackend(programs=32)
    for got, right in zip(world.attend(backend, split, q), want, strict=True):
        torch.testing.assert_close(got[: 3 * n], right[: 3 * n], atol=2e-5, rtol=2e-5)


def test_many_queries_read_as_ever() -> None:
    """Keeps out: one more launch a layer where arithmetic takes the time, as in the verification of a large tree."""
    world = World(4, 16, 4, torch.float64, "cpu")
    own = prefix_segment(world.table, world.lens_B, 11, 4)
    assert split_shared(own, world.shared) == split_shared(own, None) == (own,)
    assert len(split_shared(prefix_segment(world.table, world.lens_B, 10, 4), world.shared)) == 2


def test_nothing_is_read_twice() -> None:
    """The members' own tables may say anything where they share."""
    world = World(4, 16, 4, torch.float64, "cpu")
    q = torch.randn(16, 4, 16, dtype=torch.float64)
    plain, _ = world.plans(4, tree=False)
    want = world.attend(ReferenceBackend(), plain, q)
    spare = world.table[1].clone()
    world.table[:2, :4] = 4 * world.table.shape[1]  # a page of NaN
    assert world.cache.kv[:, 16 * world.table.shape[1]].isnan().all() and spare[0] != world.table[1, 0]
    _, split = world.plans(4, tree=False)
    for got, right in zip(world.attend(TorchBackend(), split, q), want, strict=True):
        torch.testing.assert_close(got[:12], right[:12], atol=1e-10, rtol=1e-10)


# ---- in the engine ----


def pair(zoo: Zoo, target: str, kind: str | None, spec: SpecConfig | None, **more: Any) -> tuple[SpecDecoder, SpecDecoder]:
    """A decoder that shares whenever there is anything to share, and one that keeps nothing."""
    settings = {"page_size": 4, "max_batch_size": 4, "max_seq_len": 96, **more}
    sharing = zoo.decoder(target, kind, spec, **settings, prefix_caching=True)
    Driver(sharing).set_least_shared(1)
    return sharing, zoo.decoder(target, kind, spec, **settings)


CASES = [
    ("llama", "eagle3", SpecConfig(3, 4, 12), 4), ("llama", "eagle3", SpecConfig(4, 1, 5), 1),
    ("llama", "eagle1-two-layers", SpecConfig(3, 2, 7), 16), ("llama", None, None, 4),
    ("mistral", "eagle3-window", SpecConfig(3, 4, 12), 4), ("mistral", "eagle3", SpecConfig(4, 1, 5), 4),
    ("qwen2", "eagle1-window", SpecConfig(3, 3, 8), 4),
]  # fmt: skip


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("target", "kind", "spec", "page_size"), CASES, ids=str)
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
