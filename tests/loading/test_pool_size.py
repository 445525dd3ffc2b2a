"""kv_cache_memory and state_cache: how much memory keys, values and kept states take, in bytes or as a share."""

import re
from pathlib import Path
from typing import Any

import pytest
import toolkit.recurrent.targets  # noqa: F401 (the zoo has its targets by name)
import torch
from toolkit.checkpoints.plans import plan_memory
from toolkit.driver import Driver
from toolkit.models import Zoo, ragged_prompts, save_target

from specdec import SamplingParams, SpecConfig, SpecDecoder, shipped
from specdec.checks import PromptTooLong
from specdec.loading.build import plan_pool
from specdec.loading.memory import pool_bytes
from specdec.options import EngineOptions

CPU = torch.device("cpu")
SPEC = SpecConfig(3, 2, 6)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("auto", "auto"), (4096, 4096), (2e9, 2_000_000_000), ("2GiB", 2 << 30), ("1.5 mib", 3 << 19), ("4096", 4096),
        (0.25, 0.25), ("0.25", 0.25),
    ],
)  # fmt: skip
def test_amounts_are_bytes_or_shares(given: str | int | float, kept: str | int | float) -> None:
    """Keeps out: two GiB of which somebody gets two bytes, and half of the memory that becomes none."""
    found = EngineOptions(kv_cache_memory=given).kv_cache_memory
    assert found == kept and type(found) is type(kept)


@pytest.mark.parametrize(("given", "error", "nearest"), [
    (0, ValueError, "'auto'"), (-5, ValueError, "'auto'"), (float("nan"), ValueError, "'auto'"), ("", ValueError, "'auto'"),
    (float("inf"), ValueError, "'auto'"), ("2 apples", ValueError, "'auto'"), ("Auto", ValueError, "'auto'"),
    (1000.5, ValueError, "1000"), (True, TypeError, "'auto'"), (None, TypeError, "'auto'"), ([1], TypeError, "'auto'"),
])  # fmt: skip
def test_what_is_no_amount_is_refused(given: Any, error: type[Exception], nearest: str) -> None:
    """Keeps out: a pool of one byte for `True`, and an error that comes up only when the pool is made."""
    said = f"kv_cache_memory must be a number of bytes, .* got {re.escape(repr(given))}.*; nearest setting that works: "
    with pytest.raises(error, match=f"{said}kv_cache_memory={nearest}$"):
        EngineOptions(kv_cache_memory=given)


def test_the_pool_is_as_large_as_was_asked(zoo: Zoo) -> None:
    """Keeps out: a pool above the number, pages that would fit and are not made, a head's pages that nobody counted; memory
    that a full batch can't use taken without prefixes to keep there."""

    def of(asked: int | float, **settings: Any) -> tuple[int, int, int]:
        decoder = zoo.decoder("llama", "eagle3", SPEC, page_size=4, kv_cache_memory=asked, **settings)
        plan = plan_pool(decoder.model, decoder.head, decoder.settings)
        assert sum(cache.bytes for cache in Driver(decoder).caches) == plan.bytes
        return plan.bytes, *plan.page_bytes, plan.num_pages[0]

    taken, page, pages = of(50_000)
    assert 50_000 - page < taken <= 50_000 and taken == pages * page
    whole, page, pages = of(10**9)
    assert pages == 8 * -(-(128 + SPEC.lookahead) // 4) + 1 and whole == pages * page
    kept, *_ = of(20_000_000, prefix_caching=True)
    assert 20_000_000 - page < kept <= 20_000_000


def test_a_share_is_one_of_all_there_is() -> None:
    assert pool_bytes(CPU, 0.5) == 2 * pool_bytes(CPU, 0.25) > 1e9
    assert pool_bytes(CPU, 12345) == 12345
    with pytest.raises(
        ValueError, match=r"kv_cache_memory must be at most what the host has on cpu, \d+ bytes, got 1\d+; nearest "
    ):
        pool_bytes(CPU, 10**18)


def test_a_pool_below_one_long_request_serves_short_ones(zoo: Zoo) -> None:
    """Keeps out: a small pool that is refused though requests fit it, one that can't fit let in to wait for ever, and a hint
    that does not fit either."""
    whole = zoo.decoder("llama", "eagle3", SPEC, page_size=4)
    page = plan_pool(whole.model, whole.head, whole.settings).page_bytes[0]
    decoder = zoo.decoder("llama", "eagle3", SPEC, page_size=4, kv_cache_memory=17 * page)  # 16 pages of 4 tokens, one to pad
    prompts, sampling = ragged_prompts(40, 6, seed=3), SamplingParams(max_tokens=9)
    got, want = (each.generate(prompts, sampling) for each in (decoder, whole))
    assert [out.token_ids for out in got] == [out.token_ids for out in want]
    with pytest.raises(PromptTooLong, match="must fit the KV pool of 64 tokens") as error:
        decoder.generate([1, 2, 3], SamplingParams(max_tokens=80))
    most = int(str(error.value).rpartition("=")[2])
    (out,) = decoder.generate([1, 2, 3], SamplingParams(max_tokens=most))
    assert len(out.token_ids) == most > 40
    Driver(decoder).assert_nothing_leaked()


@pytest.mark.parametrize("target", ["llama", "qwen2"])  # one group of layers, and two
def test_the_least_that_is_named_works(zoo: Zoo, target: str) -> None:
    """Keeps out: a hint that does not work, and one that asks for more than is needed."""
    with pytest.raises(ValueError, match="kv_cache_memory must hold at least a page .* got 10; nearest") as error:
        zoo.decoder(target, page_size=4, max_seq_len=240, kv_cache_memory=10)
    least = int(str(error.value).rpartition("=")[2])
    zoo.decoder(target, page_size=4, max_seq_len=240, kv_cache_memory=least)
    with pytest.raises(ValueError, match="kv_cache_memory must hold"):
        zoo.decoder(target, page_size=4, max_seq_len=240, kv_cache_memory=least - 1)


def test_kept_states_take_what_was_asked(zoo: Zoo) -> None:
    """Keeps out: states beside the pool's memory, fewer or more of them than asked for, and hints that do not work."""

    def kept(**settings: Any) -> tuple[int, int]:
        decoder = zoo.decoder("qwen3_5_text", None, page_size=4, max_batch_size=2, prefix_caching=True, **settings)
        plan = plan_pool(decoder.model, decoder.head, decoder.settings)
        assert plan.states is not None
        assert plan.bytes + plan.states.bytes <= memory
        return plan.states.kept, plan.states.state_bytes

    memory = 4_000_000
    tenth, size = kept(kv_cache_memory=memory)
    assert tenth == memory // 10 // size > 1
    assert kept(kv_cache_memory=memory, state_cache=5 * size + 3)[0] == 5
    assert kept(kv_cache_memory=memory, state_cache=0.5)[0] == memory // 2 // size
    for asked, nearest in ((size - 1, size), (1e-6, size), (memory, "'auto'"), ("100GiB", "'auto'")):
        said = f"state_cache must hold a state, {size} bytes here, and leave some of the .* bytes .* state_cache={nearest}$"
        with pytest.raises(ValueError, match=said):
            kept(kv_cache_memory=memory, state_cache=asked)
    assert kept(kv_cache_memory=memory, state_cache=size)[0] == 1
    for asked in (0.5, size, 10**9):  # rows' states take six
        with pytest.raises(ValueError, match=f"{size} bytes here, .* nearest .* kv_cache_memory=.* and state_cache=") as error:
            kept(kv_cache_memory=6 * size + 300, state_cache=asked)
        least, own = (int(number) for number in re.findall(r"=(\d+)", str(error.value))[-2:])
        assert own == size and kept(kv_cache_memory=(memory := least), state_cache=own)[0] == 1
    with pytest.raises(ValueError, match="kv_cache_memory must hold at least a page") as error:
        kept(kv_cache_memory=300)
    memory = int(str(error.value).rpartition("=")[2])
    with pytest.warns(UserWarning, match=f"finds nothing.* nearest .* and state_cache={size}"):
        assert kept(kv_cache_memory=memory)[0] == 0


def test_memory_for_states_that_nobody_keeps_is_refused(zoo: Zoo) -> None:
    """Keeps out: a setting without effect."""
    with pytest.raises(ValueError, match="state_cache is for models with recurrent layers, and llama .* got 0.5; .*'auto'$"):
        zoo.decoder("llama", None, prefix_caching=True, state_cache=0.5)
    with pytest.raises(ValueError, match="got prefix_caching=False; nearest .* prefix_caching=True$"):
        zoo.decoder("qwen3_5_text", None, state_cache=0.5)
    with pytest.raises(ValueError, match="or a share of the KV pool's memory below 1, got 0; nearest .* state_cache='auto'$"):
        EngineOptions(state_cache=0)


def test_a_plan_counts_it(tmp_path: Path) -> None:
    """Keeps out: a plan of a full batch's pages where the pool's size was given, and requests longer than the pool."""
    target = shipped.target_folder()
    free, small = (
        plan_memory(target, None, None, EngineOptions(max_batch_size=4, max_seq_len=200, kv_cache_memory=size), 10**9)
        for size in ("auto", 500_000)
    )
    assert small.parts == free.parts | {"keys and values": 500_000}
    assert 0 < small.longest * small.kv_token[0] <= 500_000 < (small.longest + 40) * small.kv_token[0]
    with pytest.raises(ValueError, match="kv_cache_memory must be 'auto' or bytes .* got 0.5; nearest .*=500000000"):
        plan_memory(target, None, None, EngineOptions(kv_cache_memory=0.5), 10**9)


@pytest.mark.gpu
def test_on_a_gpu_the_pool_takes_a_share_of_what_is_free(tmp_path: Path) -> None:
    """Keeps out: a share of all memory, which the weights have taken already."""
    folder = save_target(tmp_path / "llama", "llama")
    taken = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    free = torch.cuda.mem_get_info()[0]
    assert abs(pool_bytes(torch.device("cuda"), 0.1) - 0.1 * free) < 0.02 * free and taken.is_cuda
    with pytest.raises(ValueError, match="what is free on cuda"):
        pool_bytes(torch.device("cuda"), 10**13)
    settings: dict[str, Any] = dict(prefix_caching=True, kv_cache_memory="64MiB")
    with SpecDecoder.from_pretrained(folder, device="cuda", **settings) as decoder:
        plan = plan_pool(decoder.model, None, decoder.settings)
        assert (64 << 20) - plan.page_bytes[0] < plan.bytes <= 64 << 20


def test_a_tenth_that_holds_no_state_is_said(zoo: Zoo) -> None:
    """Keeps out: prefix caching that was asked for, finds nothing, and does not say so."""
    settings: dict[str, Any] = {"prefix_caching": True, "max_batch_size": 1, "max_seq_len": 32}
    with pytest.warns(UserWarning, match="prefix_caching=True finds nothing: .* nearest setting .* state_cache="):
        zoo.decoder("qwen3_5_text", "ngram", SpecConfig(1, 1, 2), kv_cache_memory=60_000, **settings)
