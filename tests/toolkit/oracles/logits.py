"""Logits of prompts as a target computes them, through a cache or without one."""

import torch
from torch import Tensor

from specdec.attention.attend import PagedAttention
from specdec.attention.backend import Backend
from specdec.attention.eager.dense import DenseAttention
from specdec.attention.eager.torch_backend import TorchBackend
from specdec.models.causal_lm import CausalLM
from specdec.models.kv import make_cache
from toolkit.prompts import packed_prompts

LONGEST = 60  # tokens of a prompt


def paged_logits(
    model: CausalLM,
    prompts: list[list[int]],
    chunk: int = 256,
    page_size: int = 5,
    backend: Backend | None = None,
    last: bool = False,
) -> Tensor:
    """Logits of all tokens, one prompt after the other, through a cache that is NaN where nothing was stored.

    last: of each chunk's last tokens alone, which the last layer is then asked for.
    """
    cache = make_cache(model, model.config, 400, "auto", model.norm.weight.dtype, torch.device("cpu"))
    for plane in cache.planes.values():
        plane.fill_(torch.nan)
    width = -(-LONGEST // page_size)
    table = torch.randperm(len(prompts) * width, generator=torch.Generator().manual_seed(0)).view(-1, width).int() + 1
    parts: list[list[Tensor]] = [[] for _ in prompts]
    for start in range(0, max(map(len, prompts)), chunk):
        live = [index for index, prompt in enumerate(prompts) if len(prompt) > start]
        packed = packed_prompts([prompts[i] for i in live], table[live], page_size, start, chunk)
        attn, rows_R = PagedAttention(backend or TorchBackend(), cache, *packed.tables), packed.last_B if last else None
        logits = model.logits(model(packed.ids_T, packed.positions_T, attn, rows_R=rows_R).hidden_TH)
        counts = [1 if last else len(prompts[i][start : start + chunk]) for i in live]
        for index, part in zip(live, logits.split(counts), strict=True):
            parts[index].append(part)
    return torch.cat([part for row in parts for part in row])


def dense_logits(model: CausalLM, ids: list[int], batch: int = 1) -> Tensor:
    """Logits of equally long rows, one after the other, without a cache."""
    positions_T = torch.arange(len(ids) // batch).repeat(batch)
    return model.logits(model(torch.tensor(ids), positions_T, DenseAttention(model.config.layer_kinds, batch)).hidden_TH)
