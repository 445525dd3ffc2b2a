"""The text of a request is what decoding prompt and output together adds to decoding the prompt, in one piece and in many.

The definition itself, which decodes everything, is the oracle of the code, which looks at a few tokens at a time.
"""

import os.path
import random
from collections.abc import Callable, Iterator, Sequence

import pytest
from toolkit.checkpoints import tokenizers
from toolkit.checkpoints.tokenizers import CHARACTERS, SPECIALS
from toolkit.models import Zoo, save_target
from transformers import PreTrainedTokenizerFast

from specdec import SamplingParams, SpecDecoder
from specdec.engine.detokenize import Decode, Detokenizer, decode_all
from specdec.engine.trim import Trimmer

Ids = list[int]


class Case:
    """A way to decode, and the ids that may come: units that stay together, so that characters can be made whole or not."""

    def __init__(self, decode: Decode, units: Sequence[Ids]) -> None:
        self.decode, self.units = decode, units

    def draw(self, rng: random.Random, most: int) -> Ids:
        ids = [token for unit in rng.choices(self.units, k=rng.randrange(most)) for token in unit]
        return ids[rng.randrange(3) : len(ids) - rng.randrange(3)]  # the ends may lie within a character


def of_tokenizer(tokenizer: PreTrainedTokenizerFast, units: Sequence[Ids] = ()) -> Case:
    """A case that decodes as the decoder does, with every token and then the units given."""
    singles = [[token] for token in range(len(tokenizer)) if not tokenizer.convert_ids_to_tokens(token).startswith("<0x")]
    return Case(
        lambda ids: tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False), [*singles, *units]
    )


def byte_fallback() -> Case:
    """Characters of byte tokens, whole ones: those that a broken run would spoil have a test of their own."""
    tokenizer = tokenizers.sentencepiece_tokenizer()
    return of_tokenizer(tokenizer, [[1 + byte for byte in character.encode()] for character in CHARACTERS * 4])


def byte_level() -> Case:
    """Random tokens make broken characters mostly, so whole ones are drawn as well."""
    tokenizer = tokenizers.byte_tokenizer(384)
    return of_tokenizer(tokenizer, [tokenizer.encode(character) for character in CHARACTERS * 20])


def stub(strip: Callable[[str], str]) -> Case:
    """A decoder that drops ids below 3, and strips the text of the others."""
    words = ["", "", "", " a", "b", " ", "  c", ".", " "]
    return Case(lambda ids: strip("".join(words[token] for token in ids)), [[token] for token in range(len(words))])


CASES: dict[str, Callable[[], Case]] = {
    "bytes": byte_level,
    "sentencepiece": byte_fallback,
    "metaspace": lambda: of_tokenizer(tokenizers.metaspace_tokenizer()),
    "wordpiece": lambda: of_tokenizer(tokenizers.wordpiece_tokenizer()),
    "suffix": lambda: of_tokenizer(tokenizers.suffix_tokenizer()),
    "words": lambda: of_tokenizer(tokenizers.word_tokenizer(512)),
    "strips-first-space": lambda: stub(lambda text: text.removeprefix(" ")),
    "strips-both-ends": lambda: stub(str.strip),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]()


def added(decode: Decode, prompt: Ids, output: Ids) -> str:
    """The definition."""
    before, both = decode(prompt), decode(prompt + output)
    return both[len(os.path.commonprefix([before, both])) :]


def pieces_of(decode: Decode, prompt: Ids, output: Ids) -> Iterator[str]:
    detokenizer = Detokenizer(decode, prompt)
    for token in output:
        yield detokenizer.add(token)
    yield detokenizer.flush()


def is_streamable(decode: Decode, prompt: Ids, output: Ids) -> bool:
    """Whether no later token changes a character that was whole once, which no stream could take back."""
    text = decode(prompt + output)
    return all(text.startswith(decode(prompt + output[:n]).rstrip("\ufffd")) for n in range(len(output)))


@pytest.mark.slow_cases
def test_text_is_what_the_output_adds(case: Case) -> None:
    """Keeps out: a space lost or doubled after the prompt, tokens without text taken for context, characters in parts."""
    rng = random.Random(0)
    checked = 0
    for _ in range(400):
        prompt, output = case.draw(rng, 30), case.draw(rng, 40)
        if not is_streamable(case.decode, prompt, output):
            continue
        checked += 1
        want = added(case.decode, prompt, output)
        assert decode_all(case.decode, prompt, output) == want, (prompt, output)
        assert "".join(pieces_of(case.decode, prompt, output)) == want, (prompt, output)
    assert checked > 200


def test_a_prompt_that_ends_with_special_tokens_keeps_the_space() -> None:
    """Keeps out: special tokens at a chat prompt's end, which have no text, as the only context."""
    tokenizer = tokenizers.sentencepiece_tokenizer()
    decode = of_tokenizer(tokenizer).decode
    (had, big, box), specials = (tokenizer.convert_tokens_to_ids(["▁had", "▁big", "▁box"]), tokenizer.all_special_ids)
    specials = tokenizer.convert_tokens_to_ids(SPECIALS) * 5
    assert decode(specials) == ""
    for between in ([], specials):
        prompt, output = [had, *between], [*between, big, *between, box]
        assert decode(prompt) + decode_all(decode, prompt, output) == "had big box"
        assert list(filter(None, pieces_of(decode, prompt, output))) == [" big", " box"]
    assert decode_all(decode, specials, [big, box]) == "big box"  # nothing was said: decoding strips this space itself


def test_a_character_begun_in_the_prompt_is_shown_whole() -> None:
    """Keeps out: the rest of a character, broken or lost, where a prompt's ids end within one."""
    for case, offset in ((CASES["sentencepiece"](), 1), (byte_case(), 0)):
        ids = [offset + byte for byte in "x日本".encode()]
        for cut in range(1, 7):
            for extra in ([], ids[1:]):
                prompt, output = ids[:cut], ids[cut:] + extra
                assert "".join(pieces_of(case.decode, prompt, output)) == added(case.decode, prompt, output)
                assert decode_all(case.decode, prompt, output) == added(case.decode, prompt, output)


def byte_case() -> Case:
    """Token i is byte i."""
    return Case(lambda ids: bytes(ids).decode(errors="replace"), [[byte] for byte in range(256)])


def test_a_broken_run_of_byte_tokens_takes_nothing_back() -> None:
    """Keeps out: a stream that stops for good, repeats itself or differs from `generate` after bytes that make no character.

    Such decoders show all of a run as broken then, even what was whole.
    """
    tokenizer = tokenizers.sentencepiece_tokenizer()
    decode = of_tokenizer(tokenizer).decode
    big = tokenizer.convert_tokens_to_ids("▁big")
    day = [1 + byte for byte in "日".encode()]
    assert decode([big, *day, 1 + 0xFF, big]) == "big\ufffd\ufffd\ufffd\ufffd big"
    assert list(pieces_of(decode, [big], [*day, 1 + 0xFF, big])) == ["", "", "日", "", "\ufffd big", ""]
    assert list(pieces_of(decode, [big, *day], [1 + 0xFF, big, big])) == ["", "\ufffd big", " big", ""]
    rng = random.Random(1)
    for _ in range(300):
        prompt, output = ([rng.choice([*range(1, 257), big, big]) for _ in range(rng.randrange(30))] for _ in range(2))
        pieces = list(pieces_of(decode, prompt, output))
        assert "".join(pieces) == decode_all(decode, prompt, output)
        assert not any(piece.endswith("\ufffd") for piece in pieces[:-1])
        assert "".join(pieces).count(" big") + "".join(pieces).startswith("big") == output.count(big)


@pytest.mark.parametrize("name", CASES)
def test_long_prompts_and_outputs_cost_no_more_a_token(name: str) -> None:
    """Keeps out: decoding the whole prompt, or all that came before, at every token."""
    case, rng = CASES[name](), random.Random(2)
    prompt, output = ([token for _ in range(3000) for token in rng.choice(case.units)] for _ in range(2))
    calls: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        calls.append(len(ids))
        return case.decode(ids)

    "".join(pieces_of(decode, prompt, output))
    assert max(calls) < 200 and sum(calls) < 60 * len(output), (max(calls), sum(calls) / len(output))


def test_many_tokens_without_text_cost_no_more_a_token() -> None:
    """Keeps out: a window that grows for ever when a model told to ignore its EOS repeats it."""
    case = CASES["sentencepiece"]()
    tokenizer = tokenizers.sentencepiece_tokenizer()
    big, end = tokenizer.convert_tokens_to_ids(["▁big", "</s>"])
    calls: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        calls.append(len(ids))
        return case.decode(ids)

    assert "".join(pieces_of(decode, [big], [end] * 1000 + [big])) == " big"
    assert max(calls) < 10


@pytest.mark.slow_cases
def test_stop_strings_are_found_across_pieces(case: Case) -> None:
    """Keeps out: a stop string missed across pieces, or found in the prompt; and text shown that the stop string takes away."""
    rng = random.Random(3)
    stopped = 0
    for _ in range(300):
        prompt, output = case.draw(rng, 12), case.draw(rng, 30)
        if not output or not is_streamable(case.decode, prompt, output):
            continue
        whole = added(case.decode, prompt, output)
        begin = rng.randrange(len(whole) + 1)
        stop = whole[begin : begin + rng.randrange(1, 6)].strip("\ufffd") or "box"
        sampling = SamplingParams(max_tokens=len(output), stop=stop)
        trimmer = Trimmer(sampling, frozenset(), case.decode, prompt, streaming=True)
        shown = ""
        for token in output:
            trimmer.take([token])
            shown += trimmer.new_text()
            assert whole.partition(stop)[0].startswith(shown)
        assert shown == trimmer.text == whole.partition(stop)[0]
        assert trimmer.finish_reason == ("stop" if stop in whole else "length")
        stopped += stop in whole
    assert stopped > 50


@pytest.fixture(scope="module")
def pieces_decoder(tmp_path_factory: pytest.TempPathFactory) -> SpecDecoder:
    """A random model whose tokenizer strips the first space when it decodes."""
    folder = tmp_path_factory.mktemp("pieces")
    tokenizer = tokenizers.sentencepiece_tokenizer()
    save_target(folder, "llama", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    return SpecDecoder.from_pretrained(folder, device="cpu", dtype="float32", max_seq_len=128)


@pytest.mark.slow
def test_prompt_and_answer_joined_are_one_text(pieces_decoder: SpecDecoder) -> None:
    """Keeps out: "had" and "abig box" for "had a big box"; through the decoder, with and without a stream."""
    decode = pieces_decoder.tokenizer.decode
    words = range(257, pieces_decoder.model.config.vocab_size)
    rng = random.Random(4)
    for seed in range(12):
        prompt = [rng.choice(words) for _ in range(1 + seed)]
        sampling = SamplingParams(max_tokens=30, temperature=1.5, seed=seed)
        (answer,) = pieces_decoder.generate(prompt, sampling)
        assert "".join(chunk.text for chunk in pieces_decoder.stream(prompt, sampling)) == answer.text
        if is_streamable(decode, prompt, answer.token_ids):
            assert decode(prompt) + answer.text == decode(prompt + answer.token_ids)


def test_without_a_tokenizer_there_is_no_text(zoo: Zoo) -> None:
    """Keeps out: an error, or text made up, where the target's folder holds no tokenizer."""
    decoder = zoo.decoder("llama")
    assert not decoder.tokenizer.is_present
    (answer,) = decoder.generate([1, 2, 3], SamplingParams(max_tokens=5))
    assert answer.text == "" and len(answer.token_ids) == 5
    chunks = list(decoder.stream([1, 2, 3], SamplingParams(max_tokens=5)))
    assert {chunk.text for chunk in chunks} == {""} and sum(len(chunk.token_ids) for chunk in chunks) == 5


def test_a_tokenizer_that_fails_fails_with_the_first_token() -> None:
    """Keeps out: a decoder that raises when a request is made, before anything can say which one."""

    def decode(ids: Sequence[int]) -> str:
        raise RuntimeError("no text today")

    trimmer = Trimmer(SamplingParams(max_tokens=2), frozenset(), decode, [1, 2], streaming=True)
    with pytest.raises(RuntimeError, match="no text today"):
        trimmer.take([3])
