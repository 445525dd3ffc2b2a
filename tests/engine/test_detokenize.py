"""Text that comes piece by piece: characters come whole, and stop strings are found however the tokens were cut into chunks.

Keeps out: characters split between chunks, and text shown that a stop string then takes away.
"""

import random
import time

import pytest
from toolkit.checkpoints.tokenizers import CHARACTERS, byte_tokenizer
from toolkit.models import Zoo

from specdec import SamplingParams, SpecConfig
from specdec.engine.detokenize import Detokenizer, StopStrings
from specdec.engine.trim import Trimmer


def chunked(ids: list[int], rng: random.Random) -> list[list[int]]:
    """The ids cut at random places; some chunks are empty."""
    cuts = sorted(rng.choices(range(len(ids) + 1), k=rng.randrange(len(ids) + 2)))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def test_no_character_is_shown_in_parts() -> None:
    """A piece never ends in the mark of an incomplete character, except at the very end."""
    rng = random.Random(1)
    inner = byte_tokenizer(384)
    for _ in range(30):
        text = "".join(rng.choices(CHARACTERS + "ab", k=12))
        detokenizer = Detokenizer(inner.decode, [])
        pieces = [detokenizer.add(token) for token in inner.encode(text)]
        assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)
        assert len([piece for piece in pieces if piece]) == len(text)  # each as soon as it is whole


def test_held_back_is_the_longest_beginning_of_a_stop() -> None:
    for text, stops, want in [
        ("abc", ["cd"], 1), ("abc", ["bcd", "cd"], 2), ("abc", ["abc"], 0), ("", ["a"], 0), ("aab", ["aaa"], 0),
        ("xaa", ["aaa"], 2), ("abc", [], 0), ("ab", ["babab", "c"], 1), ("abab", ["ababx"], 4),
    ]:  # fmt: skip
        assert StopStrings(stops).held_back(text) == want, (text, stops)


def slow_end(ids: list[int], word: list[str], stops: list[str]) -> tuple[list[int], str, str]:
    """The tokens up to the first that completes a stop string, the text before it, and why it ended."""
    for n in range(1, len(ids) + 1):
        text = "".join(word[token] for token in ids[:n])
        places = [text.find(stop) for stop in stops if stop in text]
        if places:
            return ids[:n], text[: min(places)], "stop"
    return ids, "".join(word[token] for token in ids), "length"


def test_stop_strings_equal_a_slow_search() -> None:
    """Random texts over three letters, where stop strings begin, overlap and cross tokens all the time."""
    rng = random.Random(2)
    word = ["a", "b", "ab", "ba", "aab", "c"]
    ends = set()
    for seed in range(400):
        ids = [rng.randrange(len(word)) for _ in range(12)]
        stops = ["".join(rng.choices("abc", k=rng.randrange(1, 7))) for _ in range(rng.randrange(1, 4))]
        want = slow_end(ids, word, stops)
        sampling = SamplingParams(max_tokens=len(ids), stop=stops)
        trimmer = Trimmer(sampling, frozenset(), lambda tokens: "".join(word[t] for t in tokens), [], streaming=True)
        shown, kept = "", 0
        for chunk in chunked(ids, random.Random(seed)):
            kept += trimmer.take(chunk)
            shown += trimmer.new_text()
            assert want[1].startswith(shown)
        assert (trimmer.token_ids, trimmer.text, trimmer.finish_reason) == want, stops
        assert shown == trimmer.text and kept == len(want[0])
        written = "".join(word[t] for t in want[0])
        assert trimmer.stop_text in (stops if want[2] == "stop" else [None])
        assert written.startswith(want[1] + (trimmer.stop_text or ""))
        ends.add((want[2], len(want[0])))
    assert len(ends) > 8


@pytest.mark.slow_cases
@pytest.mark.slow
@pytest.mark.parametrize("target", ["words", "bytes"])
@pytest.mark.parametrize("stop", [None, "a"])
def test_a_streams_chunks_joined_are_the_final_text(zoo: Zoo, target: str, stop: str | None) -> None:
    """Through the whole decoder; a random byte-level model writes mostly broken characters."""
    decoder = zoo.decoder(target, "eagle3", SpecConfig(3, 2, 6))
    for seed in range(4):
        sampling = SamplingParams(max_tokens=40, temperature=1.3, seed=seed, stop=stop)
        chunks = list(decoder.stream([3 + seed, 40], sampling))
        (whole,) = decoder.generate([3 + seed, 40], sampling)
        assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert not stop or stop not in whole.text
        if stop is None:
            assert 1 < len(chunks) <= whole.stats.rounds + 1


def test_stop_strings_are_found_as_by_looking_for_each() -> None:
    """Keeps out: another end than that of the first stop string, where stops overlap, nest, or begin in earlier pieces."""
    rng = random.Random(5)
    for _ in range(400):
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(rng.randint(0, 4))]
        text, found = "", None
        while found is None and len(text) < 20:
            seen, text = len(text), text + "".join(rng.choices("abc", k=rng.randint(0, 4)))
            found = StopStrings(stops).find(text, seen)
            every = [(at, at + len(stop)) for stop in stops if (at := text.find(stop)) >= 0]
            assert found == min(every, default=None), (text, stops)


def test_thousands_of_stop_strings_hold_nobody_up() -> None:
    """Keeps out: a request with 10,000 long stop strings, of which each token kept the engine's thread from all other requests
    for 0.2 seconds."""
    stops, text = StopStrings([f"z{i}" + "x" * 370 for i in range(10_000)]), "once upon a time " * 40
    began = time.process_time()
    for end in range(len(text) - 20, len(text)):
        assert stops.find(text[: end + 1], end) is None and stops.held_back(text[: end + 1]) == 0
    assert time.process_time() - began < 1
