"""What a terminal shows of a text: its prompt, each piece in the colour of its origin, and a line of numbers at the end.

The terminal breaks long lines by itself.  rich only says whether there are colours: it would turn tabs into spaces without
knowing in which column a piece begins.  This module knows no decoder, and nothing here runs where stdout is no terminal.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Generator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import cast

from specdec.engine.detokenize import Decode
from specdec.generation import Chunk, Generation
from specdec.trace.pieces import TokenPieces

MAX_SHOWN_PROMPT = 2000  # characters of a prompt that are shown
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but the tab and the end of a line
DRAFTED, OWN, PROMPT = "32", "35", "2"  # green, magenta, dim: as parameters of the sequence that selects them
SEVERAL = "several"  # sources of one token
SOURCES = {"drafter": DRAFTED, "suffix": "33", "prediction": "36", "corpus": "34", "answers": "96", SEVERAL: "92"}


class Screen:
    """One or more texts after the same prompt, on a terminal.

    prompt: as the user gave it.  goes_on: whether the text follows it on its line, as an answer does not.
    decode, prompt_ids: see TokenPieces.  is_plain: whether there is no drafter, so that there is nothing to tell apart.
    sources: the names of those that draft; each of several has a colour of its own.
    """

    def __init__(
        self,
        prompt: str,
        goes_on: bool,
        decode: Decode,
        prompt_ids: Sequence[int],
        is_plain: bool,
        sources: Sequence[str] = (),
    ) -> None:
        self._prompt, self._goes_on, self._is_plain = prompt, goes_on, is_plain
        self._sources = sources if len(sources) > 1 else ()
        self._decode, self._prompt_ids = decode, prompt_ids
        self._has_colours = has_colours()
        self._pieces: TokenPieces | None = None
        self._clock: list[tuple[float, int]] = []  # when chunks of rounds came, and with how many tokens altogether
        self._tokens = 0

    def stream(self, chunks: Generator[Chunk, None, Generation]) -> Generation:
        """Shows a text as it comes, after its prompt, and ends the line, also where an error or Ctrl-C ends the text."""
        self._begin()
        try:
            while True:
                self._show(next(chunks))
        except StopIteration as end:  # a finished stream hands over its Generation
            return cast(Generation, end.value)
        finally:
            self._write("\n")

    def whole(self, generation: Generation) -> None:
        """Shows a finished text after its prompt, and ends the line."""
        self._begin()
        self._paint(Chunk(generation.text, generation.token_ids, generation.origins, None, generation.sources))
        self._write("\n")

    def last_line(self, generations: Sequence[Generation], seconds: float) -> str:
        """What was written, in how many passes of the target, and how fast.

        A text's passes are the one that ended its prompt, and its rounds.  Tokens a second are those after the first round, in
        which kernels are loaded and graphs are captured.  Where none came later or nobody saw them come, they are those of the
        whole call, and the line says so.  seconds: of that call.
        """
        tokens = sum(len(each.token_ids) for each in generations)
        passes = sum(each.stats.prefill_tokens + each.stats.rounds for each in generations)
        speed = f"{_number(tokens / seconds)} tok/s, first passes included"
        if len(self._clock) > 1:
            (begin, before), (end, _) = self._clock[0], self._clock[-1]
            speed = f"{_number((self._tokens - before) / max(end - begin, 1e-9))} tok/s"
        done = f"{_counted(tokens, 'token', 'tokens')} in {_counted(passes, 'pass', 'passes')} of the target"
        each_pass = f"{tokens / passes:.1f} tokens a pass"
        if len(generations) > 1:  # which run together, so that the target's passes are fewer than those of all texts
            return f"{tokens:,} tokens in {len(generations)} texts, {speed}{' (plain decoding)' if self._is_plain else ''}"
        return f"{done}, {each_pass}, {speed}{' (plain decoding)' if self._is_plain else ''}"

    def _begin(self) -> None:
        """Shows the prompt of the next text, and before the first one what colours mean."""
        if self._pieces is None and self._has_colours and not self._is_plain and sys.stderr.isatty():
            keys = {"accepted drafts": DRAFTED}
            if self._sources:
                keys = {f"from {name}": SOURCES[name] for name in self._sources} | {"several sources": SOURCES[SEVERAL]}
            listed = ", ".join(painted(name, colour) for name, colour in {**keys, "the target's own": OWN}.items())
            print(f"{painted('colours:', PROMPT)} {listed}", file=sys.stderr, flush=True)
        self._pieces = TokenPieces(self._decode, self._prompt_ids)
        left_out = len(self._prompt) - MAX_SHOWN_PROMPT
        shown = self._prompt if left_out <= 0 else f"[{left_out:,} characters] ...{self._prompt[-MAX_SHOWN_PROMPT:]}"
        self._write(shown, PROMPT)
        if not self._goes_on:
            self._write("\n")

    def _show(self, chunk: Chunk) -> None:
        self._tokens += len(chunk.token_ids)
        if self._tokens > 1:  # the first token comes from the prompt's own pass
            self._clock.append((time.perf_counter(), self._tokens))
        self._paint(chunk)

    def _paint(self, chunk: Chunk) -> None:
        assert self._pieces is not None
        pieces = self._pieces.of(chunk, list(map(self._colour, chunk.origins, chunk.sources or [""] * len(chunk.origins))))
        for colour, run in groupby(pieces, key=itemgetter(1)):
            self._write("".join(text for text, _ in run), colour)

    def _colour(self, origin: int, source: str) -> str:
        """The colour of a token: of who wrote it, or drafted it where there are several; none where nobody drafts."""
        if self._is_plain:
            return ""
        if not origin:
            return OWN
        return SOURCES.get(SEVERAL if "+" in source else source, DRAFTED) if self._sources else DRAFTED

    def _write(self, text: str, colour: str = "") -> None:
        """Writes text that can't command the terminal.  What its encoding lacks is written as an escape, too."""
        encoding = sys.stdout.encoding or "utf-8"
        text = harmless(text).encode(encoding, "backslashreplace").decode(encoding)
        print(painted(text, colour) if colour and self._has_colours else text, end="", flush=True)


def has_colours() -> bool:
    """Whether the terminal has colours and the user wants them: NO_COLOR and TERM=dumb say no."""
    from rich.console import Console  # not `console`, with which the wait for the first token would be over

    shown = Console()
    return shown.color_system is not None and not shown.no_color


def harmless(text: str) -> str:
    """The text with control characters as escapes, so that a model can't move the cursor or rename the window."""
    return CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def painted(text: str, colour: str) -> str:
    """The text in a colour, and nothing after it: whoever interrupts the program keeps their own."""
    return f"\x1b[{colour}m{text}\x1b[0m" if text else ""


def _counted(count: int, one: str, several: str) -> str:
    return f"{count:,} {one if count == 1 else several}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
