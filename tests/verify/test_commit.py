"""After every round the KV of [0, L) is what a fresh prefill of the committed text gives, in the target and in the draft.

Keeps out: a path moved in the wrong order or over itself, stale rows of rejected branches, extend rows with draft features.

Shapes: L committed tokens.
"""

import pytest
import torch
from toolkit.drafters import Substitute
from toolkit.driver import Driver, Model, new_request
from toolkit.models import Zoo, ragged_prompts

from specdec import SpecConfig
from specdec.attention.caches.heads_cache import HeadsLayout
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.kinds import FULL

MODELS: tuple[Model, ...] = ("target", "draft")
CASES = [("eagle3", (4, 1, 5), 1), ("eagle3", (4, 4, 16), 16), ("eagle1", (4, 4, 16), 1), ("eagle1-two-layers", (3, 1, 4), 16)]


@pytest.mark.slow_cases
@pytest.mark.parametrize("real", [True, False], ids=["own-tree", "oracle-tree"])
@pytest.mark.parametrize(("kind", "shape", "page_size"), CASES, ids=str)
def test_kv_equals_a_fresh_prefill(zoo: Zoo, kind: str, shape: tuple[int, int, int], page_size: int, real: bool) -> None:
    """The oracle's trees have the accepted path anywhere, so that whole paths move; the head's trees are realistic."""
    spec = SpecConfig(*shape)
    decoder = zoo.decoder("llama", kind, spec, page_size=page_size, max_batch_size=3)
    driver = Driver(decoder)
    prompts = ragged_prompts(40, 3, seed=2)
    if not real:
        texts = {tuple(p): zoo.greedy("llama", p, 50) for p in prompts}
        driver.replace_drafter(Substitute(driver, spec, "oracle", 40, texts, inner=driver.drafter))
    requests = [new_request(prompt, 40) for prompt in prompts]
    for request in requests:
        driver.add(request)
    for _ in range(1 + 4):  # a prefill, then four rounds
        driver.step()
        for row, request in enumerate(requests):
            text = request.prompt_ids + request.output.token_ids[:-1]
            assert driver.lens(row) == len(text) and driver.bonus(row) == request.output.token_ids[-1]
            for model in MODELS:
                got, want = driver.committed_kv(model, row), driver.fresh_kv(model, text)
                torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4, msg=model)
    assert real or all(request.stats.accepted == 4 * spec.num_steps for request in requests)


def test_move_reads_before_it_writes() -> None:
    """Keeps out: an overlapping move that copies what it has just written."""
    cache = KVCache(HeadsLayout(1, 4, torch.float32), [FULL] * 2, 10)
    cache.buffers["kv"].copy_(torch.arange(10.0)[None, :, None, None, None].expand_as(cache.buffers["kv"]))
    cache.move(torch.tensor([[2, 3, 4, 5, 6]]), torch.tensor([[1, 2, 4, 0]]))
    assert cache.buffers["kv"][1, :, 1, 0, 3].tolist() == [0, 1, 3, 4, 6, 2, 6, 7, 8, 9]
