"""Texts of rows that step back and enter again are those of rows that are left alone, and so is everything else of them.

Keeps out: a token that is lost, doubled or sampled anew when a row enters again; penalties, bad words or a grammar that forget
what was written; log-probabilities of another token; a stream that repeats or skips text; a drafter that goes on from another
place, which shows in what rounds accept.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import toolkit.heads.block_zoo  # noqa: F401 (the zoo has its heads by name)
from toolkit.driver import Driver
from toolkit.inside.stepping import OPTIONS, PENALTIES, hold
from toolkit.models import Zoo, save_eagle3, save_target
from toolkit.mtp_layers.targets import MtpZoo
from toolkit.oracles.encoder_decoders import save_encoder_decoder
from toolkit.pages import ring_passes_take
from toolkit.parallel.decoders import with_ranks

from specdec import SamplingParams, SpecConfig, SpecDecoder

CHAIN, TREE = SpecConfig(3, 1, 4), SpecConfig(3, 2, 6)
SMALL: dict[str, Any] = {"page_size": 4, "max_batch_size": 3, "max_seq_len": 96}
TEXTS: list[dict[str, Any]] = [
    dict(regex="[a-z]{2,9}( [0-9]{1,3}é)*"),
    dict(stop=["ab", "q"], temperature=1.1, seed=3),
    dict(PENALTIES, regex="([a-z]{2,4} )*", temperature=0.7, seed=1),
]


# name: target, drafter, shape, settings
WORLDS: dict[str, tuple[str, str | None, SpecConfig | None, dict[str, Any]]] = {
    "plain": ("llama", None, None, {}),
    "kept": ("llama", "eagle3", TREE, {"prefix_caching": True}),
    "chain": ("llama", "eagle1", CHAIN, {}),
    "two groups": ("qwen2", "eagle1-window", TREE, {"prefix_caching": True}),
    "ring": ("mistral", "eagle3-window", CHAIN, {}),
    "n-grams": ("llama", "ngram", TREE, {"prefix_caching": True}),
    "one pass": ("llama", "p-eagle", TREE, {}),
}


@pytest.mark.slow_cases(keep=3)
@pytest.mark.parametrize("world", WORLDS)
def test_nobody_sees_that_rows_step_back(zoo: Zoo, world: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ring_passes_take(16, monkeypatch)
    target, kind, spec, settings = WORLDS[world]
    with zoo.decoder(target, kind, spec, **SMALL, **settings) as decoder:
        assert Driver(decoder).ring is not None or world != "ring"
        assert Driver(decoder).local_ring is not None or world != "two groups"
        hold(decoder, OPTIONS, seed=len(world))


def test_grammars_and_stop_strings_go_on_where_they_were(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target", "bytes", eos_token_id=383)
    head = save_eagle3(tmp_path / "head", target)
    settings: dict[str, Any] = dict(device="cpu", dtype="float32", smoke=False, **SMALL)
    with SpecDecoder.from_pretrained(target, head, TREE, **settings) as decoder:
        hold(decoder, TEXTS)


def test_several_mtp_layers_go_on_where_they_were(tmp_path: Path) -> None:
    with MtpZoo(tmp_path).decoder("mimo-two", "mtp", SpecConfig(2, 1, 3), **SMALL, prefix_caching=True) as decoder:
        hold(decoder, OPTIONS[:3])


def test_an_encoder_reads_its_text_again(tmp_path: Path) -> None:
    target = save_encoder_decoder(tmp_path / "target", "bart")
    settings: dict[str, Any] = dict(device="cpu", dtype="float32", page_size=4, max_batch_size=3)
    with SpecDecoder.from_pretrained(target, None, None, **settings) as decoder:
        hold(decoder, OPTIONS[:3])


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("target", "kind", "context"),
    [("qwen3", "eagle3", 1), ("llama-dim80-biases", "eagle1", 2)],
    ids=["heads", "context parallel"],
)
def test_all_ranks_step_back_in_the_same_step(zoo: Zoo, target: str, kind: str, context: int) -> None:
    """Memory that nobody wrote is NaN there."""
    pair, settings = (zoo.target(target), zoo.head(target, kind)), {"page_size": 4, "prefix_caching": True}
    with_ranks(*pair, TREE, 2, lambda decoder: hold(decoder, OPTIONS[:3]), **settings, decode_context_parallel_size=context)


def test_auto_rows_that_step_back_while_the_drafter_pauses(zoo: Zoo) -> None:
    """Keeps out: tokens of a pause that the drafter never sees, or reads twice; they are only in the text then."""
    with zoo.decoder("llama", "eagle3", SpecConfig("auto", 2, 8), **SMALL, prefix_caching=True) as decoder:
        driver = Driver(decoder)
        prompts = [[7, 1, 30], [11, 3, 8, 2, 9] * 4, [5, 6] * 7]
        sampling = [SamplingParams(max_tokens=26, **each) for each in OPTIONS[:3]]
        want = [out.token_ids for out in decoder.generate(prompts, sampling, speculate=False)]
        driver.script_levels(2, 0, 0, 0, 3, 0, 0, 1, 2, 0, 0, 0, 0, 2, 2, 0, 0, 0)
        requests = [driver.submit(prompt, each) for prompt, each in zip(prompts, sampling, strict=True)]
        with driver.stepping_back(random.Random(3), 0.4) as counts:
            driver.run_until_idle()
        assert all(counts[request] for request in requests)
        assert [request.output.token_ids for request in requests] == want
        driver.assert_nothing_leaked()


@pytest.mark.slow_cases
@pytest.mark.parametrize("caching", [False, True])
def test_a_pool_that_holds_little_more_than_one(zoo: Zoo, caching: bool) -> None:
    """Six requests that each nearly fill the pool, and some that are cancelled in the middle.  Keeps out: rows that wait for
    each other, and texts that depend on who else was there."""
    with zoo.decoder("llama", "eagle3", TREE, page_size=2, max_batch_size=4, max_seq_len=64, prefix_caching=caching) as decoder:
        driver = Driver(decoder)
        driver.expect_short_outputs()
        chance = random.Random(2)
        prompts = [[chance.randrange(40) for _ in range(chance.randrange(1, 9))] for _ in range(6)]
        sampling = [SamplingParams(max_tokens=32 - len(prompt), **OPTIONS[i % 4]) for i, prompt in enumerate(prompts)]
        want = [out.token_ids for out in decoder.generate(prompts, sampling)]
        before = driver.stepped_back[0]
        with driver.leave_room_for(32):
            requests = [driver.submit(prompt, each) for prompt, each in zip(prompts, sampling, strict=True)]
            while not driver.is_idle:
                driver.step()
                driver.assert_books_balance()
                if len(requests[3].output.token_ids) > 9:
                    driver.cancel(requests[3])
        assert driver.stepped_back[0] - before >= 3
        for request, tokens in zip(requests, want, strict=True):
            assert request.output.token_ids == (tokens[: len(request.output.token_ids)] if request.cancelled else tokens)
        driver.assert_nothing_leaked()
