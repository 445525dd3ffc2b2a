"""What `specdec generate` shows on a terminal, by the bytes that a pseudo-terminal gets."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import random
import re
import struct
import subprocess
import sys
import termios
import threading
import tty
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest
from toolkit.checkpoints import tokenizers
from toolkit.driver import Driver, new_request
from toolkit.models import save_eagle3, save_target
from toolkit.oracles.encoder_decoders import save_encoder_decoder, save_head

from specdec import SamplingParams, SpecConfig, SpecDecoder, cli, shipped
from specdec.cli.terminal.screen import CONTROLS, DRAFTED, OWN, PROMPT, SEVERAL, SOURCES, Screen, harmless
from specdec.generation import Emitted, Generation
from specdec.trace.pieces import TokenPieces

PAINTED = re.compile(r"\x1b\[(\d+)m(.*?)\x1b\[0m", re.S)
LEGEND = "\x1b[2mcolours:\x1b[0m \x1b[32maccepted drafts\x1b[0m, \x1b[35mthe target's own\x1b[0m\n"
Run = Callable[..., "Shown"]


class Shown(NamedTuple):
    """What a command wrote: its exit code, and what its stdout and its stderr got."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """stdout without colours."""
        return PAINTED.sub(r"\2", self.out)

    def painted(self, colour: str) -> str:
        """What has that colour."""
        return "".join(text for found, text in PAINTED.findall(self.out) if found == colour)


class Terminal:
    """A pseudo-terminal whose bytes a thread reads; `stream` is what a program has as its stdout."""

    def __init__(self, columns: int, encoding: str = "utf-8") -> None:
        self._master, slave = pty.openpty()
        tty.setraw(slave)  # so that it adds no byte of its own
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self.stream, self._got = os.fdopen(slave, "w", encoding=encoding), b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        try:
            while got := os.read(self._master, 1 << 16):
                self._got += got
        except OSError:  # Linux' way to say that nobody writes any more
            pass

    def close(self) -> str:
        self.stream.close()
        self._reader.join()
        os.close(self._master)
        return self._got.decode()


@pytest.fixture(scope="module")
def pair() -> Iterator[SpecDecoder]:
    with SpecDecoder.from_pretrained(shipped.target_folder(), shipped.draft_folder(), device="cpu", smoke=False) as decoder:
        yield decoder


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpecDecoder]:
    """A random pair of bytes, so that characters span tokens, with a chat template."""
    folder = tmp_path_factory.mktemp("chatty")
    target = save_target(folder / "target", "bytes")
    file = target / "tokenizer_config.json"
    template = "{% for m in messages %}{{ m['content'] }}|{% endfor %}"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    options = {"device": "cpu", "dtype": "float32", "max_seq_len": 160, "smoke": False, "beyond_trained": "window"}
    with SpecDecoder.from_pretrained(target, save_eagle3(folder / "head", target), SpecConfig(2, 2, 4), **options) as decoder:
        yield decoder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    def run(decoder: SpecDecoder, *argv: str, columns: int = 80, encoding: str = "utf-8", **environment: str) -> Shown:
        """`specdec generate` with both streams on terminals; a decoder that is loaded serves."""
        screens = Terminal(columns, encoding), Terminal(columns)
        with monkeypatch.context() as patched:
            patched.setattr(SpecDecoder, "from_pretrained", lambda *_given, **_options: decoder)
            for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
                patched.delenv(name, raising=False)
            for name, value in {"TERM": "xterm-256color", **environment}.items():
                patched.setenv(name, value)
            with redirect_stdout(screens[0].stream), redirect_stderr(screens[1].stream):
                code = cli.main(["generate", "--target", str(shipped.target_folder()), "--device", "cpu", *argv])
        return Shown(code, *(screen.close() for screen in screens))

    return run


def last_line(out: Generation) -> str:
    """The line of numbers up to the speed."""
    passes = out.stats.rounds + 1
    return f"{len(out.token_ids)} tokens in {passes} passes of the target, {len(out.token_ids) / passes:.1f} tokens a pass, "


# ---- which text is whose ----

CASES = {
    "bytes": lambda: tokenizers.byte_tokenizer(384),
    "sentencepiece": tokenizers.sentencepiece_tokenizer,
    "metaspace": tokenizers.metaspace_tokenizer,
}


@pytest.mark.parametrize("name", CASES)
def test_a_piece_is_the_text_of_its_token(name: str) -> None:
    """Against the definition: a character is the token's with which it becomes certain, that is, stays when more tokens come.

    Keeps out: pieces that are shifted by a space, by a character of several tokens, or by what a stop string holds back.
    """
    chance, tokenizer, checked = random.Random(name), CASES[name](), 0

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    singles = [[token] for token in range(len(tokenizer)) if not tokenizer.convert_ids_to_tokens(token).startswith("<0x")]
    units = singles + [tokenizer.encode(character) for character in tokenizers.CHARACTERS * 9]
    for _ in range(40):
        prompt, ids = ([token for unit in chance.choices(units, k=k) for token in unit] for k in (3, 12))
        stop = chance.choice([None, "a", "xy", "ing b", "日!"])
        params = SamplingParams(max_tokens=len(ids) - chance.randrange(4), stop=stop)
        request = new_request(prompt, params, decode=decode, streaming=True)
        pieces, shown = TokenPieces(decode, prompt), list[tuple[str, int]]()
        request.take_first(Emitted([ids[0]]))
        while not request.is_done:
            taken = len(request.output.token_ids)
            request.take_round(Emitted(ids[taken : taken + chance.randrange(1, 5)]), 4, 4)
            if chance.random() < 0.6:
                shown += pieces.of(request.next_chunk())
        shown += pieces.of(request.next_chunk())
        out = request.result()
        assert "".join(text for text, _ in shown) == out.text
        before, owners = decode(prompt), list[int]()
        for number in range(1, len(out.token_ids) + 1):
            certain = decode(prompt + out.token_ids[:number]).rstrip("\ufffd")
            owners += [out.origins[number - 1]] * (len(certain) - len(before) - len(owners))
        owners += [out.origins[-1]] * (len(out.text) - len(owners))
        if before.endswith("\ufffd") or not decode(prompt + out.token_ids).startswith(before + out.text):
            continue  # the text changes a character of the prompt, which is not the screen's to show
        checked += 1
        assert [origin for text, origin in shown for _ in text] == owners[: len(out.text)]
    assert checked > 20


# ---- what is shown ----


def test_the_prompt_and_the_text_in_two_colours(run: Run, pair: SpecDecoder) -> None:
    """Keeps out: a first output that begins with ", there was a little girl", colours that say nothing, bytes that depend on
    the width (a terminal breaks lines by itself, and copies them whole), and a line without passes."""
    (out,) = pair.generate("Once upon a time", SamplingParams(max_tokens=40))
    texts = {run(pair, "Once upon a time", "--max-tokens", "40", columns=columns).out for columns in (20, 80, 233)}
    shown = run(pair, "Once upon a time", "--max-tokens", "40")
    assert (
        texts == {shown.out} and shown.text == f"Once upon a time{out.text}\n" and shown.painted(PROMPT) == "Once upon a time"
    )
    tokens = [pair.tokenizer.decode([*out.prompt_token_ids, *out.token_ids[:n]]) for n in range(41)]
    words = [(len(after) - len(before), origin) for before, after, origin in zip(tokens, tokens[1:], out.origins)]
    assert sum(size for size, origin in words if origin) == len(shown.painted(DRAFTED)) > 0
    assert sum(size for size, origin in words if not origin) == len(shown.painted(OWN)) > 0
    assert shown.out.count("\x1b") == 2 * len(PAINTED.findall(shown.out)), "a colour is left on"
    legend, line = shown.err[: len(LEGEND)], shown.err[len(LEGEND) :]
    assert (shown.code, legend) == (0, LEGEND) and re.fullmatch(re.escape(last_line(out)) + r"[\d,.]+ tok/s\n", line), line


def test_each_of_several_sources_has_its_colour(run: Run) -> None:
    """Keeps out: matches of the text that look like the drafter's own, a colour that the legend lacks."""
    drafts = [str(shipped.draft_folder()), "suffix"]
    prompt = "Tom said no. Lily said no. Tom said no. Lily said"
    wanted = shipped.target_folder(), drafts, SpecConfig(3, 2, 8)
    with SpecDecoder.from_pretrained(*wanted, device="cpu", smoke=False) as joined:
        shown = run(joined, prompt, "--max-tokens", "24")
    with SpecDecoder.from_pretrained(*wanted, device="cpu", smoke=False) as joined:  # one that has learned nothing of sources
        (out,) = joined.generate(prompt, SamplingParams(max_tokens=24))
        tokens = [joined.tokenizer.decode([*out.prompt_token_ids, *out.token_ids[:n]]) for n in range(25)]
    assert len({*out.sources} - {""}) > 1, "one source wrote it all"
    for name, colour in SOURCES.items():
        of = {f"{a}+{b}" for a in SOURCES for b in SOURCES} if name == SEVERAL else {name}
        sizes = [len(after) - len(before) for before, after, who in zip(tokens, tokens[1:], out.sources) if who in of]
        assert sum(sizes) == len(shown.painted(colour)), name
    legend = shown.err.splitlines()[0]
    assert PAINTED.sub(r"\2", legend) == "colours: from drafter, from suffix, several sources, the target's own"
    assert {colour for colour, _ in PAINTED.findall(shown.out)} <= {colour for colour, _ in PAINTED.findall(legend)}


@pytest.mark.parametrize("setting", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_without_colours_the_rest_is_the_same(run: Run, pair: SpecDecoder, setting: dict[str, str]) -> None:
    """Keeps out: escape sequences for those who asked for none, and a legend of colours that are not there."""
    (out,) = pair.generate("The dog", SamplingParams(max_tokens=12))
    shown = run(pair, "The dog", "--max-tokens", "12", **setting)
    assert shown.out == f"The dog{out.text}\n" and shown.err.startswith(last_line(out))


def test_plain_decoding_says_so(run: Run) -> None:
    """Keeps out: a target without a drafter whose text looks as if specdec could do no better."""
    with SpecDecoder.from_pretrained(shipped.target_folder(), device="cpu") as plain:
        shown = run(plain, "The dog", "--max-tokens", "12", "--stats")
        assert shown.painted(DRAFTED) == shown.painted(OWN) == "" and shown.painted(PROMPT) == "The dog"
        line, *stats = shown.err.splitlines()
        assert re.fullmatch(r"12 tokens in 12 passes of the target, 1\.0 tokens a pass, [\d,.]+ tok/s \(plain decoding\)", line)
        assert "; plain decoding" in stats[0]
        line = run(plain, "The dog", "--max-tokens", "1").err
        start = r"1 token in 1 pass of the target, 1\.0 tokens a pass, "
        assert re.fullmatch(start + r"[\d,.]+ tok/s, first passes included \(plain decoding\)\n", line)


def test_each_of_several_texts_follows_the_prompt(run: Run, pair: SpecDecoder) -> None:
    """Keeps out: passes of several rows added up as if the target had run that often."""
    params = SamplingParams(max_tokens=16, temperature=0.9, seed=3, n=3, logprobs=0)
    texts = pair.generate("The sun", params)
    flags = ["--temperature", "0.9", "--seed", "3", "--n", "3", "--logprobs", "0"]
    shown = run(pair, "The sun", "--max-tokens", "16", *flags)
    assert shown.text == "\n----\n".join(f"The sun{out.text}" for out in texts) + "\n"
    *logprobs, line = shown.err.splitlines()
    tokens = sum(len(out.token_ids) for out in texts)
    assert re.fullmatch(rf"{tokens} tokens in 3 texts, [\d,.]+ tok/s, first passes included", line)
    assert len(logprobs) == 1 + tokens and logprobs[0] == LEGEND.rstrip()


def test_an_answer_has_a_line_of_its_own(run: Run, chatty: SpecDecoder) -> None:
    """Keeps out: an answer that goes on from the user's words, and characters that are shown before all their bytes came."""
    asked, whole = [{"role": "user", "content": "hé"}], list[str]()
    for seed in range(9):
        (out,) = chatty.generate(asked, SamplingParams(max_tokens=60, temperature=1.5, seed=seed))
        shown = run(chatty, "hé", "--chat", "--max-tokens", "60", "--temperature", "1.5", "--seed", str(seed))
        assert shown.text == f"hé\n{harmless(out.text)}\n"
        if seed == 0:  # a terminal of another time: no character that it lacks ends the text
            flags = ["--chat", "--max-tokens", "60", "--temperature", "1.5", "--seed", "0"]
            ascii_text = harmless(out.text).encode("ascii", "backslashreplace").decode()
            assert run(chatty, "hé", *flags, encoding="ascii").text == f"h\\xe9\n{ascii_text}\n"
        whole += [character for character in out.text if "\xa0" < character != "\ufffd"]
        if whole:
            break
    assert whole, "no text held a character of several tokens"


def test_a_text_that_an_encoder_read_is_not_gone_on_from(run: Run, tmp_path: Path) -> None:
    """Keeps out: a summary glued to its article."""
    target = save_encoder_decoder(tmp_path / "target", "bart", vocab_size=384)
    tokenizers.byte_tokenizer(384).save_pretrained(target)
    with SpecDecoder.from_pretrained(target, save_head(tmp_path / "head", target), device="cpu", dtype="float32") as decoder:
        (out,) = decoder.generate("aé", SamplingParams(max_tokens=20))
        shown = run(decoder, "aé", "--max-tokens", "20")
    assert out.prompt_token_ids == decoder.tokenizer.encode("aé")
    assert shown.text == f"aé\n{harmless(out.text)}\n" and shown.err.startswith(LEGEND + last_line(out))


def test_what_a_text_must_be_and_where_it_stops(run: Run, pair: SpecDecoder) -> None:
    """Keeps out: the beginning of a stop string that is shown and can't be taken back, and text after a complete one."""
    for flags, params in (
        (["--stop", "girl named Lily"], SamplingParams(max_tokens=40, stop="girl named Lily")),
        (["--regex", "[a-z ]{5,20}"], SamplingParams(max_tokens=40, regex="[a-z ]{5,20}")),
    ):
        (out,) = pair.generate("Once upon a time", params)
        assert len(out.text) < len(pair.tokenizer.decode(out.token_ids)) or out.finish_reason == "eos"
        assert run(pair, "Once upon a time", "--max-tokens", "40", *flags).text == f"Once upon a time{out.text}\n"


def test_a_long_prompt_is_shown_by_its_end(pair: SpecDecoder) -> None:
    """Keeps out: a document from stdin that fills the screen before the first word of the answer."""
    (out,), prompt = pair.generate("The cat", SamplingParams(max_tokens=2)), "The cat sat. " * 200
    for given, said in ((prompt, f"[600 characters] ...{prompt[-2000:]}"), (prompt[:2000], prompt[:2000])):
        terminal = Terminal(80)
        with redirect_stdout(terminal.stream):
            Screen(given, False, pair.tokenizer.decode, out.prompt_token_ids, True).whole(out)
        assert harmless(PAINTED.sub(r"\2", terminal.close())) == f"{said}\n{out.text}\n"


def test_nothing_that_a_model_writes_commands_the_terminal(run: Run, chatty: SpecDecoder) -> None:
    """Keeps out: a text that moves the cursor, changes the window's title or answers in the user's name."""
    (escape,) = chatty.tokenizer.encode("\x1b")
    (title,) = chatty.tokenizer.encode("]")
    flags = [
        "--max-tokens",
        "40",
        "--temperature",
        "1",
        "--seed",
        "2",
        "--logit-bias",
        f"{escape}=50",
        "--logit-bias",
        f"{title}=50",
    ]
    (plain,) = chatty.generate("a", SamplingParams(40, 1.0, seed=2, logit_bias={escape: 50.0, title: 50.0}))
    assert "\x1b]" in plain.text
    shown = run(chatty, "\x1b[2J\x9b31m\r\x07\x7f\tup\n", *flags)
    assert shown.painted(PROMPT) == "\\x1b[2J\\x9b31m\\x0d\\x07\\x7f\tup\n"
    assert not CONTROLS.search(shown.text) and "\\x1b]" in shown.text
    every = "".join(map(chr, range(0x3000)))
    kept = [character for character in every if unicodedata.category(character) != "Cc" or character in "\n\t"]
    assert "".join(character for character in every if harmless(character) == character) == "".join(kept)


def test_an_error_has_a_line_of_its_own(run: Run, pair: SpecDecoder) -> None:
    """Keeps out: forty lines of stack, a message that goes on where the text broke off, and a colour that stays."""
    with Driver(pair).fail_in("verify", RuntimeError("the logits of\nposition 3 are not finite"), call=2):
        shown = run(pair, "Once upon a time", "--max-tokens", "40")
    assert shown.code == 2 and shown.text.startswith("Once upon a time, there was") and shown.out.endswith("\x1b[0m\n")
    assert shown.err == f"{LEGEND}specdec: error: the request failed while it ran: the logits of position 3 are not finite\n"


def test_a_program_gets_the_text_alone(
    pair: SpecDecoder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keeps out: a prompt, colours or a line on stderr in what a program reads, FORCE_COLOR or not."""
    monkeypatch.setattr(SpecDecoder, "from_pretrained", lambda *_given, **_options: pair)
    monkeypatch.setenv("FORCE_COLOR", "1")
    (out,) = pair.generate("The dog", SamplingParams(max_tokens=12))
    assert cli.main(["generate", "The dog", "--max-tokens", "12"]) == 0
    assert capsys.readouterr() == (f"{out.text}\n", "")


def test_the_whole_command(tmp_path: Path) -> None:
    """Keeps out: what holds only for a stream that a test has put in the place of stdout; a line on the screen where stderr
    goes elsewhere."""
    argv = [sys.executable, "-P", "-m", "specdec.cli", "generate", "The dog", "--max-tokens", "8", "--device", "cpu"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TERM": "xterm"}
    screen = Terminal(60)
    done = subprocess.run(argv, cwd=tmp_path, env=env, stdout=screen.stream, stderr=subprocess.PIPE, text=True, check=True)
    out = screen.close()
    assert PAINTED.sub(r"\2", out).startswith("The dog was") and f"\x1b[{PROMPT}mThe dog\x1b[0m\x1b[{OWN}m" in out
    *waits, last = done.stderr.splitlines()  # on a busy machine the start says after 5 s what it waits for
    assert re.fullmatch(r"8 tokens in \d passes of the target, [\d.]+ tokens a pass, [\d,.]+ tok/s", last)
    assert all(re.fullmatch(r"specdec: generate: .* \(\d+ s\)", wait) for wait in waits)
