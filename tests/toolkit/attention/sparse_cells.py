"""What the matrix needs for cells of sparse latent attention: a layer's inputs made of random numbers, and what it chooses by
the definition.

Every token is one random vector: its latent, its indexer's key, its indexer's queries, and the weights of their heads.  The
projection to keys and values is the identity and nothing is rotated, so that queries and latents mean what they hold.

Shapes: T tokens, N of one sequence, X its keys, H heads, C latent rank, R rotated dims, L = C + R.
"""

import torch
from torch import Tensor

from specdec.attention.caches.sparse_cache import SparseLatentView
from specdec.attention.latent.limits import LIMITS
from specdec.attention.latent.mla import LatentInputs
from specdec.attention.latent.prep import LatentPrep
from specdec.attention.sparse.index_store import IndexPrep
from specdec.attention.sparse.inputs import IndexInputs, SparseLatentInputs
from specdec.ops.products.numerics import FAST
from specdec.ops.rope import Rotation

TOPK, HEADS, DIM = 5, 3, 16  # of the indexer
WIDTH = DIM + HEADS * DIM + HEADS  # numbers of a token beside its latent


def split(token_TX: Tensor, latent: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """latents [T, L], keys [T, DIM], queries [T, HEADS, DIM] and weights [T, HEADS].  latent: L."""
    latent_TL, key_TI, q_TX, weights_TJ = token_TX.split((latent, DIM, HEADS * DIM, HEADS), dim=1)
    return latent_TL, key_TI, q_TX.unflatten(1, (HEADS, DIM)), weights_TJ


def layer_inputs(q_THL: Tensor, token_TX: Tensor, rank: int) -> SparseLatentInputs:
    """What a layer hands over for these tokens."""
    (T, H, L), options = q_THL.shape, dict(dtype=q_THL.dtype, device=q_THL.device)
    positions_T = torch.zeros(T, dtype=torch.int64, device=q_THL.device)

    def still(width: int) -> Rotation:
        return Rotation(torch.stack((torch.ones(1, width, **options), torch.zeros(1, width, **options)), dim=1), positions_T)

    latent_TL, key_TI, q_TJI, weights_TJ = split(token_TX, L)
    same_HXC = torch.eye(rank, **options).repeat(2, 1).expand(H, -1, -1)
    latents = LatentInputs(
        q_THL.clone(),
        latent_TL.clone(),
        same_HXC,
        LatentPrep(still(L - rank), torch.ones(rank, **options), 1e-6),
        FAST,
        LIMITS,
    )
    norm, bias = torch.ones(DIM, **options), torch.zeros(DIM, **options)
    index = IndexInputs(q_TJI.clone(), key_TI, weights_TJ, IndexPrep(still(min(L - rank, DIM)), norm, bias, 1e-6, HEADS**-0.5))
    return SparseLatentInputs(latents, TOPK, index)


def selected(view: SparseLatentView, slots_X: Tensor, token_NX: Tensor, seen_NX: Tensor) -> Tensor:
    """[N, X] bool: which of the keys that it sees each token reads, by the definition in float64."""
    assert view.index_keys is not None
    _, _, q_NJI, weights_NJ = split(token_NX.double(), token_NX.shape[1] - WIDTH)
    products_NJX = torch.einsum("nji,xi->njx", q_NJI, view.index_keys[slots_X].double()) * DIM**-0.5
    scores_NX = torch.einsum("nj,njx->nx", weights_NJ, products_NJX.relu()).masked_fill(~seen_NX, -torch.inf)
    best_NK = scores_NX.sort(dim=1, descending=True, stable=True).indices[:, :TOPK]
    return torch.zeros_like(seen_NX).scatter_(1, best_NK, True) & seen_NX
