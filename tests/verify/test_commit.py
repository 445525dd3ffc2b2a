"""After every round the KV of [0, L) is what a fresh prefill of the committed text gives, in the target and in the draft.

Keeps out: a path moved in the wrong order or over itself, stale rows of rejected branches, extend rows with draft features.

Shapes: L committed tokens.
"""

import pytest
import torch
from toolkit.drafters import Substitute
from toolkit.models import Zoo, ragged_prompts
from torch import Tensor

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.attention.caches.kv_cache import MHACache
from specdec.attention.plan import slots_at
from specdec.engine.loop import Engine
from specdec.engine.request import Request
from specdec.loading import build_engine

CASES = [("eagle3", (4, 1, 5), 1), ("eagle3", (4, 4, 16), 16), ("eagle1", (4, 4, 16), 1), ("eagle1-two-layers", (3, 1, 4), 16)]


def committed_kv(engine: Engine, cache: MHACache, row: int, length: int) -> Tensor:
    """[layers, L, 2, K, D] of a row's committed tokens."""
    slots = slots_at(engine.state.page_table_BW[row : row + 1], torch.arange(length)[None], engine.pool.page_size)
    return cache.kv[:, slots[0]]


def new_request(prompt: list[int], max_tokens: int) -> Request:
    return Request.new(prompt, SamplingParams(max_tokens=max_tokens), 0, frozenset(), lambda ids: "", False)


def fresh_kv(decoder: SpecDecoder, text: list[int], cache_of: str) -> Tensor:
    """The KV of a text that was prefilled whole, in an engine of its own."""
    engine = build_engine(decoder.model, decoder.head, decoder.settings)
    engine.add(new_request(text, 20))
    engine.step()
    return committed_kv(engine, getattr(engine, cache_of).cache, 0, len(text))


@pytest.mark.parametrize("real", [True, False], ids=["own-tree", "oracle-tree"])
@pytest.mark.parametrize(("kind", "shape", "page_size"), CASES, ids=str)
def test_kv_equals_a_fresh_prefill(zoo: Zoo, kind: str, shape: tuple[int, int, int], page_size: int, real: bool) -> None:
    """The oracle's trees have their path anywhere, so that whole paths move; the head's own are what happens."""
    spec = SpecConfig(*shape)
    decoder = zoo.decoder("llama", kind, spec, page_size=page_size, max_batch_size=3)
    engine, worker = decoder.engine, decoder.engine.drafter
    prompts = ragged_prompts(40, 3, seed=2)
    if not real:
        texts = {tuple(p): zoo.greedy("llama", p, 50) for p in prompts}
        engine.drafter = Substitute(engine, spec, "oracle", 40, texts, inner=worker)
    requests = [new_request(prompt, 40) for prompt in prompts]
    for request in requests:
        engine.add(request)
    for _ in range(1 + 4):  # a prefill, then four rounds
        engine.step()
        for row, request in enumerate(requests):
            text = request.prompt_ids + request.output.token_ids[:-1]
            assert int(engine.state.lens_B[row]) == len(text)
            assert int(engine.state.bonus_B[row]) == request.output.token_ids[-1]
            for cache, name in ((engine.verifier.cache, "verifier"), (worker.cache, "drafter")):
                got = committed_kv(engine, cache, row, len(text))
                torch.testing.assert_close(got, fresh_kv(decoder, text, name), atol=1e-4, rtol=1e-4, msg=name)
    assert real or all(request.stats.accepted == 4 * spec.num_steps for request in requests)


def test_move_reads_before_it_writes() -> None:
    """Keeps out: an overlapping move that copies what it has just written."""
    cache = MHACache(2, 10, 1, 4, dtype=torch.float32, device="cpu")
    cache.kv.copy_(torch.arange(10.0)[None, :, None, None, None].expand_as(cache.kv))
    cache.move(torch.tensor([[2, 3, 4, 5, 6]]), torch.tensor([[1, 2, 4, 0]]))
    assert cache.kv[1, :, 1, 0, 3].tolist() == [0, 1, 3, 4, 6, 2, 6, 7, 8, 9]
