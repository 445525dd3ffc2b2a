"""Encoder attention, in both directions and windowed too, against one dense softmax in float64.

Which keys a window holds is asked of transformers' own mask functions.

Shapes: T tokens, Q query heads, K kv heads, D head dim.
"""

import pytest
import torch
from toolkit.kernels import DEVICE
from toolkit.oracles.attention import dense_attention
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, sliding_window_bidirectional_mask_function

from specdec.attention.eager.torch_backend import TorchBackend
from specdec.attention.encoder.texts import attend_texts, encoder_segment
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.attention.kinds import PLAIN, Scoring

BACKENDS = {"torch": (TorchBackend, torch.float64), "triton": (lambda: TritonBackend(40), torch.float32)}
TEXTS = {"ragged": [37, 1, 150, 6], "equal": [40, 40, 40], "one": [70]}
K, D = 2, 16


def seen_by(tokens: int, reach: int | None) -> Tensor:
    """[T, T] bool, by transformers' functions of indices."""
    function = bidirectional_mask_function if reach is None else sliding_window_bidirectional_mask_function(reach)
    at = torch.arange(tokens)
    return torch.as_tensor(function(0, 0, at[:, None], at)).expand(tokens, tokens)


def ragged_texts(lens: list[int]) -> tuple[Tensor, int, Tensor]:
    cu_seqlens = torch.tensor([0, *lens]).cumsum(0, dtype=torch.int32)
    return cu_seqlens.to(DEVICE), max(lens), torch.cat([torch.arange(n) for n in lens]).to(DEVICE)


@pytest.mark.slow_cases(keep=4)
@pytest.mark.parametrize("reach", [None, 0, 1, 5, 64])
@pytest.mark.parametrize("texts", TEXTS)
@pytest.mark.parametrize("name", BACKENDS)
def test_both_directions(name: str, texts: str, reach: int | None) -> None:
    """Keeps out: a key after the query unread; a window off by one at either end, or around a text's end; a text that reads
    its neighbour's keys, of which one is NaN here; a later tile's window skipped with the splits of an earlier one.
    """
    (make, dtype), lens = BACKENDS[name], TEXTS[texts]
    generator = torch.Generator().manual_seed(len(lens))
    q, k, v = (torch.randn(sum(lens), heads, D, generator=generator, dtype=dtype) for heads in (3 * K, K, K))
    scoring = Scoring(0.3, 2.0, torch.randn(3 * K, generator=generator)) if texts == "ragged" else PLAIN
    if len(lens) > 1:
        k[-1] = v[-1] = torch.nan  # the last text's
    segment = encoder_segment(*ragged_texts(lens), reach, ragged=texts == "ragged")
    sinks = None if scoring.sinks_H is None else scoring.sinks_H.to(DEVICE)
    heads = [x.to(DEVICE) for x in (q, k, v)]
    got = attend_texts(make(), *heads, segment, Scoring(scoring.scale, scoring.softcap, sinks)).double().cpu()
    start, bound = 0, 1e-9 if dtype == torch.float64 else 3e-5
    for text, tokens in enumerate(lens):
        own = slice(start, start + tokens)
        start += tokens
        if len(lens) > 1 and text == len(lens) - 1:
            continue
        want = dense_attention(q[own], k[own], v[own], seen_by(tokens, reach), scoring)[0]
        torch.testing.assert_close(got[own], want, atol=bound, rtol=bound)


@pytest.mark.gpu
@pytest.mark.parametrize("reach", [None, 64])
def test_bfloat16(reach: int | None) -> None:
    """Keeps out: a tile, a layout or a precision that is wrong only in compiled code."""
    lens, heads, D = [700, 1, 1500, 6], 16, 64
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(lens), heads, D, generator=generator).to(DEVICE, torch.bfloat16) for _ in range(3))
    got = attend_texts(TritonBackend(), q, k, v, encoder_segment(*ragged_texts(lens), reach, ragged=True)).double()
    start = 0
    for tokens in lens:
        own = slice(start, start + tokens)
        start += tokens
        at = torch.arange(tokens, device=DEVICE)
        seen = None if reach is None else (at - at[:, None]).abs() <= reach
        want = dense_attention(q[own], k[own], v[own], seen)[0]
        assert float((got[own] - want).norm()) <= 1e-2 * float(want.norm())
