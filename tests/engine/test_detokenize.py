"""Text that comes piece by piece, joined, is the whole text, however the tokens were cut into chunks.

Keeps out: characters split between chunks, spaces lost or doubled at their borders, text shown that a stop string then takes.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from toolkit.models import Zoo
from toolkit.tokenizers import CHARACTERS, byte_tokenizer, word_tokenizer

from specdec import SamplingParams, SpecConfig
from specdec.engine.detokenize import Detokenizer, held_back
from specdec.engine.trim import Trimmer
from specdec.prompts import Tokenizer

Decode = Callable[[Sequence[int]], str]


def chunked(ids: list[int], rng: random.Random) -> list[list[int]]:
    """The ids cut at random places; some chunks are empty."""
    cuts = sorted(rng.choices(range(len(ids) + 1), k=rng.randrange(len(ids) + 2)))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def token_lists(vocab_size: int, rng: random.Random) -> list[list[int]]:
    return [[rng.randrange(vocab_size) for _ in range(rng.randrange(1, 40))] for _ in range(60)]


def text_lists(rng: random.Random) -> list[list[int]]:
    """Real text of many multi-byte characters, sometimes cut off within the last one."""
    inner = byte_tokenizer(384)
    texts = ["".join(rng.choices(CHARACTERS + "ab c\n", k=rng.randrange(1, 25))) for _ in range(60)]
    return [ids[: max(1, len(ids) - rng.randrange(3))] for ids in (inner.encode(text) for text in texts)]


def special_decode(ids: Sequence[int]) -> str:
    """As SentencePiece decodes: ids below 4 are special and show nothing, and a text's first space is stripped."""
    text = "".join(f" {chr(93 + i)}" if i % 3 else chr(93 + i) for i in ids if i >= 4)
    return text.removeprefix(" ")


@pytest.fixture(params=["words", "bytes", "special", "stories260K"])
def decoding(request: pytest.FixtureRequest) -> tuple[Decode, list[list[int]]]:
    """A tokenizer's decode, and sequences to decode.  The last strips the first space, and skips special tokens."""
    rng = random.Random(0)
    if request.param == "words":
        return word_tokenizer(512).decode, token_lists(512, rng)
    if request.param == "bytes":
        return byte_tokenizer(384).decode, token_lists(384, rng) + text_lists(rng)
    if request.param == "special":
        return special_decode, [[rng.choice([*range(4), *range(16)]) for _ in range(rng.randrange(1, 20))] for _ in range(200)]
    folder: Path = request.getfixturevalue("shared")
    tokenizer = Tokenizer(folder / "models" / "stories260K")
    whole = [1, 2, *range(259, 512)]  # not the byte tokens: behind a broken byte, all bytes before it read as broken too
    sequences = [[rng.choice(whole) for _ in range(rng.randrange(1, 30))] for _ in range(200)]
    return tokenizer.decode, sequences + [tokenizer.encode("".join(rng.choices(CHARACTERS + "ab ", k=9))) for _ in range(60)]


def test_every_rechunking_gives_the_whole_text(decoding: tuple[Decode, list[list[int]]]) -> None:
    """Random chunks, and one token at a time.  Keeps out: a window that moves on over tokens without text, and then strips
    a space which is not the first."""
    decode, sequences = decoding
    for seed, ids in enumerate(sequences):
        for chunks in (chunked(ids, random.Random(seed)), [[token] for token in ids]):
            detokenizer = Detokenizer(decode)
            pieces = [detokenizer.add(chunk) for chunk in chunks]
            assert "".join(pieces) + detokenizer.flush() == decode(ids), ids


def test_no_character_is_shown_in_parts() -> None:
    """A piece never ends in the mark of an incomplete character, except at the very end."""
    rng = random.Random(1)
    inner = byte_tokenizer(384)
    for _ in range(30):
        text = "".join(rng.choices(CHARACTERS + "ab", k=12))
        detokenizer = Detokenizer(inner.decode)
        pieces = [detokenizer.add([token]) for token in inner.encode(text)]
        assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)
        assert len([piece for piece in pieces if piece]) == len(text)  # each as soon as it is whole


def test_held_back_is_the_longest_beginning_of_a_stop() -> None:
    for text, stops, want in [
        ("abc", ["cd"], 1), ("abc", ["bcd", "cd"], 2), ("abc", ["abc"], 0), ("", ["a"], 0), ("aab", ["aaa"], 0),
        ("xaa", ["aaa"], 2), ("abc", [], 0), ("ab", ["babab", "c"], 1), ("abab", ["ababx"], 4),
    ]:  # fmt: skip
        assert held_back(text, stops) == want, (text, stops)


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
        trimmer = Trimmer(sampling, frozenset(), lambda tokens: "".join(word[t] for t in tokens), streaming=True)
        shown, kept = "", 0
        for chunk in chunked(ids, random.Random(seed)):
            kept += trimmer.take(chunk)
            shown += trimmer.new_text()
            assert want[1].startswith(shown)
        assert (trimmer.token_ids, trimmer.text, trimmer.finish_reason) == want, stops
        assert shown == trimmer.text and kept == len(want[0])
        ends.add((want[2], len(want[0])))
    assert len(ends) > 8


@pytest.mark.slow
@pytest.mark.parametrize("target", ["words", "bytes"])
@pytest.mark.parametrize("stop", [None, "a"])
def test_a_streams_chunks_joined_are_the_final_text(zoo: Zoo, target: str, stop: str | None) -> None:
    """Through the whole decoder; a random byte-level model writes mostly broken characters."""
    decoder = zoo.decoder(target, "eagle3", SpecConfig(4, 4, 16))
    for seed in range(8):
        sampling = SamplingParams(max_tokens=40, temperature=1.3, seed=seed, stop=stop)
        chunks = list(decoder.stream([3 + seed, 40], sampling))
        (whole,) = decoder.generate([3 + seed, 40], sampling)
        assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert not stop or stop not in whole.text
        if stop is None:
            assert whole.text == decoder.tokenizer.decode(whole.token_ids) and len(chunks) == whole.stats.rounds + 1
