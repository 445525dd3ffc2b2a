"""The kernel of one query a row, which norms, rotates, stores and attends, against the two steps of `torch` attention.

On a GPU, else under Triton's interpreter.

Shapes: B rows, H heads, K kv heads, X = H + 2K, D head dim, P page size, S splits.
"""

from typing import NamedTuple

import pytest
import torch
from toolkit.attention.answers import attended
from toolkit.attention.caches import Scattered
from toolkit.inside.captures import capturing
from toolkit.kernels import DEVICE, HAS_GPU
from torch import Tensor

from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.eager.torch_backend import TorchBackend
from specdec.attention.inputs import HeadInputs, LayerCall, PreparedPlan
from specdec.attention.invariant.backend import InvariantBackend
from specdec.attention.kernels.single_query_triton import launch_single_query
from specdec.attention.kernels.tiles_triton import PagedTiles
from specdec.attention.kernels.triton_backend import TritonBackend, launch_suffix_merge
from specdec.attention.kinds import PLAIN, LayerKind, Scoring
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment
from specdec.attention.segment import AttentionPlan
from specdec.attention.state import AttentionState
from specdec.ops.rope import HeadPrep, Rotation, rotary_table

NAN, P = float("nan"), 4
SMALL = PagedTiles(16, 16, 4, 2, min_split_keys=16)


class World(NamedTuple):
    """view: NaN wherever no earlier pass has stored a key that is read."""

    qkv_BXD: Tensor
    view: MHAView
    slots_B: Tensor
    prep: HeadPrep
    plan: AttentionPlan

    def answers(self, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """(attention, the cache) by `torch`, step by step in float64."""
        view = MHAView(self.view.kv.double())
        rotation, norm = self.prep.rotation, self.prep.norm_HD
        assert rotation is not None
        wide = Rotation(rotation.table_P2D.double(), rotation.positions_T)
        prep = HeadPrep(wide, self.prep.num_kv_heads, None if norm is None else norm.double(), self.prep.eps)
        q_BHD = TorchBackend().store(view, self.qkv_BXD.double(), self.slots_B, prep)
        return attended(TorchBackend(), q_BHD, view, self.plan, scoring), view.kv


def world(
    lens: list[int], heads: tuple[int, int, int], normed: bool, kind: LayerKind, dtype: torch.dtype = torch.float32
) -> World:
    """lens: keys of each row, the query's own included; of a padded row 0."""
    (H, K, D), B = heads, len(lens)
    cached = Scattered([max(n - 1, 0) for n in lens], P, extra=1, spare=1, seed=sum(lens), device=DEVICE)
    lens_B = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    kv = cached.fill(2, K, D, dtype=dtype)
    slots_B = cached.fresh_slots()[:, 0]
    kv[slots_B] = NAN
    positions_B = (lens_B.long() - 1).clamp(min=0)
    table = rotary_table(1.0 / 100 ** (torch.arange(0, D, 2) / D), 4096).to(DEVICE, dtype)
    norm_HD = 1 + cached.randn(H + K, D, dtype=dtype) / 5 if normed else None
    prep = HeadPrep(Rotation(table, positions_B), K, norm_HD, 1e-5)
    plan = AttentionPlan((causal_segment(PageTable(cached.table_BW, P), lens_B, 1, "queries"),), positions_B)
    return World(cached.randn(B, H + 2 * K, D, dtype=dtype), MHAView(kv), slots_B, prep, plan.local(kind))


@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize(
    ("lens", "heads", "normed", "kind", "scoring"),
    [
        ([1, 2, 17], (6, 2, 24), True, LayerKind(), PLAIN),
        ([0, 70], (4, 4, 16), False, LayerKind(), PLAIN),
        ([90, 1], (5, 1, 40), True, LayerKind(), Scoring(softcap=5.0)),
        ([64, 81, 0, 3], (6, 2, 32), False, LayerKind(window=20), PLAIN),
    ],
    ids=str,
)
def test_equals_its_two_steps(
    lens: list[int], heads: tuple[int, int, int], normed: bool, kind: LayerKind, scoring: Scoring, splits: int
) -> None:
    """Keeps out: the token's own key read twice, not at all, or before it is stored; a row of no keys, or of its own alone,
    beside a long one; splits that leave a key out; keys before a window; a norm row of another head; NaN of unread slots.
    """
    (H, _, D), made, B = heads, world(lens, heads, normed, kind), len(lens)
    want_BHD, kv = made.answers(scoring)
    out = torch.full((B, H, splits, D), NAN, device=DEVICE), torch.full((B, H, splits), NAN, device=DEVICE)
    partial, state = AttentionState(*out), AttentionState.empty((B, H, D), torch.float32, DEVICE)
    segment = made.plan.segments[0]
    launch_single_query(made.qkv_BXD, made.view, made.slots_B, made.prep, segment, scoring, *partial, SMALL)
    empty_BHS = partial.lse_TH == -torch.inf
    assert bool((empty_BHS[..., 1:] >= empty_BHS[..., :-1]).all()), "empty states come last"
    launch_suffix_merge(made.qkv_BXD[:, :H], made.view, None, scoring, partial, None, state, True)
    torch.testing.assert_close(state.out_THD.double(), want_BHD, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(made.view.kv.double(), kv, atol=2e-5, rtol=2e-5, equal_nan=True)


def test_one_order_of_sums_takes_two_launches() -> None:
    """Keeps out: splits that depend on the batch in deterministic mode, and its plans read as other backends' are."""
    made, backend = world([75], (2, 1, 128), False, LayerKind()), InvariantBackend()
    call = LayerCall(backend, made.view, LayerKind(), made.slots_B, PreparedPlan(made.plan), None, PLAIN, {})
    assert call.store_and_attend(made.view, made.qkv_BXD, made.prep) is None


def test_a_layer_takes_it_where_it_was_measured() -> None:
    """Keeps out: sinks that are added twice or never, and the kernel where a head is too narrow or the GPU another one."""
    for D, measured in ((128, True), (64, True), (128, False)):
        made, backend = world([75], (2, 1, D), True, LayerKind()), TritonBackend(64, hopper=measured)
        scoring = Scoring(sinks_H=torch.tensor([0.5, -1.0], device=DEVICE))
        want_BHD, _ = made.answers(scoring)
        call = LayerCall(backend, made.view, LayerKind(), made.slots_B, PreparedPlan(made.plan), None, scoring, {})
        state = call.store_and_attend(made.view, made.qkv_BXD, made.prep)
        assert (state is not None) == (D == 128 and measured), (D, measured)
        out_BHD = HeadInputs(made.qkv_BXD, made.prep).paged(call) if state is None else state.out_THD
        torch.testing.assert_close(out_BHD.double(), want_BHD, atol=2e-5, rtol=2e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
@pytest.mark.parametrize("lens", [[1], [2], [65], [1025], [2047], [0, 700], [1500, 1]], ids=str)
@pytest.mark.parametrize("heads", [(32, 4, 128), (40, 8, 128), (16, 1, 128), (64, 8, 64)], ids=str)
def test_published_sizes_and_replays(lens: list[int], heads: tuple[int, int, int]) -> None:
    """Keeps out: bits that change from replay to replay, and keys of a layer that are read before it stores them."""
    (H, _, D), splits = heads, 16
    made = world(lens, heads, True, LayerKind(), torch.bfloat16)
    want_BHD, _ = made.answers(PLAIN)
    partial = AttentionState.empty((len(lens), H, splits, D), torch.float32, DEVICE)
    state = AttentionState.empty((len(lens), H, D), torch.bfloat16, DEVICE)
    tiles = PagedTiles(16, 64, 4, 2, min_split_keys=64)

    def run() -> None:
        launch_single_query(made.qkv_BXD, made.view, made.slots_B, made.prep, made.plan.segments[0], PLAIN, *partial, tiles)
        launch_suffix_merge(made.qkv_BXD[:, :H], made.view, None, PLAIN, partial, None, state, True)

    with torch.inference_mode():
        run()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            run()
        first = None
        for _ in range(20):
            partial.out_THD.fill_(NAN)
            made.view.kv[made.slots_B] = NAN
            graph.replay()
            first = state.out_THD.clone() if first is None else first
            assert torch.equal(state.out_THD, first)
    assert (first.double() - want_BHD).norm() < 1e-2 * want_BHD.norm() and bool(first.isfinite().all())
