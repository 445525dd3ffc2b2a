"""Models where only some layers have a window or chunks hold a window there and all tokens in the others, and nobody notices.

Texts are many times as long as windows and rings, and every slot that nobody has written holds NaN.  Keeps out: a layer that
reads another group's page table or slots, an accepted path that is moved in one group only, a key that is overwritten while a
tree, a chain or a part of a prompt still reads it, a kept prefix whose window is gone, and memory that is not saved.
"""

from pathlib import Path
from typing import Any

import pytest
import toolkit.unlike.targets  # noqa: F401 (its targets)
import torch
from toolkit.drafters import Substitute
from toolkit.driver import Driver
from toolkit.families import NO_FEATURES, Families, assert_greedy
from toolkit.models import HEADS, Zoo
from toolkit.mtp_layers.targets import MtpZoo
from toolkit.pages import ring_passes_take

from specdec import Generation, SamplingParams, SpecConfig, SpecDecoder
from specdec.engine.pages.groups import ALL, KVCacheGroup
from specdec.loading.memory import kv_page_bytes, pool_bytes, pool_plan
from specdec.steps import CopyPages

TREE, CHAIN, LENGTH, CHUNK = SpecConfig(3, 4, 12), SpecConfig(4, 1, 5), 36, 8
PROMPTS = [[5, 9, 2], [*range(1, 38), *range(30)], [7] * 9, [4, 8] * 20]  # some longer than a ring
SAMPLING = SamplingParams(max_tokens=LENGTH)


@pytest.fixture(autouse=True)
def short_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    ring_passes_take(CHUNK, monkeypatch)


def mixed(zoo: Zoo, target: str, head: str | None, spec: SpecConfig | None, page_size: int, **settings: Any) -> SpecDecoder:
    """A decoder whose local layers go around a ring."""
    merged = {"page_size": page_size, "max_seq_len": 240, "max_batch_size": 3, **settings}
    decoder = zoo.decoder(target, head, spec, **merged)
    driver = Driver(decoder)
    assert driver.ring is None and driver.local_ring is not None and driver.local_ring * page_size < 60
    driver.poison_free_slots(torch.nan)
    driver.set_least_shared_to_wait(8)
    return decoder


# qwen2: two full layers, then two with a window of 6.  mistral: a window of 11 everywhere; an eagle3 head reads all keys, and
# eagle1-window and eagle3-window have a window of 3.
PAIRS = [
    ("qwen2", "eagle1", TREE, 4), ("qwen2", "eagle1", CHAIN, 1), ("qwen2", "eagle1-window", TREE, 16), ("qwen2", None, None, 4),
    ("mistral", "eagle3", TREE, 1), ("mistral", "eagle3", CHAIN, 16), ("qwen2", "eagle1-window", CHAIN, 4),
]  # fmt: skip


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("target", "head", "spec", "page_size", "depth"),
    [(*PAIRS[index], depth) for index, depth in ((0, 1), (1, 0), (2, 0), (3, 1), (4, 1))],
    ids=str,
)
def test_long_texts_are_what_transformers_writes(
    zoo: Zoo, target: str, head: str | None, spec: SpecConfig | None, page_size: int, depth: int
) -> None:
    """The text, and each round's acceptance, of a decoder in which every layer has pages for all tokens."""
    decoder = mixed(zoo, target, head, spec, page_size)
    driver = Driver(decoder)
    driver.set_depth(depth)
    outputs = decoder.generate(PROMPTS, SAMPLING)
    assert [out.token_ids for out in outputs] == [zoo.greedy(target, prompt, LENGTH) for prompt in PROMPTS]
    driver.assert_nothing_leaked()
    with pytest.MonkeyPatch.context() as patch:
        ring_passes_take(10**6, patch)
        whole = zoo.decoder(target, head, spec, page_size=page_size, max_seq_len=240, max_batch_size=3)
    assert Driver(whole).local_ring is None and Driver(whole).ring is None
    for one, other in zip(outputs, whole.generate(PROMPTS, SAMPLING), strict=True):
        assert one.token_ids == other.token_ids
        assert one.stats.accepted_per_round == other.stats.accepted_per_round
    assert driver.cache_bytes < Driver(whole).cache_bytes


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("target", "spec", "page_size"), [("gemma", TREE, 4), ("mimo", CHAIN, 1), ("gemma-small", TREE, 16)], ids=str
)
def test_unlike_heads(zoo: Zoo, target: str, spec: SpecConfig, page_size: int) -> None:
    """Each group of layers has slots of its own, and its own widths of heads.  Long paths are accepted in the end."""
    decoder = mixed(zoo, target, "eagle3", spec, page_size)
    driver, prompts = Driver(decoder), PROMPTS[:2] + PROMPTS[3:]
    outputs = decoder.generate(prompts, SAMPLING)
    assert [out.token_ids for out in outputs] == [zoo.greedy(target, prompt, LENGTH) for prompt in prompts]
    texts = {tuple(out.prompt_token_ids): out.token_ids for out in outputs}
    driver.replace_drafter(Substitute(driver, spec, "oracle", 40, texts))
    for out in decoder.generate(prompts, SamplingParams(max_tokens=24)):
        assert out.token_ids == texts[tuple(out.prompt_token_ids)][:24] and out.stats.accepted > 12
    driver.assert_nothing_leaked()


@pytest.mark.slow_cases(keep=0)
@pytest.mark.parametrize(
    ("target", "spec", "page_size", "settings"),
    [
        ("mimo-v2-three", TREE, 4, {}), ("mimo-v2-three", CHAIN, 2, {"prefix_caching": True}), ("mimo-v2", TREE, 1, {}),
    ],
    ids=str,
)  # fmt: skip
def test_mtp_layers_with_a_window(
    tmp_path: Path, target: str, spec: SpecConfig, page_size: int, settings: dict[str, Any]
) -> None:
    """Keeps out: a state of a page's last token that another page of the ring has taken, or that a kept prefix lacks."""
    zoo = MtpZoo(tmp_path)
    with mixed(zoo, target, "mtp", spec, page_size, **settings) as decoder:
        driver = Driver(decoder)
        found = [decoder.generate(PROMPTS, SAMPLING) for _ in range(2)]
        driver.assert_nothing_leaked()
    with pytest.MonkeyPatch.context() as patch:
        ring_passes_take(10**6, patch)
        whole = zoo.decoder(target, "mtp", spec, page_size=page_size, max_seq_len=240, max_batch_size=3)
    assert Driver(whole).local_ring is None
    wanted = whole.generate(PROMPTS, SAMPLING)
    assert [out.token_ids for out in wanted] == [zoo.greedy(target, prompt, LENGTH) for prompt in PROMPTS]
    for outputs in found:
        assert [out.token_ids for out in outputs] == [out.token_ids for out in wanted]
        assert [out.stats.accepted_per_round for out in outputs] == [out.stats.accepted_per_round for out in wanted]


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Families:
    return Families(tmp_path_factory.mktemp("families"))


@pytest.mark.slow_cases(keep=0)
@pytest.mark.parametrize(
    ("name", "page_size", "spec"),
    [
        ("gpt-oss", 64, CHAIN), ("gemma3", 1, TREE), ("llama4", 4, TREE), ("gemma3n", 4, TREE), ("gemma4", 16, CHAIN),
    ],
    ids=str,
)  # fmt: skip
def test_families_through_transformers(families: Families, name: str, page_size: int, spec: SpecConfig) -> None:
    """gpt-oss: a window and sinks in every other layer.  gemma3: windows and two kinds of rotation.  llama4: chunks.
    gemma3n, gemma4: layers of both groups read the keys and values of earlier layers.
    """
    head = families.root / f"{name}-head"
    if not head.is_dir():
        HEADS["eagle1" if name in NO_FEATURES else "eagle3"](head, families.target(name))
    decoder = SpecDecoder.from_pretrained(
        families.target(name), head, spec, device="cpu", dtype="float32", backend="transformers", max_seq_len=250,
        max_batch_size=3, page_size=page_size,
    )  # fmt: skip
    driver = Driver(decoder)
    assert driver.ring is None and driver.local_ring is not None and driver.local_ring * page_size < 130
    driver.poison_free_slots(torch.nan)
    length, prompts = 64, PROMPTS[:3]  # longer than the largest ring, and as many as there are rows
    outputs = decoder.generate(prompts, SamplingParams(max_tokens=length))
    for out in outputs:
        assert len(out.token_ids) == length
        assert_greedy(families.hf(name), out)
    texts = {tuple(out.prompt_token_ids): out.token_ids for out in outputs}
    driver.replace_drafter(Substitute(driver, spec, "oracle", 40, texts))  # long paths are accepted in every round
    shorter = SamplingParams(max_tokens=length - 8)
    for out in decoder.generate(prompts, shorter):
        assert out.token_ids == texts[tuple(out.prompt_token_ids)][: length - 8]
        assert out.stats.accepted > length / 2
    driver.assert_nothing_leaked()


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("target", "head", "spec", "page_size", "batch"),
    [(*PAIRS[index], batch) for index, batch in ((0, 3), (1, 1), (2, 2), (4, 3))],
    ids=str,
)
def test_kept_prefixes_bring_their_windows(
    zoo: Zoo, target: str, head: str, spec: SpecConfig, page_size: int, batch: int
) -> None:
    """The same prompts again, their beginnings and the next turns of conversations are found, and no text changes."""
    warm = mixed(zoo, target, head, spec, page_size, prefix_caching=True, max_batch_size=batch)
    cold = mixed(zoo, target, head, spec, page_size, max_batch_size=batch)
    driver, sampling = Driver(warm), SamplingParams(max_tokens=12)
    stem = [(7 * i * i + 3 * i) % 40 for i in range(90)]
    prompts = [stem + [1, 2], stem[:70] + [3], stem[:41] + [4, 5], stem[:13] + [6], stem + [1, 7]]
    found: list[int] = []
    want: list[Generation] = []
    for turn in range(4):
        want = want if turn in (1, 2) else cold.generate(prompts, sampling)  # the second and third ask what the first one asked
        got = warm.generate(prompts, sampling)
        for one, other in zip(got, want, strict=True):
            assert one.token_ids == other.token_ids
            assert one.stats.accepted_per_round == other.stats.accepted_per_round
            found.append(one.stats.cached_tokens)
        driver.assert_nothing_leaked()
        if turn == 2:  # conversations go on
            prompts = [prompt + out.token_ids + [turn] for prompt, out in zip(prompts, got, strict=True)]
    assert driver.copies_kept > 0
    # Prompts that run beside each other may compute pages twice; such a row's own last pages wait until its ring has moved on.
    for second, third, prompt in zip(found[5:10], found[10:15], prompts, strict=True):
        prompt = prompt[: -(sampling.max_tokens + 1)]
        whole = (len(prompt) - 1) // page_size * page_size
        assert whole - page_size <= second <= third == whole, "the whole prompt was found the third time"
    assert all(cached >= 12 // page_size * page_size for cached in found[15:]) and sum(found[15:]) > sum(found[10:15])


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("target", "head", "spec"),
    [("qwen2", "eagle1", TREE), ("mistral", "eagle3", CHAIN)],
    ids=str,
)
def test_rows_share_pages_in_the_layers_that_read_all_keys(zoo: Zoo, target: str, head: str, spec: SpecConfig) -> None:
    """Keeps out: windowed layers that look for the shared pages' numbers in their own slots."""
    warm = mixed(zoo, target, head, spec, 4, prefix_caching=True)
    driver, sampling = Driver(warm), SamplingParams(max_tokens=24)
    driver.set_least_shared(1)
    seen = driver.watch_sharing()
    prompts = [[*PROMPTS[1], 1], [*PROMPTS[1], 2], [*PROMPTS[1][:40], 3]]
    for _ in range(2):
        for out, prompt in zip(warm.generate(prompts, sampling), prompts, strict=True):
            assert out.token_ids == zoo.greedy(target, prompt, 24)
        driver.assert_nothing_leaked()
    assert seen and max(tokens for _, tokens in seen) >= 40


def test_copies_are_evicted_before_anybody_waits(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a small pool in which kept windows leave no ring for a request, or where a dropped window is still read."""
    monkeypatch.setattr("specdec.loading.memory.KEPT_TOKENS", 100)
    warm = mixed(zoo, "qwen2", "eagle1", TREE, 4, prefix_caching=True, max_seq_len=120, max_batch_size=2)
    driver, sampling = Driver(warm), SamplingParams(max_tokens=12)
    for first in range(8):
        prompts = [[first % 3, *range(40)], [first % 4, *range(20), *range(15)], [first, 2, 3]]
        for out, prompt in zip(warm.generate(prompts, sampling), prompts, strict=True):
            assert out.token_ids == zoo.greedy("qwen2", prompt, 12)
        driver.assert_nothing_leaked()
    looked_up, found = driver.looked_up_and_found
    assert 0 < found < looked_up


def test_a_copy_that_was_not_made_is_not_found(zoo: Zoo) -> None:
    """Keeps out: an error while pages are copied, after which the same prompt begins on pages that hold nothing."""
    decoder = mixed(zoo, "qwen2", "eagle1", TREE, 4, prefix_caching=True)
    driver, sampling = Driver(decoder), SamplingParams(max_tokens=20)

    def fail() -> None:
        raise MemoryError("no room to copy pages")

    driver.before_step(CopyPages, 0, fail)
    with pytest.raises(RuntimeError):
        decoder.generate([PROMPTS[1]], sampling)
    driver.settle()
    assert driver.copies_kept == 0
    for cached in (0, 64):
        (out,) = decoder.generate([PROMPTS[1]], sampling)
        assert out.token_ids == zoo.greedy("qwen2", PROMPTS[1], 20) and out.stats.cached_tokens == cached
    driver.assert_nothing_leaked()


@pytest.mark.slow_cases(keep=0)
@pytest.mark.parametrize("kept", ["int8", "fp8"])
def test_8_bit_caches_in_two_groups(zoo: Zoo, kept: str) -> None:
    """Keeps out: scales that stay behind when a page is copied or a path is moved."""
    warm = mixed(zoo, "qwen2", "eagle1", TREE, 4, kv_cache_dtype=kept, prefix_caching=True)
    sampling = SamplingParams(max_tokens=LENGTH // 2)
    first, *again = (warm.generate(PROMPTS, sampling) for _ in "123")
    assert [[out.token_ids for out in outs] for outs in again] == [[out.token_ids for out in first]] * 2
    assert all(any(out.stats.cached_tokens for out in outs) for outs in again)
    if kept == "fp8":  # its scales come from the first pass of each decoder, so that others may write other texts
        return
    cold = mixed(zoo, "qwen2", "eagle1", TREE, 4, kv_cache_dtype=kept)
    want = [out.token_ids for out in first]
    assert [out.token_ids for out in cold.generate(PROMPTS, sampling)] == want
    with pytest.MonkeyPatch.context() as patch:
        ring_passes_take(10**6, patch)
        whole = zoo.decoder("qwen2", "eagle1", TREE, page_size=4, max_seq_len=240, max_batch_size=3, kv_cache_dtype=kept)
        Driver(whole).set_chunk(CHUNK)
    assert [out.token_ids for out in whole.generate(PROMPTS, sampling)] == want


def test_the_pool_is_what_arithmetic_says(zoo: Zoo) -> None:
    """Two full layers and a full head hold every token, two windowed layers their rings: bytes, not pages, are compared."""
    decoder = mixed(zoo, "qwen2", "eagle1", TREE, 4)
    driver, settings = Driver(decoder), decoder.settings
    target, head = decoder.model.config, decoder.head.config.model  # type: ignore[union-attr]
    a_token = [2 * config.num_kv_heads * config.head_dim * 4 for config in (target, head)]
    ring = -(-(6 + max(settings.lookahead, CHUNK) - 1) // 4)
    full = (3 * settings.pages_per_sequence + 1) * 4 * (2 * a_token[0] + head.num_layers * a_token[1])
    local = (3 * ring + 1) * 4 * 2 * a_token[0]
    assert driver.cache_bytes == full + local
    plan = pool_plan([target, head], settings, pool_bytes(settings.device))
    assert plan.bytes == full + local and plan.groups == (ALL, KVCacheGroup(ring, 6))
    assert plan.groups_of_layers(target) == (0, 0, 1, 1) and plan.groups_of_layers(head) == (0,) * head.num_layers
    assert sum(kv_page_bytes([target, head], settings, plan.groups)) == kv_page_bytes([target, head], settings, (ALL,))[0]


def test_a_pool_without_room_for_a_ring_is_refused(zoo: Zoo) -> None:
    """Keeps out: a decoder that is built and can't run any request."""
    decoder = mixed(zoo, "qwen2", "eagle1", TREE, 4)
    settings, config = decoder.settings, decoder.model.config
    with pytest.raises(ValueError, match="no memory is left on cpu"):
        pool_plan([config], settings, 1000.0)


@pytest.mark.gpu
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize(("target", "head", "spec", "page_size"), [PAIRS[0], PAIRS[4], PAIRS[6]], ids=str)
def test_two_groups_in_graphs(zoo: Zoo, target: str, head: str, spec: SpecConfig, page_size: int, caching: bool) -> None:
    """Rounds replayed ahead of the host: two page tables that were written once serve texts of many windows."""
    decoder = mixed(
        zoo, target, head, spec, page_size, device="cuda", attention="triton", prefix_caching=caching
    )  # fmt: skip
    assert Driver(decoder).depth == 1
    for _ in range(2):
        outputs = decoder.generate(PROMPTS, SAMPLING)
        assert [out.token_ids for out in outputs] == [zoo.greedy(target, prompt, LENGTH) for prompt in PROMPTS]
    Driver(decoder).assert_nothing_leaked()


def test_what_the_folder_of_a_family_says(tmp_path: Path) -> None:
    """Keeps out: a test of two groups in a model of one."""
    families = Families(tmp_path)
    for name in ("gpt-oss", "gemma3", "llama4"):
        decoder = SpecDecoder.from_pretrained(families.target(name), device="cpu", backend="transformers", max_seq_len=250)
        assert len({kind.span is None for kind in decoder.model.config.layer_kinds}) == 2
