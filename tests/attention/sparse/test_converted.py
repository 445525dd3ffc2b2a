"""Prompts of sparse attention over 8-bit latents, which read converted latents in a workspace: the same text, from other slots.

Keeps out: slots of the cache that are looked for in the workspace, or the other way round; a layer that reads another layer's
latents there; a choice handed on to a layer that asks for few rows.
"""

from pathlib import Path

import pytest
import torch
from toolkit.attention.sparse import IndexWorld, same_rows
from toolkit.deepseek import SparseZoo, save_sparse, use_limits
from toolkit.driver import Driver
from toolkit.kernels import DEVICE
from toolkit.models import ragged_prompts

from specdec import SamplingParams, SpecConfig
from specdec.attention.latent import upconvert
from specdec.attention.latent.limits import Limits
from specdec.attention.pages import PageTable
from specdec.attention.sparse.candidates import CandidateKeys
from specdec.attention.sparse.indexer import select_rows, to_slots
from specdec.attention.sparse.launch import launch_sparse_segment
from specdec.attention.sparse.segment import pure_segment


class Wide(SparseZoo):
    """Latents wide enough to be kept in 8 bits."""

    def target(self, name: str) -> Path:
        folder = self.root / name
        return folder if folder.is_dir() else save_sparse(folder, name, kv_lora_rank=128)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Wide:
    return Wide(tmp_path_factory.mktemp("wide"))


@pytest.mark.parametrize("kind", ["causal", "ragged"])
def test_selected_slots_are_those_of_the_copy(kind: str) -> None:
    """By kernels, and by the definition."""
    world = IndexWorld.make(kind, [70, 5, 16, 33], 4, 5, seed=3, device=DEVICE)
    copy = PageTable(torch.randperm(4 * 9, device=DEVICE).view(4, 9).int(), 8)
    candidates = CandidateKeys.of(world.plan, world.q_THD.shape[0], copy)
    positions_TI = select_rows(world.scores(torch.float32), candidates.visible_T, 10)
    want = to_slots(positions_TI, copy, candidates.rows_T, candidates.paged_T)
    with torch.no_grad():
        for select in (launch_sparse_segment, pure_segment):
            same_rows(select(world.q_THD, world.w_TH, world.keys_XD, candidates, 10), *want)


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", ["glm-shared", "v32"])
@pytest.mark.parametrize("absorbed", [1 << 26, 2000])
def test_converted_prompts_write_the_same_text(zoo: Wide, name: str, absorbed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole prompts, chunks after cached tokens, several at once; all queries of a pass together, and a few at a time."""
    definition, converted = upconvert.upconvert, []
    monkeypatch.setattr(upconvert, "upconvert", lambda *args: (converted.append(args), definition(*args)))
    texts = []
    for convert_from in (2, 1000):
        settings = dict(page_size=4, max_batch_size=3, kv_cache_dtype="fp8_ds_mla", dtype="float64")
        decoder = zoo.decoder(name, "eagle3", SpecConfig(3, 2, 6), **settings)
        use_limits(decoder.model, Limits(convert_from=convert_from, absorbed=absorbed))
        Driver(decoder).set_chunk(17)
        outputs = decoder.generate(ragged_prompts(40, 6, seed=7), SamplingParams(max_tokens=8))
        texts.append([out.token_ids for out in outputs])
        assert bool(converted) == (convert_from == 2)
        converted.clear()
    assert texts[0] == texts[1]
