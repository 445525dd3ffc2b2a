"""Whole engines on 8-bit latents (fp8_ds_mla): the text is the target's own over such a cache, whatever the tree.

The oracle and its bounds are those of test_quantised_kv.py; what it rounds are latents, before heads are made of them.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit.deepseek import DeepseekZoo, SparseZoo, save_sparse, use_limits
from toolkit.driver import Driver
from toolkit.models import ragged_prompts
from toolkit.oracles.stored import hold_stored_text, is_clearly_the_oracle_s_text

from specdec import SamplingParams, SpecConfig
from specdec.attention.caches.fp8_latent import Fp8LatentLayout
from specdec.attention.latent import upconvert
from specdec.attention.latent.limits import Limits
from specdec.config import GraphMode
from specdec.engine.pages.groups import ALL
from specdec.loading.memory import kv_page_bytes

TARGET = "v3-wide-latents"
CASES = [("eagle3", (4, 4, 16), 16), ("eagle3", (4, 1, 5), 1), ("eagle1", (3, 8, 24), 5)]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> DeepseekZoo:
    return DeepseekZoo(tmp_path_factory.mktemp("latents"))


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows by the arguments of each conversion of latents."""
    definition, calls = upconvert.upconvert, list[object]()
    monkeypatch.setattr(upconvert, "upconvert", lambda *args: (calls.append(args), definition(*args)))
    return calls


@pytest.mark.slow_cases
@pytest.mark.parametrize(("head", "shape", "page_size"), CASES, ids=lambda v: str(v).replace(" ", ""))
@pytest.mark.parametrize(("expand_above", "upconvert_from"), [(6, 3), (1000, 3), (1000, 1000)])
def test_text_is_the_target_s_over_rounded_latents(
    zoo: DeepseekZoo,
    head: str,
    shape: tuple[int, int, int],
    page_size: int,
    expand_above: int,
    upconvert_from: int,
    converted: list[object],
) -> None:
    """Prompts expanded, converted first, and read as they are.  Keeps out: a prompt that reads its own latents unrounded, a
    commit that leaves scales behind, a workspace of another layer's latents.
    """
    settings = dict(page_size=page_size, max_batch_size=3, kv_cache_dtype="fp8_ds_mla")
    decoder = zoo.decoder(TARGET, head, SpecConfig(*shape), **settings)
    use_limits(decoder.model, Limits(expand_above, 12, upconvert_from, 64))
    assert isinstance(Driver(decoder).cache("target").layout, Fp8LatentLayout)
    Driver(decoder).set_chunk(10)
    prompts = ragged_prompts(40, 6, seed=7)
    sampling = [SamplingParams(max_tokens=n) for n in (20, 7, 24, 1, 13, 18)]
    hold_stored_text(decoder, prompts, sampling)
    assert bool(converted) == (upconvert_from < 1000)
    Driver(decoder).assert_nothing_leaked()


class Wide(SparseZoo):
    """Targets with indexers, and latents wide enough to be kept in 8 bits."""

    def target(self, name: str) -> Path:
        folder = self.root / name
        return folder if folder.is_dir() else save_sparse(folder, name, kv_lora_rank=128)


@pytest.mark.slow_cases
@pytest.mark.parametrize(("name", "absorbed"), [("glm-shared", 2000), ("v32", 1 << 26)])
def test_prompts_that_select_keys_read_converted_latents(
    tmp_path: Path, name: str, absorbed: int, converted: list[object]
) -> None:
    """Several prompts in chunks, all queries of a pass together or a few at a time.  Keeps out: slots of the cache looked for
    in the workspace, or the other way round; another layer's latents there; a choice handed on to a layer that asks for few
    rows.
    """
    hold_converted_text(tmp_path, name, absorbed, converted, dtype="float64")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["glm-shared", "v32"])
def test_prompts_that_select_keys_on_a_gpu(tmp_path: Path, name: str, converted: list[object]) -> None:
    """In float32.  Keeps out: conversions in chunks that are captured, whose keys nobody has counted."""
    hold_converted_text(tmp_path, name, 2000, converted, device="cuda", dtype="float32")


def hold_converted_text(root: Path, name: str, absorbed: int, converted: list[object], **more: Any) -> None:
    """Asserts that texts are the same with and without conversions."""
    texts = []
    for convert_from in (2, 1000):
        settings = dict(page_size=4, max_batch_size=3, kv_cache_dtype="fp8_ds_mla", **more)
        decoder = Wide(root).decoder(name, "eagle3", SpecConfig(3, 2, 6), **settings)
        use_limits(decoder.model, Limits(convert_from=convert_from, absorbed=absorbed))
        Driver(decoder).set_chunk(17)
        outputs = decoder.generate(ragged_prompts(40, 6, seed=7), SamplingParams(max_tokens=8))
        texts.append([out.token_ids for out in outputs])
        assert bool(converted) == (convert_from == 2)
        converted.clear()
    assert texts[0] == texts[1]


def test_experts_choose_alike_in_float64(zoo: DeepseekZoo) -> None:
    """In float32 a latent may lie so close to the middle between two float8 values that the number of rows beside it decides
    which one is kept, and a router makes another text of that.  In float64 that does not happen.  Keeps out: a node that reads
    its path's latents unrounded, where plain decoding reads what was kept; a router that is less exact than the model.
    """
    settings = dict(page_size=4, max_batch_size=3, kv_cache_dtype="fp8_ds_mla", dtype="float64")
    decoder = zoo.decoder("v3-wide-experts", "eagle3", SpecConfig(3, 2, 6), **settings)
    prompts, sampling = ragged_prompts(40, 3, seed=5), SamplingParams(max_tokens=16)
    outputs = decoder.generate(prompts, sampling)
    plain = decoder.generate(prompts, sampling, speculate=False)
    assert [out.token_ids for out in outputs] == [out.token_ids for out in plain]
    assert sum(out.stats.accepted for out in outputs) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["round", "step", False])
@pytest.mark.parametrize(("shape", "page_size"), [((4, 4, 16), 16), ((3, 1, 4), 5)])
def test_captured_rounds_write_the_same(
    zoo: DeepseekZoo, shape: tuple[int, int, int], page_size: int, graphs: GraphMode
) -> None:
    """In float32 on a GPU.  Keeps out: a workspace in a captured pass, scales of the pass that was captured."""
    settings = dict(page_size=page_size, max_batch_size=3, device="cuda", cuda_graphs=graphs, kv_cache_dtype="fp8_ds_mla")
    decoder = zoo.decoder(TARGET, "eagle3", SpecConfig(*shape), **settings)
    outputs = decoder.generate(ragged_prompts(40, 6, seed=7), SamplingParams(max_tokens=24))
    assert sum([is_clearly_the_oracle_s_text(decoder, out) for out in outputs]) >= 2


def test_the_pool_is_counted_in_the_bytes_it_takes(zoo: DeepseekZoo, tmp_path: Path) -> None:
    """Keeps out: a pool sized for 16 bits, and a draft head with ordinary heads that is given latents to keep."""
    decoder = zoo.decoder(TARGET, "eagle3", page_size=4, max_batch_size=2, kv_cache_dtype="fp8_ds_mla")
    caches = Driver(decoder).caches
    taken = sum(buffer.nbytes for cache in caches for buffer in cache.buffers.values())
    assert decoder.head is not None
    configs = [decoder.model.config, decoder.head.config.model]
    assert taken == Driver(decoder).pages_allocated * kv_page_bytes(configs, decoder.settings, (ALL,))[0]
    assert caches[0].layout.layer_bytes(0) == 128 + 4 + 2 * 6 and caches[0].buffers["latent"].dtype == torch.uint8


def test_moves_copy_bytes() -> None:
    """Keeps out: bytes converted to numbers on the way, where a NaN may become another NaN; half a row left behind."""
    from specdec.attention.caches.kv_cache import KVCache
    from specdec.attention.kinds import FULL

    cache = KVCache(Fp8LatentLayout(128, 16), [FULL] * 2, 20)
    rows = cache.buffers["latent"]
    rows.copy_(torch.randint(0, 256, rows.shape, generator=torch.Generator().manual_seed(0)))
    before, slots = rows.clone(), torch.tensor([[5, 2, 7, 0], [9, 13, 11, 19]])
    cache.move(slots, torch.tensor([[0, 2, 3], [0, 1, 3]]))
    assert rows[:, [5, 2, 7]].equal(before[:, [5, 7, 0]]) and rows[:, [9, 13, 11]].equal(before[:, [9, 13, 19]])
    untouched = [slot for slot in range(20) if slot not in (2, 7, 11)]
    assert rows[:, untouched].equal(before[:, untouched])
