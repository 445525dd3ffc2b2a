"""What only a GPU shows of keys and values of different width: half precision, real head dims, captured graphs.

Shapes: B sequences, L prefix length, N queries of a sequence, K key heads, D key dim, E value dim.
"""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from toolkit.attention.caches import Scattered
from toolkit.attention.segments import ragged_causal_segment
from toolkit.inside.captures import capturing
from toolkit.trees import mask_of
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("triton")

from specdec.attention.caches.split_cache import PairedView, SplitLayout, SplitView
from specdec.attention.differential.subtract import Difference, subtract_halves
from specdec.attention.eager.torch_backend import TorchBackend
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.attention.kinds import LayerKind
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment, fill_tree_suffix, prefix_segment
from specdec.attention.segment import AttentionPlan, Segment

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # norm(out - ref) / norm(ref)


class Heads(NamedTuple):
    """H query heads.  paired: of an ordinary cache, whose values go in pairs, E = 2D."""

    H: int
    K: int
    D: int
    E: int
    paired: bool = False


DEEPSEEK, DIFF_128, DIFF_64 = Heads(16, 16, 192, 128), Heads(32, 8, 128, 256, True), Heads(32, 16, 64, 128, True)


class World:
    """Sequences of L tokens and N more each.  One row a token holds keys, then values; unread slots hold NaN."""

    def __init__(self, kind: str, B: int, L: int, N: int, heads: Heads, dtype: torch.dtype, P: int = 16) -> None:
        H, K, D, E, paired = heads
        pages = Scattered([L] * B, P, extra=N, seed=B + L, device=DEVICE)
        row = pages.fill(2 * K * D if paired else K * (D + E), dtype=dtype)
        self.view: SplitView | PairedView
        if paired:
            self.view = PairedView(row.unflatten(1, (2, K, D)))
        else:
            self.view = SplitLayout(K, D, E, dtype).view(0, {"kv": row})
        self.lens_B, table = pages.lens_B, PageTable(pages.table_BW, P)
        self.q_THD = pages.randn(B * (L + N if kind == "prompts" else N), H, D, dtype=dtype)
        if kind == "prompts":
            self.plan = AttentionPlan((ragged_causal_segment(table, [L + N] * B, [L + N] * B),))
        elif kind == "chain":
            self.plan = AttentionPlan((causal_segment(table, self.lens_B, N),))
        else:
            mask = mask_of([0, *((n - 1) // 2 for n in range(1, N))]).to(DEVICE)
            suffix = replace(Segment.empty(B * N, int(mask.sum(1).max()), 1, device=DEVICE), base_B=self.lens_B)
            fill_tree_suffix(suffix, pages.fresh_slots(), mask.expand(B, N, N))
            positions_T = (L + mask.sum(1) - 1).repeat(B)
            self.plan = AttentionPlan((prefix_segment(table, self.lens_B, N),), positions_T, suffix)

    def attend(self, plan: AttentionPlan) -> Tensor:
        backend = TritonBackend()
        return out_of(backend.attend(self.q_THD, self.view, backend.prepare(plan)))

    def error(self, out_THE: Tensor, plan: AttentionPlan) -> float:
        oracle = TorchBackend()  # the view hands its numbers out in the queries' dtype
        want = out_of(oracle.attend(self.q_THD.double(), self.view, oracle.prepare(plan)))
        return float((out_THE.double() - want).norm() / want.norm())


def out_of(attended: object) -> Tensor:
    return attended if isinstance(attended, Tensor) else attended.out_THD  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(
    "heads", [DEEPSEEK, DIFF_128, DIFF_64, Heads(6, 2, 24, 16), Heads(4, 2, 40, 32), Heads(3, 1, 20, 12)], ids=str
)
@pytest.mark.parametrize(
    "case", [("tree", 1, 1000, 32), ("tree", 3, 700, 6, 1), ("chain", 2, 5000, 1, 64), ("prompts", 2, 300, 5)], ids=str
)
def test_against_float64(case: tuple, heads: Heads, dtype: torch.dtype) -> None:
    """Keeps out: a tile, a layout, a precision or a fault of the compiler that only compiled code shows."""
    kind, B, L, N, *page_size = case
    w = World(kind, B, L, N, heads, dtype, *page_size)
    assert w.error(w.attend(w.plan), w.plan) < BOUNDS[dtype]


@pytest.mark.parametrize("heads", [DEEPSEEK, DIFF_64], ids=str)
def test_captured_windows_follow_the_lengths(heads: Heads) -> None:
    """Keeps out: strides, first keys or scratch memory frozen at capture."""
    w, layer = World("tree", 3, 3000, 6, heads, torch.bfloat16), LayerKind(window=300)
    w.attend(w.plan.local(layer))
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        out_THE = w.attend(w.plan.local(layer))
    for lens in ((3000, 299, 6), (1200, 2999, 400)):
        w.lens_B.copy_(torch.tensor(lens))
        out_THE.fill_(torch.nan)
        graph.replay()
        assert w.error(out_THE, w.plan.local(layer)) < BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("E", [64, 128, 256])
def test_the_difference_in_half_precision(E: int) -> None:
    """Keeps out: a difference of two near equal numbers that was rounded to 16 bits before its norm."""
    out_THE = torch.randn(33, 32, E, device=DEVICE, dtype=torch.bfloat16)
    difference = Difference(torch.tensor(0.3712345, device=DEVICE), 0.8, 1e-5)
    with torch.inference_mode():
        got = subtract_halves(out_THE, 8, difference)
    want = subtract_halves(out_THE.double(), 8, Difference(difference.factor.double(), 0.8, 1e-5))
    assert float((got.double() - want).norm() / want.norm()) < 4e-3
