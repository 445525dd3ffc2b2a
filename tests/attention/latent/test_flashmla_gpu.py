"""FlashMLA as an independent reader of what specdec's kernels wrote: rows of 656 bytes, and rows of selected slots.

Rows that no index names hold only bits of NaN, slot 0 among them.

Shapes: T tokens or queries, H heads, C latent rank, R rotated dim, I slots of a row, X slots.
"""

import pytest
import torch
from toolkit.attention import flashmla
from torch import Tensor

from specdec.attention.caches.fp8_latent import Fp8LatentView, row_bytes
from specdec.attention.caches.mla_cache import MLAView
from specdec.attention.eager.torch_backend import TorchBackend
from specdec.attention.kinds import Scoring
from specdec.attention.latent.prep import LatentPrep
from specdec.attention.segment import Segment
from specdec.attention.state import AttentionState
from specdec.ops.rope import Rotation, rotary_table

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_new_memory")]
C, R, H, P, I = 512, 64, 128, 64, 256
X = 200 * P
SCORING = Scoring(scale=0.05)
COUNTS = [256, 0, 1, 64, 65, 200, 255, 129, 128, 3, 0, 2]  # of keys, query by query


@pytest.fixture()
def library() -> object:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("FlashMLA's kernels are for Hopper GPUs")
    found = flashmla.library()
    if found is None:
        pytest.skip("needs the package flash_mla, or vLLM's _flashmla_C, on the Python path")
    return found


def selected() -> Segment:
    """A row of slots for each query, each named once; slot 0 is none of them."""
    slots_TI = 1 + torch.randperm(X - 1, device="cuda")[: len(COUNTS) * I].view(-1, I)
    return Segment.of_slots(slots_TI.int(), torch.tensor(COUNTS, dtype=torch.int32, device="cuda"))


def with_gaps(segment: Segment) -> Tensor:
    """[T, I] int32: the same keys in random places of their rows, between them -1."""
    slots_TI, counts_T = segment.pages.table, segment.cache_seqlens
    slots_TI = torch.where(torch.arange(I, device="cuda") < counts_T[:, None], slots_TI, -1)
    return slots_TI.gather(1, torch.rand(slots_TI.shape, device="cuda").argsort(1)).contiguous()


def stored(slots_T: Tensor) -> Fp8LatentView:
    """Random latents that the store kernel normed, rotated and wrote into these slots."""
    from specdec.attention.latent.mla_store_triton import launch_store_latent

    T = len(slots_T)
    table = rotary_table(100.0 ** -(torch.arange(R // 2) / (R // 2)), 256).to("cuda", torch.bfloat16)
    rotation = Rotation(table, 7 * torch.arange(T, device="cuda") % 256)
    view = Fp8LatentView(torch.full((X, row_bytes(C, R)), 0xFF, dtype=torch.uint8, device="cuda"), C)
    fresh_TL = torch.randn(T, C + R, device="cuda", dtype=torch.bfloat16)
    fresh_TL[:, :C] *= 2.0 ** torch.tensor([0, -3, 1, -1], device="cuda").repeat_interleave(128)  # a scale for each group
    q_THR = torch.randn(T, 2, R, device="cuda", dtype=torch.bfloat16)
    prep = LatentPrep(rotation, torch.rand(C, device="cuda").bfloat16() + 0.5, 1e-6)
    launch_store_latent(view, q_THR, fresh_TL, slots_T, prep, torch.empty_like(q_THR))
    return view


def close(got: AttentionState, want: AttentionState, out: float, lse: float) -> None:
    assert (got.out_THD.double() - want.out_THD.double()).norm() <= out * want.out_THD.double().norm()
    torch.testing.assert_close(got.lse_TH.double(), want.lse_TH.double(), atol=lse, rtol=0.0)


@pytest.mark.parametrize("n", [1, 6])
def test_flashmla_reads_our_656_bytes(n: int, library: object) -> None:
    """Keeps out: bytes that only specdec's own kernels understand: another order of parts, values, scales or groups."""
    from specdec.attention.kernels.triton_backend import TritonBackend

    segment = selected()
    read = torch.arange(I, device="cuda") < segment.cache_seqlens[:, None]
    view = stored(segment.pages.table[read].long())
    assert view.rows.shape == (X, 656)
    q_THL = torch.randn(len(COUNTS), H, C + R, device="cuda", dtype=torch.bfloat16)
    out_BnHC, lse_BHn = library.flash_mla_with_kvcache(  # type: ignore[attr-defined]
        q_THL.unflatten(0, (-1, n)), view.rows.unflatten(0, (-1, P))[:, :, None], None, None, C,
        library.get_mla_metadata()[0], softmax_scale=SCORING.scale, is_fp8_kvcache=True,  # type: ignore[attr-defined]
        indices=with_gaps(segment).unflatten(0, (-1, n)),
    )  # fmt: skip
    lse_TH = lse_BHn.transpose(1, 2).flatten(0, 1)
    theirs = AttentionState(out_BnHC.flatten(0, 1), torch.where(lse_TH == torch.inf, -torch.inf, lse_TH))
    exact = TorchBackend().run(q_THL.double(), view, segment, SCORING)
    ours = TritonBackend().run(q_THL, view, segment, SCORING)
    close(theirs, exact, 1.5e-2, 5e-2)
    close(ours, exact, 1e-2, 5e-2)
    close(theirs, ours, 1.5e-2, 5e-2)


def test_flashmla_reads_our_rows_of_slots(library: object) -> None:
    """Keeps out: rows that mean other keys than those in the slots that they name."""
    from specdec.attention.kernels.triton_backend import TritonBackend

    segment = selected()
    read = torch.arange(I, device="cuda") < segment.cache_seqlens[:, None]
    latent = torch.full((X, C + R), torch.nan, dtype=torch.bfloat16, device="cuda")
    latent[segment.pages.table[read].long()] = torch.randn(int(read.sum()), C + R, device="cuda").bfloat16()
    q_THL, view = torch.randn(len(COUNTS), H, C + R, device="cuda", dtype=torch.bfloat16), MLAView(latent, C)
    exact = TorchBackend().run(q_THL.double(), view, segment, SCORING)
    close(TritonBackend().run(q_THL, view, segment, SCORING), exact, 5e-3, 1e-3)
    for slots_TI, lens_T in ((segment.pages.table, segment.cache_seqlens), (with_gaps(segment), None)):
        out_THC, _, lse_TH = library.flash_mla_sparse_fwd(  # type: ignore[attr-defined]
            q_THL, latent[:, None], slots_TI[:, None], SCORING.scale, topk_length=lens_T
        )
        close(AttentionState(out_THC, torch.where(lse_TH == torch.inf, -torch.inf, lse_TH)), exact, 5e-3, 1e-3)
