"""Masks of one bit a token.  The kernel runs under Triton's interpreter where there is no GPU.

Shapes: B sequences, N rows of logits of each, R = B * N, W a run of the vocabulary, V the vocabulary.
"""

import pytest
import torch
from toolkit.kernels import DEVICE

from specdec.batch.grammars.masks import BitMasks, masked_logits
from specdec.batch.grammars.masks_triton import launch_masked_logits


def case(B: int, N: int, V: int) -> tuple[torch.Tensor, BitMasks]:
    """Which tokens are allowed [R, V], and the masks that say so; every third sequence has none."""
    masked = [b for b in range(B) if b % 3 != 1]
    allowed_BNV = torch.ones(B, N, V, dtype=torch.bool)
    place_B = torch.full((B,), -1, dtype=torch.int32)
    words = torch.full((B, N, -(-V // 32)), 0x5A5A5A5A, dtype=torch.int32)  # what earlier passes left
    for number, b in enumerate(reversed(masked)):
        allowed_BNV[b], place_B[b], words[number] = torch.rand(N, V) < 0.5, number, 0
        for n, v in allowed_BNV[b].nonzero().tolist():
            words[number, n, v // 32] |= 1 << v % 32 if v % 32 < 31 else -(2**31)
    return allowed_BNV.view(B * N, V), BitMasks(words, place_B)


@pytest.mark.parametrize(("B", "N", "V", "first", "W"), [(1, 1, 32, 0, 32), (4, 3, 95, 0, 95), (3, 2, 2500, 37, 2100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_banned_tokens_are_minus_infinity(B: int, N: int, V: int, first: int, W: int, dtype: torch.dtype) -> None:
    """Keeps out: the sign bit of a word; another node's mask; a rank that reads the mask from its first id; a sequence without
    a grammar that reads what an earlier pass left."""
    allowed_RV, masks = case(B, N, V)
    logits_RW = torch.randn(B * N, W + 5)[:, :W].to(dtype)
    want = logits_RW.float().masked_fill(~allowed_RV[:, first : first + W], -torch.inf)
    assert torch.equal(masked_logits(logits_RW, masks, first), want)
    on_device = BitMasks(*(tensor.to(DEVICE) for tensor in masks))
    assert torch.equal(launch_masked_logits(logits_RW.to(DEVICE), on_device, first).cpu(), want)


@pytest.mark.gpu
def test_bfloat16_at_the_size_of_a_model() -> None:
    """Keeps out: blocks and rows of another size than the interpreter's."""
    masks = BitMasks(
        torch.randint(-(2**31), 2**31, (8, 16, 4008), dtype=torch.int32, device=DEVICE),
        torch.tensor([3, -1, 0, 1, -1, 2, 7, 5], dtype=torch.int32, device=DEVICE),
    )
    logits_RW = torch.randn(128, 128256, device=DEVICE).bfloat16()
    want = masked_logits(logits_RW.cpu(), BitMasks(*(tensor.cpu() for tensor in masks)))
    with torch.inference_mode():
        assert torch.equal(masked_logits(logits_RW, masks).cpu(), want)
