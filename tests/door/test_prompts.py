"""Prompts as users hand them in: arrays, tuples, chats and files; and tokenizers as they find them, broken ones too."""

import json
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toolkit.checkpoints.tokenizers import byte_tokenizer
from toolkit.models import Zoo

from specdec import SamplingParams, SpecDecoder
from specdec.bench.encode import encode_prompts, prompt_facts
from specdec.bench.prompt_file import KEYS, TEXT_KEYS, read_prompts
from specdec.bench.run import BenchOptions
from specdec.checks import PromptTooLong
from specdec.config import SpecConfig
from specdec.options import EngineOptions
from specdec.prompts.encode import check_length, encode_prompt
from specdec.prompts.tokenizer import Tokenizer
from specdec.shipped import target_folder

SHORT = SamplingParams(max_tokens=4)
TEMPLATE = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '\n' }}{% endfor %}{{ 'assistant:' }}"
CHAT = [{"role": "user", "content": "hi\u2028there"}]


@pytest.fixture(scope="module")
def decoder(zoo: Zoo) -> SpecDecoder:
    return zoo.decoder("llama", max_seq_len=64)


def save_tokenizer(folder: Path, template: Any = TEMPLATE) -> Path:
    tokenizer = byte_tokenizer(384)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


ONE: list[Any] = [
    np.array([3, 5, 7]), np.array([3, 5, 7], dtype=np.uint8), torch.tensor([3, 5, 7]), (3, 5, 7), [np.int64(3), np.int32(5), 7],
    torch.tensor([3, 5, 7], dtype=torch.int32),
]  # fmt: skip
SEVERAL: list[Any] = [
    np.array([[3, 5], [7, 9]]), torch.tensor([[3, 5], [7, 9]]), ((3, 5), (7, 9)), [np.array([3, 5]), torch.tensor([7, 9])],
    (np.array([3, 5]), [np.int64(7), 9]),
]  # fmt: skip


def test_a_prompt_is_copied() -> None:
    """Keeps out: a request whose prompt changes with the caller's list, and ids of a kind of int that stay of that kind."""
    tokenizer, given = Tokenizer(Path("/nonexistent")), [3, 5, 7]
    ids = encode_prompt(given, "prompt", tokenizer, 384)
    given[0] = 9
    assert ids == [3, 5, 7]
    kind = IntEnum("Token", {"A": 3, "B": 5})
    for mixed in ([kind.A, kind.B, 7], (3, np.int64(5), 7)):
        ids = encode_prompt(mixed, "prompt", tokenizer, 384)
        assert ids == [3, 5, 7] and {type(token) for token in ids} == {int}


def test_ids_of_numpy_and_torch_are_ids(decoder: SpecDecoder) -> None:
    """Keeps out: an array refused, or a row of it read as several prompts; and ids kept that are no ints of Python."""
    (want,) = decoder.generate([3, 5, 7], SHORT)
    for prompt in ONE:
        (got,) = decoder.generate(prompt, SHORT)
        assert got == want and {type(token) for token in got.prompt_token_ids} == {int}
        assert [token for chunk in decoder.stream(prompt, SHORT) for token in chunk.token_ids] == want.token_ids
    both = decoder.generate([[3, 5], [7, 9]], SHORT)
    for prompts in SEVERAL:
        assert decoder.generate(prompts, SHORT) == both


ARRAY_ERRORS: list[tuple[Any, type[Exception], str]] = [
    (np.array([1.0, 2.0]), TypeError, r"prompt must be a string, a list of token ids.* got \[1.0, 2.0\]"),
    (np.array([True, False]), TypeError, r"prompt must be .* got \[True, False\]"),
    (torch.tensor([[1, 2], [3, 4]]).float(), TypeError, r"prompts\[0\] must be .* got \[1.0, 2.0\]"),
    (np.zeros((2, 2, 2), dtype=int), TypeError, r"prompts must be .* got ndarray of shape \(2, 2, 2\)"),
    (torch.tensor(5), TypeError, "prompts must be .* got Tensor"),
    (np.int64(5), TypeError, "prompts must be .* got int64"),
    (np.zeros((0, 3), dtype=int), ValueError, "prompts is empty"),
    (np.zeros((2, 0), dtype=int), ValueError, r"prompts\[0\] is empty"),
    (np.array([], dtype=int), ValueError, "prompt is empty"),
    (np.array(["a", "b"]), TypeError, "prompt must be a string"),
    (np.array([1, 40]), ValueError, "prompt holds the token id 40"),
    ([1, np.bool_(True)], TypeError, r"prompt\w*\[1\] must be an int, got np.True_"),
    ({1, 2}, TypeError, "prompts must be .* got set"),
]


@pytest.mark.parametrize(("prompts", "error", "match"), ARRAY_ERRORS, ids=lambda value: str(value)[:30])
def test_arrays_that_are_no_prompts(decoder: SpecDecoder, prompts: Any, error: type[Exception], match: str) -> None:
    """Keeps out: floats rounded to ids, and errors that don't say what came."""
    with pytest.raises(error, match=match):
        decoder.generate(prompts, SHORT)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize(
    ("held", "match"),
    [
        (b"[]", "must hold a JSON object, got list"),
        (b'"x"', "must hold a JSON object, got str"),
        (b"{", "is not JSON: Expecting property name"),
        (b"\xff\xfe{}", "is not UTF-8 text: .* can't decode byte 0xff"),
    ],
)
def test_a_broken_tokenizer_file_is_named(tmp_path: Path, name: str, held: bytes, match: str) -> None:
    """Keeps out: `'list' object has no attribute 'get'` as all that a user is told."""
    save_tokenizer(tmp_path)
    (tmp_path / name).write_bytes(held)
    with pytest.raises(ValueError, match=f"{name} {match}"):
        Tokenizer(tmp_path)


def test_a_tokenizer_that_says_nothing_is_named(tmp_path: Path) -> None:
    """Keeps out: a bare KeyError where the files are JSON, but no tokenizer."""
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"can't read the tokenizer in .* \(tokenizer.json, tokenizer_config.json.*: KeyError"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{% for m in messages %}\n{% endif %}", "the chat template of .* is broken: line 2: Encountered unknown tag 'endif'"),
        ("{{ raise_exception('roles must alternate') }}", "the chat template of .* refuses prompt: roles must alternate"),
        ("{{ messages[0].name.first }}", "the chat template of .* fails on prompt: UndefinedError: .* no attribute 'name'"),
        ("{{ 1 // 0 }}", "the chat template of .* fails on prompt: ZeroDivisionError"),
        ("{{ '' }}", "the chat template of .* writes nothing for prompt"),
        (None, "prompt holds chat messages, but the tokenizer in .* has no chat template: neither chat_template.jinja nor"),
    ],
)
def test_a_chat_template_that_fails_says_so(tmp_path: Path, template: str | None, match: str) -> None:
    """Keeps out: a traceback from inside Jinja, a missing file of which nothing says what it was for."""
    tokenizer = Tokenizer(save_tokenizer(tmp_path, template))
    with pytest.raises(ValueError, match="chat_template must be a file that can be read, got 'nowhere.jinja': No such file"):
        Tokenizer(tmp_path, template="nowhere.jinja")
    with pytest.raises(ValueError, match=match):
        encode_prompt(CHAT, "prompt", tokenizer, 384)


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_file_is_no_chat_template(tmp_path: Path, text: str) -> None:
    """Keeps out: a model that has no template all at once, because a file was cut to nothing."""
    file = tmp_path / "empty.jinja"
    file.write_text(text)
    with pytest.raises(ValueError, match="chat_template must be a file with a template, got .*empty.jinja', which is empty"):
        Tokenizer(save_tokenizer(tmp_path, "{{ '' }}"), file)


@pytest.mark.parametrize("template", ["/nope/chat.jinja", "/", "a\0b"])
def test_a_chat_template_that_can_not_be_read_is_named(tmp_path: Path, template: str) -> None:
    """Keeps out: an error of the system that does not say which setting is wrong."""
    with pytest.raises(ValueError, match="chat_template must be a file that can be read, got .*; nearest setting that works: "):
        Tokenizer(save_tokenizer(tmp_path, "{{ '' }}"), template)


CHAT_ERRORS: list[tuple[Any, type[Exception], str]] = [
    ([{"role": 5, "content": "a"}], TypeError, r"p\[0\]\['role'\] must be a string such as 'user', got 5"),
    ([*CHAT, {"role": "", "content": "a"}], TypeError, r"p\[1\]\['role'\] must be a string"),
    ([{"role": "user", "content": 5}], TypeError, r"p\[0\]\['content'\] must be a string, got 5 of type int"),
    ([{"role": "user", "content": None}], TypeError, r"p\[0\]\['content'\] must be a string, got None"),
    ([{"role": "user", "content": [{"type": "text", "text": "a"}]}], TypeError, r"\['content'\] must be a string, got .* list"),
    ([*CHAT, "a"], TypeError, r"p\[1\] must be a chat message, got 'a'"),
    ([{"role": "user"}], TypeError, r"p\[0\] lacks 'content'"),
    ([{"role": "user", "content": "a\ud800"}], ValueError, r"p\[0\]\['content'\] is no text that UTF-8 can hold: .*surrogates"),
    ("a\ud800", ValueError, "p is no text that UTF-8 can hold: .*surrogates not allowed"),
]


@pytest.mark.parametrize(("prompt", "error", "match"), CHAT_ERRORS, ids=str)
def test_chats_and_texts_that_are_none(tmp_path: Path, prompt: Any, error: type[Exception], match: str) -> None:
    """Keeps out: contents that a template prints as Python writes them, and errors from inside it."""
    with pytest.raises(error, match=match):
        encode_prompt(prompt, "p", Tokenizer(save_tokenizer(tmp_path)), 384)


def test_a_chat_is_what_its_template_writes(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save_tokenizer(tmp_path))
    for chat in (CHAT, tuple(CHAT)):
        assert tokenizer.decode(encode_prompt(chat, "p", tokenizer, 384)) == "user:hi\u2028there\nassistant:"
    template = "{% for m in messages %}{{ m.content or m.tool_calls[0] }}{% endfor %}"
    tokenizer = Tokenizer(save_tokenizer(tmp_path, template))
    calls = [{"role": "assistant", "content": None, "tool_calls": ["look"]}]
    assert tokenizer.decode(encode_prompt(calls, "p", tokenizer, 384)) == "look"


# ---- files ----


def write(path: Path, *records: Any, begin: bytes = b"", end: bytes = b"\n") -> Path:
    path.write_bytes(begin + b"".join(json.dumps(record, ensure_ascii=False).encode() + end for record in records))
    return path


@pytest.mark.parametrize("begin", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_marks_and_line_separators_are_no_faults(tmp_path: Path, begin: bytes, end: bytes) -> None:
    """Keeps out: a byte order mark called no JSON, and a line that is cut at U+2028, U+0085 or a form feed."""
    texts = ["one\u2028two", "three\x85four", "five\x0csix\u2029"]
    file = write(tmp_path / "p.jsonl", *({"prompt": text} for text in texts), begin=begin, end=end)
    assert read_prompts(file) == texts
    (tmp_path / "p.txt").write_bytes(begin + end.join(text.encode() for text in texts) + end)
    assert read_prompts(tmp_path / "p.txt") == texts


READS: list[tuple[dict[str, Any], Any]] = [
    ({"token_ids": [1, 2], "prompt": "a"}, [1, 2]),
    *(({key: "a", "turns": ["b"], "messages": CHAT, "other": 1}, "a") for key in TEXT_KEYS),
    ({"turns": ["b", "c"], "messages": CHAT}, "b"),
    ({"messages": CHAT}, CHAT),
]


def test_every_key_is_read(tmp_path: Path) -> None:
    """Keeps out: a key that the docstring names and the code doesn't know; `messages` was one that users tried."""
    import specdec.bench.prompt_file as module

    assert read_prompts(write(tmp_path / "p.jsonl", *(record for record, _ in READS))) == [want for _, want in READS]
    assert all(key in (module.__doc__ or "") for key in KEYS)


FILE_ERRORS: list[tuple[bytes, str]] = [
    (b'{"prompt": "a"}\n{"prompt": "\xff"}\n', r"p.jsonl:2 is not UTF-8 text: .*0xff"),
    (b'\xff\xfe{\x00}\x00\n', r"p.jsonl:1 is not UTF-8 text"),
    (b'{"messages": []}', r"p.jsonl:1: messages must be a list of chat messages that is not empty, got \[\]"),
    (b'{"messages": "a"}', r"p.jsonl:1: messages must be a list of chat messages .* got 'a'"),
    (b'{"messages": [{"role": "user"}]}', r"p.jsonl:1: messages\[0\] lacks 'content'"),
    (b'{"messages": [{"role": "user", "content": 1}]}', r"p.jsonl:1: messages\[0\]\['content'\] must be a string, got 1"),
    (b'{"promt": "a"}', "token_ids, prompt, text, question, task, turns, messages; got promt"),
    (b"[" * 200_000, "p.jsonl:1 is not JSON"),
]  # fmt: skip


@pytest.mark.parametrize(("held", "match"), FILE_ERRORS, ids=lambda value: str(value)[:40])
def test_a_broken_line_is_named(tmp_path: Path, held: bytes, match: str) -> None:
    """Keeps out: errors that name neither the file nor the line."""
    (tmp_path / "p.jsonl").write_bytes(held)
    with pytest.raises(ValueError, match=match):
        read_prompts(tmp_path / "p.jsonl")


def options(target: Path, prompts: list[Any], chat: bool) -> BenchOptions:
    return BenchOptions(
        target=target, draft="d", prompts=prompts, prompts_source="p.jsonl", specs=(SpecConfig(),), batch_sizes=(1,),
        sampling=SHORT, chat=chat,
    )  # fmt: skip


def test_a_text_that_is_too_long_is_told_once(capfd: pytest.CaptureFixture[str]) -> None:
    """Keeps out: a second line on stderr, in which transformers speaks of indexing errors."""
    tokenizer, sampling = Tokenizer(target_folder()), SamplingParams(max_tokens=4)
    ids = tokenizer.encode("the cat " * 300)
    said = "nearest thing that works: a shorter prompt: the target reads 512 tokens"
    with pytest.raises(PromptTooLong, match=said):
        check_length(ids, sampling, "prompt", 512, 512)
    with pytest.raises(PromptTooLong, match=r"a shorter prompt, or max_seq_len=\d+$"):
        check_length(ids, sampling, "prompt", 64, 1024)
    with pytest.raises(PromptTooLong, match=r"a shorter prompt, or max_seq_len=12 with max_tokens=2$"):
        check_length(ids[:10], sampling, "prompt", 8, 12)
    assert "Token indices" not in "".join(capfd.readouterr())


def encoded_by(given: BenchOptions, tokenizer: Tokenizer) -> list[list[int]]:
    """The ids that the benchmark asks for."""
    return encode_prompts(
        given.taken, given.prompts_source, given.target, tokenizer, given.effective_sampling, EngineOptions(), chat=given.chat
    )


@pytest.mark.parametrize("chat", [False, True])
def test_the_bench_asks_chats_through_their_template(zoo: Zoo, tmp_path: Path, chat: bool) -> None:
    """Keeps out: messages measured as another text without --chat, or wrapped a second time with it."""
    folder = save_tokenizer(tmp_path)
    (folder / "config.json").write_bytes((zoo.target("bytes") / "config.json").read_bytes())
    tokenizer = Tokenizer(folder)
    chats, text = options(folder, [CHAT, "yo"], chat), "user:yo\nassistant:" if chat else "yo"
    encoded = encoded_by(chats, tokenizer)
    assert [tokenizer.decode(ids) for ids in encoded] == ["user:hi\u2028there\nassistant:", text]
    assert prompt_facts(encoded, chats.prompts, "p.jsonl", chat=chat)["chat_template"] is True
    ids = options(folder, [[1, 2]], chat)
    if chat:
        with pytest.raises(ValueError, match="prompt 1 of p.jsonl holds token ids, to which no chat template"):
            encoded_by(ids, tokenizer)
    else:
        assert (
            encoded_by(ids, tokenizer) == [[1, 2]]
            and prompt_facts([[1, 2]], ids.prompts, "p.jsonl", chat=chat)["chat_template"] is False
        )


@pytest.mark.parametrize(
    ("ids", "sampling", "error", "match"),
    [
        ([10**6], SHORT, ValueError, r"prompt holds the token id 1000000; expected ids in \[0, "),
        ([-1], SHORT, ValueError, "prompt holds the token id -1"),
        ([], SHORT, ValueError, "prompt is empty: expected at least one token"),
        ([1.5], SHORT, TypeError, "prompt"),
        ([True], SHORT, TypeError, "prompt"),
        ("A dog", SHORT, TypeError, "prompt"),
        ([1, 2], 5, TypeError, "sampling must be a SamplingParams, got 5 of type int"),
    ],
    ids=str,
)
def test_a_request_s_ids_are_checked(decoder: SpecDecoder, ids: Any, sampling: Any, error: type[Exception], match: str) -> None:
    """Keeps out: ids that go past `encode`, fail inside the engine, and take the requests beside them along."""
    with pytest.raises(error, match=match):
        decoder.new_request(ids, sampling)


@pytest.mark.parametrize("requests", [[5], 5, [[1, 2]]], ids=str)
def test_what_runs_is_a_request(decoder: SpecDecoder, requests: Any) -> None:
    """Keeps out: an error that names an attribute of the engine."""
    with pytest.raises(TypeError, match="requests must be a list|request must come from new_request"):
        decoder.run(requests)
