"""A prompt that many others begin with, what it means that two runs agree, and prompts packed for a model."""

from torch import Tensor

from specdec import Generation
from specdec.attention.pages import PageTable
from specdec.batch.packed import ChunkShape, PackedPrompts, flat_chunk
from specdec.steps import PromptPart

SYSTEM = [(7 * i * i + 3 * i) % 40 for i in range(37)]


def prompts_after(system: list[int]) -> list[list[int]]:
    return [system + tail for tail in ([1, 2, 3], [1, 2, 9, 4, 4, 4, 4, 7], [5], [1, 2, 3, 4, 5, 6], [8] * 11)]


def assert_same(got: list[Generation], want: list[Generation]) -> None:
    """The same ids, and drafts that were accepted as far in every round."""
    assert [out.token_ids for out in got] == [out.token_ids for out in want]
    assert [out.stats.accepted_per_round for out in got] == [out.stats.accepted_per_round for out in want]


def packed_prompts(
    prompts: list[list[int]], table_BW: Tensor, page_size: int, start: int = 0, size: int = 10**9
) -> PackedPrompts:
    """`size` tokens of each prompt from `start` on; prompt b lives on the pages of row b."""
    parts = [
        PromptPart(row, prompt[start : start + size], start, prompt[start + size] if start + size < len(prompt) else -1)
        for row, prompt in enumerate(prompts)
    ]
    shape = ChunkShape.of(parts)
    return PackedPrompts.unpack(flat_chunk(parts, shape, 0).to(table_BW.device), shape, PageTable(table_BW, page_size))
