"""Windows and shared prefixes of the flash-attn libraries: what of them a library reads, against the definition.

On a CPU through stand-ins, on a GPU the packages that are installed.

Shapes: B sequences, T queries, H heads, K kv heads, D head dim.
"""

from typing import Any

import pytest
import torch
from toolkit.attention import fake_flash
from toolkit.attention.caches import Scattered
from toolkit.attention.segments import ragged_causal_segment
from toolkit.inside.captures import capturing
from toolkit.oracles.reference import ReferenceBackend
from torch import Tensor

from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.capabilities import TABLE, installed
from specdec.attention.flash.adapters import ADAPTERS, can_express
from specdec.attention.flash.backend import FlashBackend
from specdec.attention.flash.conventions import check_conventions
from specdec.attention.flash.rule import AttentionShape
from specdec.attention.kinds import FULL, PLAIN, LayerKind, Scoring
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment, prefix_segment
from specdec.attention.segment import AttentionPlan, Segment, last_positions
from specdec.attention.shared import SharedPrefix, split_shared
from specdec.attention.state import AttentionState

H, K, P = 4, 2, 256
LENS, PROMPTS = [300, 0, 3, 511], [300, 0, 3, 40]
REAL = [name for name in ADAPTERS if torch.cuda.is_available() and installed(TABLE[name].machine.package or "")]
DEVICE, DTYPE, BOUND = ("cuda", torch.bfloat16, 2e-2) if REAL else ("cpu", torch.float16, 4e-3)
NAMES = REAL or list(ADAPTERS)
WINDOWED = [name for name in NAMES if "window" in TABLE[name].kinds]
OF_PACKAGES = pytest.mark.skipif(not REAL, reason="none of the flash-attn packages is installed; stand-ins run on a CPU")
WINDOWS = {f"window {size}": LayerKind(window=size) for size in (1, 5, 129, 512)}


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    if not REAL:
        fake_flash.install(monkeypatch)


def dim_of(name: str) -> int:
    """A head dim of which the installed package has kernels: builds of fa2 leave the small ones out."""
    return {"fa2": 64}.get(name, 128) if REAL else 16


class World:
    """A scattered page table whose first two rows begin alike, and layers of keys that are NaN wherever nobody may read."""

    def __init__(self, name: str, lens: list[int], layers: int = 1) -> None:
        pages = Scattered(lens, P, spare=1, seed=7, device=DEVICE)
        self.pages, self.lens_B = PageTable(pages.table_BW, P), pages.lens_B
        kv = pages.fill(layers, 2, K, dim_of(name), dtype=DTYPE).view(-1, layers, 2, K, dim_of(name))
        self.views = [MHAView(kv[:, layer].contiguous()) for layer in range(layers)]

    def queries(self, segment: Segment) -> Tensor:
        count, D = int(segment.cu_seqlens_q[-1]), self.views[0].kv.shape[-1]
        return torch.randn(count, H, D, generator=torch.Generator().manual_seed(count)).to(DEVICE, DTYPE)


def of_shape(world: World, shape: str, kind: LayerKind) -> Segment:
    pages, lens_B = world.pages, world.lens_B
    if shape == "prompts":
        segment = ragged_causal_segment(pages, PROMPTS, LENS)
        at_T = torch.cat([torch.arange(L - n, L) for n, L in zip(PROMPTS, LENS, strict=True)]).to(DEVICE)
        return segment.local(kind, at_T)
    segment = causal_segment(pages, lens_B, {"decode": 1, "chain": 5}[shape], "queries")
    return segment.local(kind, last_positions(segment))


def close(got: AttentionState, want: AttentionState) -> None:
    torch.testing.assert_close(got.out_THD.double(), want.out_THD.double(), atol=BOUND, rtol=BOUND)
    torch.testing.assert_close(got.lse_TH.double(), want.lse_TH.double(), atol=4e-3, rtol=4e-3)


def in_float64(view: MHAView) -> MHAView:
    return MHAView(view.kv.double())


@pytest.mark.parametrize("scoring", [PLAIN, Scoring(0.1, 2.0)], ids=["plain", "softcap"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", ["chain", "decode", "prompts"])
@pytest.mark.parametrize("name", WINDOWED)
def test_a_window_is_the_librarys(name: str, shape: str, window: str, scoring: Scoring) -> None:
    """Keeps out: a window that is one key too long, or counts from another query; a row shorter than its window."""
    if scoring.softcap and window != "window 5":
        pytest.skip("compiles, and another window shows nothing new")
    world = World(name, LENS)
    segment = of_shape(world, shape, WINDOWS[window])
    q_THD = world.queries(segment)
    assert can_express(segment) and FlashBackend(name).partial_splits(q_THD, world.views[0], segment, scoring) == 0
    got = ADAPTERS[name](q_THD, world.views[0], segment, scoring, {})
    close(got, ReferenceBackend().run(q_THD.double(), in_float64(world.views[0]), segment, scoring))


@pytest.mark.parametrize("name", NAMES)
def test_what_no_argument_says_is_left_to_our_kernel(name: str) -> None:
    """Keeps out: a tree's window that the library would shift from node to node, a chunk."""
    world = World(name, LENS)
    prefix, chain = prefix_segment(world.pages, world.lens_B, 5), causal_segment(world.pages, world.lens_B, 5)
    at_T = world.lens_B.long().repeat_interleave(5)
    lone, window = prefix_segment(world.pages, world.lens_B, 1), LayerKind(window=4)
    for segment in (prefix.local(window, at_T), chain.local(LayerKind(chunk=4), at_T), lone.local(window, at_T[::5])):
        assert not can_express(segment)
        q_THD = world.queries(segment)
        assert FlashBackend(name).partial_splits(q_THD, world.views[0], segment, PLAIN) > 0
        with pytest.raises(AssertionError, match="our kernel reads such segments"):
            ADAPTERS[name](q_THD, world.views[0], segment, PLAIN, {})
    if name not in WINDOWED:
        local = chain.local(window, at_T)
        assert FlashBackend(name).partial_splits(world.queries(local), world.views[0], local, PLAIN) > 0


@pytest.mark.parametrize("shape", ["chain", "decode", "prompts"])
@pytest.mark.parametrize("name", WINDOWED)
def test_windows_keep_the_conventions(name: str, shape: str) -> None:
    world = World(name, LENS)
    segment = of_shape(world, shape, WINDOWS["window 5"])
    check_conventions(name, world.queries(segment), world.views[0], segment)


@pytest.mark.skipif(bool(REAL), reason="of stand-ins")
def test_a_library_whose_window_leaves_out_a_querys_own_key_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a release that counts windows otherwise, used until the text is wrong."""

    def other(*args: Any, window_size: tuple[int, int], **kwargs: Any) -> tuple[Tensor, ...]:
        return fake_flash.fa3_with_kvcache(*args, window_size=(window_size[0] - 1, 0), **kwargs)

    fake_flash.install(monkeypatch, fa3=other)
    world = World("fa3", LENS)
    segment = of_shape(world, "chain", WINDOWS["window 5"])
    with pytest.raises(RuntimeError, match="fa3: the installed library .* attention='triton'"):
        check_conventions("fa3", world.queries(segment), world.views[0], segment)


# ---- shared prefixes ----


def shared_plans(world: World, n: int, shared: int) -> tuple[AttentionPlan, AttentionPlan, SharedPrefix]:
    """Two plans that read the same keys, the second of them with a shared segment.  The first two rows are members."""
    world.pages.table[1, : shared // P] = world.pages.table[0, : shared // P]
    prefix = SharedPrefix.empty(world.pages.table, 64)
    if shared:
        prefix.set([0, 1], world.pages.table[0, : shared // P].tolist(), shared)
    own = causal_segment(world.pages, world.lens_B, n, "queries")
    at_T = last_positions(own)
    return AttentionPlan((own,), at_T), AttentionPlan(split_shared(own, prefix), at_T), prefix


class Recording(FlashBackend):
    """Notes which segments the library answers."""

    def paged_partial(self, q_THD: Tensor, view: Any, segment: Segment, *args: Any) -> AttentionState | None:
        answer = super().paged_partial(q_THD, view, segment, *args)
        self.answered = [*getattr(self, "answered", []), (segment, answer is not None)]
        return answer


@pytest.mark.slow_cases(keep=3)
@pytest.mark.parametrize("shared", [0, P])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_shared_pages_are_one_call(name: str, n: int, shared: int) -> None:
    """Keeps out: shared pages that a stranger reads, that our kernel reads although the library is named, or nobody reads."""
    world = World(name, [P + 30, P + 3, 9, n])
    plain, split, _ = shared_plans(world, n, shared)
    q_THD, backend = world.queries(plain.segments[0]), Recording(name, programs=None if REAL else 16)
    got = backend.attend(q_THD, world.views[0], backend.prepare(split))
    assert [(segment.rows, by_library) for segment, by_library in backend.answered] == [(1, True), (4, False)]
    close(got, ReferenceBackend().run(q_THD.double(), in_float64(world.views[0]), plain.segments[0]))


def test_a_rule_is_told_of_windows_and_shared_prefixes() -> None:
    """Keeps out: a window that counts for all keys of its rows, a shared prefix that counts for a tree's own."""
    seen: list[AttentionShape] = []
    world = World("fa3", [P + 30, P + 3, 9, 3])
    _, split, _ = shared_plans(world, 3, P)
    backend = FlashBackend("fa3", lambda name, gpu, shape: bool(seen.append(shape)))
    local = of_shape(world, "chain", WINDOWS["window 129"])
    for segment in (*split.segments, local):
        backend.partial_splits(world.queries(segment), world.views[0], segment, PLAIN)
    assert seen == [
        AttentionShape(1, K, 24, world.pages.capacity, shared=True),
        AttentionShape(4, K, 10, 5, window=True),
    ]


# ---- what layers share ----


@pytest.mark.gpu
@OF_PACKAGES
@pytest.mark.parametrize("shape", ["decode", "chain", "prompts", "shared"])
@pytest.mark.parametrize("kind", [FULL, LayerKind(window=129)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_captured_pass_follows_the_lengths(name: str, kind: LayerKind, shape: str) -> None:
    """Keeps out: a mask or a count that a graph froze, or that one layer leaves used up for the next."""
    world = World(name, [P + 30, P + 3, 600, 520], layers=3)
    prefix = None
    if shape == "shared":
        plain, _, prefix = shared_plans(world, 3, P)
    else:
        n = {"decode": 1, "chain": 6, "prompts": 250}[shape]
        plain = AttentionPlan((causal_segment(world.pages, world.lens_B, n, "queries"),))
    q_THD, backend = world.queries(plain.segments[0]), FlashBackend(name)

    def run() -> list[AttentionState]:
        at_T = last_positions(plain.segments[0])
        segments = split_shared(plain.segments[0], prefix)
        prepared = backend.prepare(AttentionPlan(segments, at_T).local(kind))
        return [backend.attend(q_THD, view, prepared) for view in world.views]

    run()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        captured = run()
    full = world.lens_B.clone()
    for lens in (full, full - 1, full - 20, full):
        world.lens_B.copy_(lens)
        if prefix is not None and lens[0] < full[0] - 10:
            prefix.set([], [], 0)  # nothing is shared any more: every row reads its own pages
        for state in captured:
            state.out_THD.fill_(torch.nan)
        graph.replay()
        want_plan = AttentionPlan(plain.segments, last_positions(plain.segments[0])).local(kind)
        for got, view in zip(captured, world.views, strict=True):
            want = ReferenceBackend().run(q_THD.double(), in_float64(view), want_plan.segments[0])
            close(got, want)


@pytest.mark.gpu
@OF_PACKAGES
@pytest.mark.parametrize("page_size", [16, P])
@pytest.mark.parametrize("n", [1, 6, 250])
@pytest.mark.parametrize("name", WINDOWED)
def test_what_lies_before_all_windows_spoils_nothing(name: str, n: int, page_size: int) -> None:
    """Keeps out: a tile that begins before the window, where a ring of pages may hold what nobody wrote: 0 * NaN is NaN."""
    if TABLE[name].pages.fault(page_size):
        pytest.skip("the capability table refuses such pages")
    pages = Scattered([900, 777], page_size, seed=3, device=DEVICE)
    kv = pages.fill(2, K, dim_of(name), dtype=DTYPE)
    segment = causal_segment(PageTable(pages.table_BW, page_size), pages.lens_B, n, "queries")
    segment = segment.local(LayerKind(window=100), last_positions(segment))
    assert segment.starts_T is not None
    for row, length in enumerate(pages.lens):
        kv[pages.slots(row, 0, length - n - 99)] = torch.nan
    q_THD = torch.randn(2 * n, H, dim_of(name), generator=torch.Generator().manual_seed(n)).to(DEVICE, DTYPE)
    got = ADAPTERS[name](q_THD, MHAView(kv), segment, PLAIN, {})
    close(got, ReferenceBackend().run(q_THD.double(), MHAView(kv.double()), segment))
