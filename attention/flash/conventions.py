"""Whether an installed flash-attn package keeps the conventions that our adapters rely on: asked once for each kind of call.

Shapes: T queries, H heads, K kv heads, D head dim, P page size.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.caches.quant_cache import QuantView
from specdec.attention.flash.adapters import ADAPTERS, FlashView
from specdec.attention.kinds import PLAIN
from specdec.attention.pages import PageTable
from specdec.attention.segment import Segment, uniform_cu_seqlens

WINDOW = 2  # of the check: shorter than its longest row


@torch.inference_mode()
def check_conventions(name: str, q_THD: Tensor, view: FlashView, like: Segment) -> None:
    """Asks a library for results that are known: that lse is a natural log, that a row without keys is empty, that a window
    counts a query's own key, and that the scales of an fp8 cache apply to the heads that they belong to.

    The check's call has the dtype and heads of q and view, and is of the kind of `like`, so the kernel that it compiles is
    needed later anyway.  Raises RuntimeError if the installed library answers otherwise.
    """
    (H, D), K, device = q_THD.shape[1:], view.kv.shape[2], q_THD.device
    n, P = min(like.max_seqlen_q, 129), min(like.pages.page_size, 256)  # 256: longer ones take the same kernels
    lens = [min(3, P), 0, min(2, P)]
    segment = Segment(
        PageTable(torch.zeros(3, 1, dtype=torch.int32, device=device), P), torch.tensor(lens, dtype=torch.int32, device=device),
        uniform_cu_seqlens(3, n, device), n, like.causal,
    )  # fmt: skip
    if like.window is not None:
        segment, lens = (
            replace(segment, window=WINDOW),
            [min(each, WINDOW) for each in lens],
        )  # first keys tell them nothing more
    kv = torch.ones(P, 2, K, D, dtype=torch.float32, device=device)
    keys_K, values_K = kv.new_ones(K), kv.new_ones(K)
    asked: FlashView = MHAView(kv.to(view.kv.dtype))
    if isinstance(view, QuantView):  # every head has keys and values of its own
        keys_K = 1 / torch.arange(1, K + 1, dtype=torch.float32, device=device)
        asked, values_K = QuantView(kv.to(view.kv.dtype), scale_2K=torch.stack((keys_K, 2 - keys_K))), 2 - keys_K
    q_3nHD = torch.tensor([1.0, 1.0, 2.0], dtype=torch.float32, device=device)[:, None, None, None].expand(-1, n, H, D)
    out_THD, lse_TH = ADAPTERS[name](q_3nHD.flatten(0, 1).to(q_THD.dtype), asked, segment, PLAIN, {})
    firsts, lasts = out_THD.unflatten(0, (3, n))[:, -1, :, 0].float(), lse_TH.unflatten(0, (3, n))[:, -1]  # these read all keys
    logits_H = keys_K.repeat_interleave(H // K) * math.sqrt(D)
    want = torch.stack((logits_H + math.log(lens[0]), 2 * logits_H + math.log(lens[2])))
    apart = float((lasts[[0, 2]] - want).abs().max() / want.max())
    values_apart = float((firsts[[0, 2]] - values_K.repeat_interleave(H // K)).abs().max())
    empty = (float(lse_TH[n : 2 * n].max()), float(out_THD[n : 2 * n].abs().max()))
    if not (apart <= 1e-2 and values_apart <= 2e-2 and empty == (-math.inf, 0.0)):
        raise RuntimeError(
            f"{name}: the installed library answers lse {float(lasts[0, 0]):.4f} where the natural log is "
            f"{float(want[0, 0]):.4f} (all heads: {apart:.1%} apart, their values {values_apart:.1%}), and lse, output {empty} "
            f"where no key is read; expected (-inf, 0.0).  Nearest setting that works: attention='triton'"
        )
