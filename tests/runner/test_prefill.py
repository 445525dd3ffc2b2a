"""Prompts padded to a bucket, as graphs replay them, equal prompts as they are.

Keeps out: a padded row or token that reaches a real one, a bucket that remembers the prompts before.  The capture itself needs
a GPU (test_gpu.py); here the padded path runs eagerly, on the backend that is the definition.
"""

import pytest
import toolkit.recurrent.mamba_targets
import toolkit.recurrent.more_targets
import toolkit.recurrent.targets  # noqa: F401 (and its targets)
import torch
from toolkit.driver import Driver
from toolkit.models import Zoo, ragged_prompts
from toolkit.oracles.reference import ReferenceBackend

from specdec import SamplingParams, SpecConfig
from specdec.attention.pages import PageTable
from specdec.batch.ragged import ChunkShape, RaggedPrompts, flat_chunk
from specdec.runner.prompts import bucket_of
from specdec.steps import PromptPart

# The last ones have layers of each recurrent rule.
PAIRS = [
    ("llama", "eagle3"),
    ("llama", "eagle1"),
    ("qwen3_5_text", "eagle3"),
    ("falcon_h1", "eagle3"),
    ("kimi_linear", "eagle1"),
    ("lfm2", "eagle3"),
]


@pytest.mark.slow_cases
@pytest.mark.parametrize(("target", "kind"), PAIRS)
def test_padded_prompts_equal_bare_ones(zoo: Zoo, target: str, kind: str) -> None:
    """Packs of one, two and four prompts go through buckets that earlier, longer packs have dirtied."""
    decoder = zoo.decoder(target, kind, SpecConfig(3, 4, 12), page_size=4, max_batch_size=4, max_seq_len=96)
    driver = Driver(decoder)
    driver.replace_backend(ReferenceBackend())
    prompts = [[5] * 13, *ragged_prompts(40, 6, seed=4), [7]]
    params = [SamplingParams(max_tokens=length) for length in (5, 3, 8, 2, 4, 6, 3, 2)]
    want = decoder.generate(prompts, params)
    seen = driver.pad_prefills()
    driver.poison_free_slots(torch.nan)
    for _ in range(2):
        got = decoder.generate(prompts, params)
        assert [out.token_ids for out in got] == [out.token_ids for out in want]
        assert [out.stats for out in got] == [out.stats for out in want]
    assert len(set(seen)) > 1 and len(seen) > len(set(seen))


def test_padding_touches_nothing_of_a_prompt() -> None:
    """Keeps out: a padded token that is stored on a prompt's page, or a padded part that reads or writes a prompt's row."""
    P, W, spare = 4, 8, 3
    table_BW = torch.arange(1, 25, dtype=torch.int32).view(3, 8)
    table_BW = torch.cat((table_BW, torch.zeros(1, W, dtype=torch.int32)))
    for lens in ([16], [15], [5, 11, 16], [1, 1], [3, 30]):
        parts = [PromptPart(row, [1 + row] * n, 0, -1) for row, n in enumerate(lens)]
        exact, used = ChunkShape.of(parts), sum(lens)
        bucket = bucket_of(exact)
        assert bucket.tokens >= used and bucket.parts >= len(lens) and bucket.most >= max(lens)
        pages = PageTable(table_BW, P), PageTable(table_BW.flip(1) * (table_BW > 0), P)  # of two groups of layers
        bare, padded = (RaggedPrompts.from_flat(flat_chunk(parts, shape, spare), shape, *pages) for shape in (exact, bucket))
        for name in ("ids_T", "positions_T", "part_T", "next_T", "rows_B", "last_B", "lens_B", "final_B"):
            want, got = getattr(bare, name), getattr(padded, name)
            assert torch.equal(got[: len(want)], want), name
        assert padded.part_T[used:].eq(-1).all()
        for own, want, got in zip(pages, bare.tables, padded.tables, strict=True):
            positions = [torch.arange(count) for count in lens]
            slots = torch.cat([own.table[row, at // P].long() * P + at % P for row, at in enumerate(positions)])
            assert torch.equal(want.slots_T, slots) and torch.equal(got.slots_T[:used], slots) and not got.slots_T[used:].any()
            assert want.rows_plan is not None and torch.equal(want.rows_plan.segments[0].pages.table, own.table[bare.rows_B])
        assert padded.rows_B[len(lens) :].eq(spare).all() and padded.final_B[len(lens) :].eq(0).all()
        cu = padded.tables[1].plan.segments[0].cu_seqlens_q
        assert cu.tolist() == [sum(lens[:i]) for i in range(len(lens) + 1)] + [used] * (bucket.parts - len(lens))
        first_B = torch.arange(100, 100 + bucket.parts)
        assert padded.next_ids(first_B)[:used].tolist() == [
            n for row, count in enumerate(lens) for n in [1 + row] * (count - 1) + [100 + row]
        ]


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 128, 129, 500, 512, 513, 1024, 1025, 5000])
def test_buckets_waste_little(tokens: int) -> None:
    """Keeps out: a prompt of 1,024 tokens that computes 2,048, and a graph for each length of a prompt."""
    sizes = {bucket_of(ChunkShape(n, 1, n, True, 0)).tokens for n in range(1, tokens + 1)}
    padded = bucket_of(ChunkShape(tokens, 1, tokens, True, 0)).tokens
    assert tokens <= padded < tokens + max(16, tokens // 4) and len(sizes) <= 4 * tokens.bit_length()
    if tokens & (tokens - 1) == 0 and tokens >= 16:
        assert padded == tokens
