"""Decode context parallelism: whole decoders whose ranks divide every sequence, and settings that are refused."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from toolkit.deepseek import DeepseekZoo, SparseZoo
from toolkit.models import Zoo, ragged_prompts
from toolkit.parallel.decoders import with_ranks

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.attention.latent import mla
from specdec.engine.pages.groups import ALL
from specdec.loading.memory import kv_page_bytes, pool_plan, scratch_bytes
from specdec.loading.resolve import resolve_settings
from specdec.models.registry import choose_target
from specdec.options import EngineOptions

TREE, CHAIN = SpecConfig(num_steps=3, topk=3, num_draft_tokens=8), SpecConfig(num_steps=3, topk=1, num_draft_tokens=4)
SAMPLINGS = [SamplingParams(max_tokens=20), SamplingParams(max_tokens=24, temperature=0.9, seed=3)]


class Texts(NamedTuple):
    """What a decoder wrote for some prompts: ids, accepted draft tokens and rounds of each.  found: prompt tokens kept before."""

    ids: list[list[int]]
    accepted: list[tuple[int, int]]
    found: int


def texts(decoder: SpecDecoder) -> Texts:
    """Prompts twice, of which the second time each is longer, and begins as one that has run."""
    prompts = ragged_prompts(40, 2, seed=5)
    again = [prompt + [7, 3, 9] * 4 for prompt in prompts]
    outs = [out for each in (prompts, again) for out in decoder.generate(each, SAMPLINGS)]
    found = sum(out.stats.cached_tokens for out in outs)
    return Texts([out.token_ids for out in outs], [(out.stats.accepted, out.stats.rounds) for out in outs], found)


@pytest.fixture(scope="module")
def zoos(tmp_path_factory: pytest.TempPathFactory) -> dict[type[Zoo], Zoo]:
    return {zoo: zoo(tmp_path_factory.mktemp("zoo")) for zoo in (Zoo, DeepseekZoo)}
