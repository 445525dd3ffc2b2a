"""A layer of sparse latent attention in every pass it meets, against its definition: scores of all visible keys in float64, the
best of them, and dense attention of every head over these.

Keeps out: a tree whose nodes choose among another node's keys, a chunk that forgets what was cached, rows that are asked for
and answered by others, unread latents (NaN) that reach an output.

Shapes: S tokens of a sequence, H heads, C rank, R rotated, N not rotated, V values, J heads and I dims of the
indexer.
"""

from typing import NamedTuple

import pytest
import torch
from toolkit.attention.segments import ragged_causal_segment
from toolkit.kernels import DEVICE, use_kernels_everywhere
from toolkit.oracles.attention import dense_attention
from torch import Tensor

from specdec.attention.attend import PagedAttention, PassTables
from specdec.attention.backend import Backend
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.caches.mla_cache import LatentLayout
from specdec.attention.caches.sparse_cache import SparseLatentLayout, SparseLatentView
from specdec.attention.eager.dense import DenseAttention
from specdec.attention.eager.torch_backend import TorchBackend
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.attention.kinds import FULL, Scoring
from specdec.attention.latent.limits import LIMITS, Limits
from specdec.attention.latent.mla import LatentInputs
from specdec.attention.latent.prep import LatentPrep
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment, fill_tree_suffix, prefix_segment
from specdec.attention.segment import AttentionPlan, Segment
from specdec.attention.sparse.index_store import IndexPrep
from specdec.attention.sparse.inputs import IndexInputs, SparseLatentInputs
from specdec.ops.products.numerics import FAST
from specdec.ops.rope import Rotation, rotary_table

NAN = float("nan")
C, R, N, V, H, J, I, TOPK = 16, 8, 12, 10, 4, 6, 16, 5
SCALE = Scoring(scale=0.3)
pytestmark = pytest.mark.usefixtures("poisoned_new_memory")


def rand(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE, dtype)


class Tokens(NamedTuple):
    """What the layer's projections made of some tokens, and where these stand.  Raw, so each use takes a copy."""

    q_THQ: Tensor
    latent_TL: Tensor
    q_TJI: Tensor
    key_TI: Tensor
    weights_TJ: Tensor
    positions_T: Tensor

    @classmethod
    def random(cls, positions: list[int], seed: int, dtype: torch.dtype) -> "Tokens":
        T, shapes = len(positions), ((H, N + R), (C + R,), (J, I), (I,), (J,))
        parts = [rand(T, *shape, seed=100 * seed + place, dtype=dtype) for place, shape in enumerate(shapes)]
        return cls(*parts, torch.tensor(positions, device=DEVICE))

    def __getitem__(self, rows: slice | Tensor) -> "Tokens":  # type: ignore[override]
        return Tokens(*(x[rows] for x in tuple(self)))

    @staticmethod
    def joined(parts: list["Tokens"]) -> "Tokens":
        return Tokens(*(torch.cat(x) for x in zip(*map(tuple, parts))))

    def inputs(self, topk: int = TOPK, has_index: bool = True, limits: Limits = LIMITS) -> SparseLatentInputs:
        dtype = self.q_THQ.dtype
        table = rotary_table(100.0 ** -(torch.arange(R // 2) / (R // 2)), 256).to(DEVICE, dtype)
        rotation, up_HXC = Rotation(table, self.positions_T), rand(H, N + V, C, seed=9, dtype=dtype) / C**0.5
        prep = LatentPrep(rotation, 1 + 0.1 * rand(C, seed=1, dtype=dtype), 1e-6)
        index_prep = IndexPrep(rotation, 1 + 0.1 * rand(I, seed=2, dtype=dtype), rand(I, seed=3, dtype=dtype), 1e-6, J**-0.5)
        index = IndexInputs(self.q_TJI.clone(), self.key_TI.clone(), self.weights_TJ.clone(), index_prep)
        latents = LatentInputs(self.q_THQ.clone(), self.latent_TL.clone(), up_HXC, prep, FAST, limits)
        return SparseLatentInputs(latents, topk, index if has_index else None)


def defined(path: Tokens, topk: int = TOPK) -> tuple[Tensor, Tensor]:
    """(the last token's attention over the tokens before it and itself, which of them it reads), by the definition."""
    path = Tokens(*(x.double() if x.is_floating_point() else x for x in tuple(path)))
    inputs = path.inputs(topk)
    heads, index = inputs.latents.dense(), inputs.index
    assert index is not None
    key_SI, weights_SJ = index.prep.apply_(index.q_TJI, index.key_TI, index.weights_TJ)
    scores_S = ((index.q_TJI[-1] @ key_SI.T * I**-0.5).relu() * weights_SJ[-1, :, None]).sum(0)
    order_S = scores_S.sort(descending=True, stable=True)
    S = len(scores_S)
    if topk < S:
        assert order_S.values[topk - 1] - order_S.values[topk] > 1e-5, "a near-tie: choose another seed"
    read_1S = torch.zeros(1, S, dtype=torch.bool, device=DEVICE)
    read_1S[0, order_S.indices[:topk]] = True
    return dense_attention(heads.q_TQD[-1:], heads.k_TKD, heads.v_TKE, read_1S, SCALE)[0][0], read_1S[0]


class World:
    """Prompts on scattered pages, and a cache of one layer that is NaN wherever nothing was stored."""

    def __init__(self, lens: list[int], P: int, backend: Backend, dtype: torch.dtype, extra: int = 0, layers: int = 1) -> None:
        self.backend, self.lens, self.P = backend, lens, P
        width = max(-(-(n + extra) // P) for n in lens)
        order = torch.randperm(len(lens) * width, generator=torch.Generator().manual_seed(P))
        self.pages = PageTable(order.view(-1, width).int().to(DEVICE), P)
        self.cache = KVCache(
            SparseLatentLayout(LatentLayout(C, R, dtype), I, dtype), (FULL,) * layers, len(lens) * width * P, device=DEVICE
        )
        for buffer in self.cache.buffers.values():
            buffer.fill_(NAN)
        self.prompts = [Tokens.random(list(range(n)), row + 1, dtype) for row, n in enumerate(lens)]
        self.close = dict(atol=1e-6, rtol=1e-6) if dtype == torch.float64 else dict(atol=5e-5, rtol=5e-5)

    def slots(self, row: int, positions: Tensor) -> Tensor:
        return PageTable(self.pages.table[row : row + 1], self.P).slots_at(positions[None])[0]

    def prompt_pass(self, parts: list[tuple[int, int]]) -> tuple[PagedAttention, Tokens, Tensor]:
        """A pass over (start, end) of each prompt, its tokens, and which of these are their prompts' last ones."""
        tokens = [prompt[slice(*part)] for prompt, part in zip(self.prompts, parts)]
        counts, ends = [end - start for start, end in parts], [end for _, end in parts]
        segment = ragged_causal_segment(self.pages, counts, ends)
        last = ragged_causal_segment(self.pages, [1] * len(parts), ends)
        slots = torch.cat([self.slots(row, part.positions_T) for row, part in enumerate(tokens)])
        tables = PassTables(AttentionPlan((segment,)), slots, AttentionPlan((last,)))
        rows_R = torch.tensor(counts, device=DEVICE).cumsum(0) - 1
        return PagedAttention(self.backend, self.cache, tables), Tokens.joined(tokens), rows_R

    def fill(self) -> None:
        """Stores all prompts in one pass."""
        attn, tokens, _ = self.prompt_pass([(0, n) for n in self.lens])
        attn(0, tokens.inputs(), None, SCALE)

    def wanted(self, parts: list[tuple[int, int]]) -> Tensor:
        return torch.stack(
            [defined(prompt[:end])[0] for prompt, part in zip(self.prompts, parts) for end in range(part[0] + 1, part[1] + 1)]
        )


BACKENDS = [TorchBackend(), TritonBackend(programs=4)]
NAMES = ["torch", "triton"]
PIECES = [
    [[(0, 22), (0, 9)]],  # whole prompts
    [[(0, 4), (0, 4)], [(4, 5), (4, 5)], [(5, 20), (5, 9)], [(20, 22), (9, 10)]],  # no more than topk keys, then more
    [[(0, 9), (0, 1)], [(9, 22), (1, 9)]],
]


@pytest.mark.parametrize("pieces", PIECES, ids=["whole", "chunks", "ragged"])
@pytest.mark.parametrize("P", [1, 5, 16])
def test_prompts(pieces: list[list[tuple[int, int]]], P: int) -> None:
    """All tokens of a chunk, or the prompts' last ones, few queries at a time; chunks of few keys are dense and expanded."""
    limits = Limits(expand_above=2, absorbed=7 * H * (C + R))
    world = World([row[-1][1] for row in zip(*pieces)], P, TorchBackend(), torch.float64)
    for parts in pieces:
        attn, tokens, rows_R = world.prompt_pass(parts)
        want = world.wanted(parts)
        torch.testing.assert_close(attn(0, tokens.inputs(limits=limits), None, SCALE), want, **world.close)
        torch.testing.assert_close(attn(0, tokens.inputs(limits=limits), rows_R, SCALE), want[rows_R], **world.close)


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize("backend", BACKENDS, ids=NAMES)
@pytest.mark.parametrize("P", [1, 16])
@torch.inference_mode()
def test_chains_read_what_each_token_chose(backend: Backend, P: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tokens a sequence, each with more keys than topk, as many, or fewer; then latents that no token chose are NaN."""
    if backend is not BACKENDS[0]:
        use_kernels_everywhere(monkeypatch)
    lens = [20, TOPK, 3]
    world = World(lens, P, backend, torch.float32)
    world.fill()
    segment = causal_segment(world.pages, torch.tensor(lens, dtype=torch.int32, device=DEVICE), 3)
    tokens = Tokens.joined([prompt[-3:] for prompt in world.prompts])
    slots_T = torch.cat([world.slots(row, prompt.positions_T[-3:]) for row, prompt in enumerate(world.prompts)])
    want, read = [], set()
    for row, prompt in enumerate(world.prompts):
        for end in range(lens[row] - 2, lens[row] + 1):
            out, read_S = defined(prompt[:end])
            want.append(out)
            read |= set(world.slots(row, read_S.nonzero()[:, 0]).tolist())
    view = world.cache.view(0)
    assert isinstance(view, SparseLatentView)
    unread = [slot for slot in range(len(view.latents.latent)) if slot not in read]
    for poisoned in (False, True):
        if poisoned:
            view.latents.latent[unread] = NAN
        attn = PagedAttention(backend, world.cache, PassTables(AttentionPlan((segment,)), slots_T))
        out_THV = attn(0, tokens.inputs(), None, SCALE)
        torch.testing.assert_close(out_THV.double(), torch.stack(want), **world.close)


PARENTS = [0, 0, 0, 1, 1, 3, 2]


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize("backend", BACKENDS, ids=NAMES)
@pytest.mark.parametrize("P", [5, 1, 16])
@torch.inference_mode()
def test_tree_nodes_choose_as_plain_decoding_along_their_paths(
    backend: Backend, P: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keeps out: a choice among the prefix alone, or among all nodes; a path's slots where they would be without a tree."""
    if backend is not BACKENDS[0]:
        use_kernels_everywhere(monkeypatch)
    lens, nodes = [19, 3, 0], len(PARENTS)
    world = World([n + nodes for n in lens], P, backend, torch.float32)
    depths = [0] * nodes
    for node in range(1, nodes):
        depths[node] = depths[PARENTS[node]] + 1
    trees = [Tokens.random([n + d for d in depths], 50 + row, torch.float32) for row, n in enumerate(lens)]
    world.prompts = [prompt[:n] for prompt, n in zip(world.prompts, lens)]
    world.lens = lens
    world.fill()
    mask_NN = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        mask_NN[node] |= mask_NN[PARENTS[node]]
    mask_NN = mask_NN.to(DEVICE)
    slots_BN = torch.stack([world.slots(row, torch.arange(n, n + nodes, device=DEVICE)) for row, n in enumerate(lens)])
    suffix = Segment.empty(len(lens) * nodes, max(depths) + 1, 1, device=DEVICE)
    fill_tree_suffix(suffix, slots_BN, mask_NN.expand(len(lens), nodes, nodes))
    prefix = prefix_segment(world.pages, torch.tensor(lens, dtype=torch.int32, device=DEVICE), nodes)
    tokens = Tokens.joined(trees)
    attn = PagedAttention(
        backend, world.cache, PassTables(AttentionPlan((prefix,), tokens.positions_T, suffix), slots_BN.flatten())
    )
    got = attn(0, tokens.inputs(), None, SCALE).double().unflatten(0, (len(lens), nodes))
    for row, (prompt, tree) in enumerate(zip(world.prompts, trees)):
        for node in range(nodes):
            path = Tokens.joined([prompt, tree[mask_NN[node].nonzero()[:, 0]]])
            torch.testing.assert_close(got[row, node], defined(path)[0], **world.close)


def test_a_layer_reads_what_an_earlier_layer_chose() -> None:
    """With and without a cache, for all tokens and for some.  Keeps out: the choice of a pass before, or of other rows."""
    lens = [21, 8]
    world = World(lens, 5, TorchBackend(), torch.float64, layers=2)
    parts = [(0, n) for n in lens]
    other = [Tokens.random(list(range(n)), 30 + row, torch.float64) for row, n in enumerate(lens)]
    want = []
    for chooses, reads in zip(world.prompts, other):
        for end in range(1, len(chooses.positions_T) + 1):
            heads, read_S = reads[:end].inputs().latents.dense(), defined(chooses[:end])[1]
            want.append(dense_attention(heads.q_TQD[-1:], heads.k_TKD, heads.v_TKE, read_S[None], SCALE)[0][0])
    for rows in (False, True):
        attn, tokens, rows_R = world.prompt_pass(parts)
        attn(0, tokens.inputs(), None, SCALE)
        out = attn(1, Tokens.joined(other).inputs(has_index=False), rows_R if rows else None, SCALE)
        torch.testing.assert_close(out, torch.stack(want)[rows_R] if rows else torch.stack(want), **world.close)
    dense = DenseAttention((FULL, FULL), batch=1)
    dense(0, world.prompts[0].inputs(), None, SCALE)
    alone = dense(1, other[0].inputs(has_index=False), None, SCALE)
    torch.testing.assert_close(alone, torch.stack(want)[: lens[0]], **world.close)


def test_dense_rows_choose_by_themselves() -> None:
    """Keeps out: a batch in training whose rows read each other's keys."""
    rows = [Tokens.random(list(range(11)), seed, torch.float64) for seed in (1, 2)]
    out = DenseAttention((FULL,), batch=2)(0, Tokens.joined(rows).inputs(), None, SCALE)
    want = torch.stack([defined(row[:end])[0] for row in rows for end in range(1, 12)])
    torch.testing.assert_close(out, want, atol=1e-6, rtol=1e-6)
