"""Prompts padded to a bucket, as graphs replay them, equal prompts as they are.

Keeps out: a padded row or token that reaches a real one, a bucket that remembers the prompts before.  The capture itself needs
a GPU (test_gpu.py); here the padded path runs eagerly, on the backend that is the definition.
"""

import pytest
import torch
from toolkit.driver import Driver
from toolkit.models import Zoo, ragged_prompts

from specdec import SamplingParams, SpecConfig
from specdec.attention.eager.reference import ReferenceBackend
from specdec.batch.packed import PackedPrompts
from specdec.runner.prefill import _bucket


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_padded_prompts_equal_bare_ones(zoo: Zoo, kind: str) -> None:
    """Packs of one, two and four prompts go through buckets that earlier, longer packs have dirtied."""
    decoder = zoo.decoder("llama", kind, SpecConfig(3, 4, 12), page_size=4, max_batch_size=4, max_seq_len=96)
    driver = Driver(decoder)
    driver.replace_backend(ReferenceBackend())
    prompts = [[5] * 13, *ragged_prompts(40, 6, seed=4), [7]]
    params = [SamplingParams(max_tokens=length) for length in (9, 5, 14, 3, 8, 11, 6, 4)]
    want = decoder.generate(prompts, params)
    seen = driver.pad_prefills()
    driver.poison_free_slots(torch.nan)
    for _ in range(2):
        got = decoder.generate(prompts, params)
        assert [out.token_ids for out in got] == [out.token_ids for out in want]
        assert [out.stats for out in got] == [out.stats for out in want]
    assert len(set(seen)) > 1 and len(seen) > len(set(seen))


def test_a_bucket_always_has_a_token_to_spare() -> None:
    """Keeps out: rows of padding whose last token is a prompt's."""
    table_BW = torch.arange(1, 25, dtype=torch.int32).view(3, 8)
    for lens in ([16], [15], [5, 11, 16], [1, 1]):
        packed = PackedPrompts.pack([[1] * n for n in lens], table_BW[: len(lens)], 4)
        tokens, rows = _bucket(packed)
        assert tokens > sum(lens) and rows >= len(lens)
        padded = PackedPrompts.padding(tokens, torch.zeros(rows, 8, dtype=torch.int32), 4)
        padded.fill(packed)
        assert padded.slots_T[sum(lens) :].eq(0).all() and padded.last_B[len(lens) :].eq(tokens - 1).all()
        cu = padded.plan.segments[0].cu_seqlens_q
        assert cu.tolist() == [sum(lens[:i]) for i in range(len(lens) + 1)] + [sum(lens)] * (rows - len(lens))
