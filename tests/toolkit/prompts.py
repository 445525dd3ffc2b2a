"""A prompt that many others begin with, what it means that two runs agree, and prompts ragged for a model, or read by one."""

import torch
from torch import Tensor

from specdec import Generation
from specdec.attention.attend import PagedAttention
from specdec.attention.backend import Backend
from specdec.attention.eager.dense import DenseAttention
from specdec.attention.eager.torch_backend import TorchBackend
from specdec.attention.pages import PageTable
from specdec.batch.ragged import ChunkShape, RaggedPrompts, flat_chunk
from specdec.models.causal_lm import CausalLM
from specdec.models.kv import make_cache
from specdec.steps import PromptPart

LONGEST = 60  # tokens of a prompt whose logits are asked for
SYSTEM = [(7 * i * i + 3 * i) % 40 for i in range(37)]


def prompts_after(system: list[int]) -> list[list[int]]:
    return [system + tail for tail in ([1, 2, 3], [1, 2, 9, 4, 4, 4, 4, 7], [5], [1, 2, 3, 4, 5, 6], [8] * 11)]


def assert_same(got: list[Generation], want: list[Generation]) -> None:
    """The same ids, and drafts that were accepted as far in every round."""
    assert [out.token_ids for out in got] == [out.token_ids for out in want]
    assert [out.stats.accepted_per_round for out in got] == [out.stats.accepted_per_round for out in want]


def ragged_prompts(
    prompts: list[list[int]], table_BW: Tensor, page_size: int, start: int = 0, size: int = 10**9
) -> RaggedPrompts:
    """`size` tokens of each prompt from `start` on; prompt b lives on the pages of row b."""
    parts = [
        PromptPart(row, prompt[start : start + size], start, prompt[start + size] if start + size < len(prompt) else -1)
        for row, prompt in enumerate(prompts)
    ]
    shape = ChunkShape.of(parts)
    return RaggedPrompts.from_flat(flat_chunk(parts, shape, 0).to(table_BW.device), shape, PageTable(table_BW, page_size))


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
    for buffer in cache.buffers.values():
        buffer.fill_(torch.nan)
    width = -(-LONGEST // page_size)
    table = torch.randperm(len(prompts) * width, generator=torch.Generator().manual_seed(0)).view(-1, width).int() + 1
    parts: list[list[Tensor]] = [[] for _ in prompts]
    for start in range(0, max(map(len, prompts)), chunk):
        live = [index for index, prompt in enumerate(prompts) if len(prompt) > start]
        ragged = ragged_prompts([prompts[i] for i in live], table[live], page_size, start, chunk)
        attn, rows_R = PagedAttention(backend or TorchBackend(), cache, *ragged.tables), ragged.last_B if last else None
        logits = model.logits(model(ragged.ids_T, ragged.positions_T, attn, rows_R=rows_R).hidden_TH)
        counts = [1 if last else len(prompts[i][start : start + chunk]) for i in live]
        for index, part in zip(live, logits.split(counts), strict=True):
            parts[index].append(part)
    return torch.cat([part for row in parts for part in row])


def dense_logits(model: CausalLM, ids: list[int], batch: int = 1) -> Tensor:
    """Logits of equally long rows, one after the other, without a cache."""
    positions_T = torch.arange(len(ids) // batch).repeat(batch)
    return model.logits(
        model(
            torch.tensor(ids), positions_T, DenseAttention(model.config.layer_kinds, batch, kv_layers=model.config.kv_source)
        ).hidden_TH
    )
