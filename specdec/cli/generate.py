"""`specdec generate`: writes texts to stdout, a single one while it is generated, and nothing else there.

A terminal gets more, which `terminal/screen.py` shows: the prompt, colours, and a line of numbers on stderr.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specdec.cli import flags
from specdec.cli.terminal.output import check_files, write_files
from specdec.config import SamplingParams
from specdec.generation import Generation, Stats
from specdec.startup import STARTUP

if TYPE_CHECKING:
    from specdec.cli.terminal.screen import Screen
    from specdec.decoder import SpecDecoder

HELP = "stream a text"
MAX_ROWS = 32  # texts that are generated at once


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    prompt = "the text to go on from, which only a terminal shows again; default: read from stdin"
    add("prompt", nargs="?", metavar="PROMPT", help=prompt)
    add("--spec", type=flags.tree_shape, action=flags.StoreOnce, metavar="S,k,nd", help=f"{flags.SPEC_HELP}; default: 5,4,16")
    add("--no-speculate", "--no-draft", action="store_true", help="plain autoregressive decoding")
    add("--max-tokens", type=int, default=128, metavar="N", help="the most tokens to generate; default: %(default)s")
    add("--chat", action="store_true", help="PROMPT is a user's message: apply the chat template")
    add("--n", type=int, default=1, metavar="N", help="texts, with a line ---- between them; default: %(default)s")
    add("--logprobs", type=int, metavar="N", help="print each token's log-probability to stderr, and those of the N likeliest")
    mode = "probabilities before the sampling options (raw, the default) or after them (processed)"
    add("--logprobs-mode", choices=("raw", "processed"), help=mode)
    add("--trace", type=flags.not_empty, metavar="FILE.html", help="draw what every round did; see specdec trace")
    add("--stats", action="store_true", help="print accept length, tok/s and the seconds of the start to stderr")
    flags.add_sampling_flags(parser)
    flags.add_grammar_flags(parser)
    flags.add_prediction_flag(parser)
    flags.add_engine_flags(parser, "generate")


def run(args: argparse.Namespace) -> int:
    sampling = flags.sampling_of(args)
    if sampling.n > 1 and sampling.temperature == 0:
        raise ValueError(
            f"--n {sampling.n} would print one text {sampling.n} times at --temperature 0 (greedy); give a temperature"
        )
    check_files({"--trace": args.trace})
    target, draft = _pair(args)
    options, prompt = flags.engine_of(args, max_batch_size=min(sampling.n, MAX_ROWS)), read_prompt(args.prompt)
    from specdec import SpecDecoder  # through the door: see `without_collections`
    from specdec.prompts.tokenizer import VOCABULARY_FILES

    decoder = SpecDecoder.from_pretrained(target, draft, args.spec, options=options)
    if not decoder.tokenizer.is_present:
        files = ", ".join(VOCABULARY_FILES)
        raise ValueError(
            f"{target} holds no tokenizer (none of {files}), and specdec generate is about text; nearest thing that works: "
            "specdec bench or verify with --prompts of token_ids"
        )
    asked = [{"role": "user", "content": prompt}] if args.chat else prompt
    screen = _screen(decoder, prompt, asked, sampling) if sys.stdout.isatty() else None
    start = time.perf_counter()
    write = _stream if sampling.n == 1 else _write_all
    generations = write(decoder, asked, sampling, screen, trees=args.trace is not None)
    seconds = time.perf_counter() - start
    for generation in generations:
        _show_logprobs(decoder, generation)
    if screen is not None:
        print(screen.last_line(generations, seconds), file=sys.stderr)
    if args.trace is not None:
        _save_trace(decoder, asked, sampling, generations, args.trace)
    if args.stats:
        from specdec.loading.about.drafters import drafter_line
        from specdec.loading.resolve import experts_line

        draft = f"\ndraft: {drafter_line(decoder.head, decoder.settings)}" if decoder.head is not None else ""
        shared = experts_line(decoder.model.config, decoder.settings)
        draft += f"\nexperts: {shared}" if shared else ""
        about = _about(decoder, generations, seconds)
        draft += "".join(f"\nauto chose for {reason}" for reason in decoder.reasons)
        print(f"{about}{draft}\nstart-up, first passes included: {STARTUP.report()}", file=sys.stderr)
    return 0


def _pair(args: argparse.Namespace) -> tuple[Any, Any]:
    """Target and draft; the draft is None for plain decoding, and then flags about it are errors."""
    if not args.no_speculate:
        return flags.pair_of(args, ["--spec"] if args.spec else [])
    if unused := [flag for flag, value in (("--draft", args.draft), ("--spec", args.spec)) if value]:
        raise ValueError(f"{' and '.join(unused)} would do nothing with --no-speculate (--no-draft); leave one of them out")
    from specdec import shipped

    return args.target or shipped.target_folder(), None


def read_prompt(argument: str | None) -> str:
    """The text that was given, or that stdin holds.  ValueError if there is none."""
    if argument is None and (sys.stdin is None or sys.stdin.isatty()):  # None: it was closed before the start
        raise ValueError("PROMPT is missing: give it as an argument, or on stdin")
    if argument is None:
        STARTUP.begin("waiting for the prompt on stdin")
    try:
        prompt = sys.stdin.read().rstrip("\n") if argument is None else argument
        prompt.encode()  # bytes that are no UTF-8 come as halves of surrogate pairs, or as an error, by the locale
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        unit = "byte" if isinstance(error, UnicodeDecodeError) else "character"
        raise ValueError(
            f"PROMPT is not UTF-8 text from {unit} {error.start} on; nearest thing that works: what iconv -f ENCODING -t UTF-8 "
            "makes of it"
        ) from None
    if argument is None:
        STARTUP.lap("prompt from stdin")  # whoever writes it may take minutes, which are no imports
        STARTUP.begin("importing")
    if not prompt:
        raise ValueError("PROMPT is empty: expected text")
    return prompt


def _screen(decoder: SpecDecoder, prompt: str, asked: Any, sampling: SamplingParams) -> Screen:
    """What shows the texts that follow the prompt on a terminal."""
    from specdec.cli.terminal.screen import Screen

    goes_on = isinstance(asked, str) and decoder.model.config.encoder is None
    request = decoder.new_request(decoder.encode(asked), sampling.of_choice(0))
    is_plain = decoder.head is None
    sources = [name for name in request.source_names if name != "prediction" or request.prediction_ids]
    return Screen(prompt, goes_on, decoder.tokenizer.decode, request.prompt_ids, is_plain, sources)


def _stream(
    decoder: SpecDecoder, prompt: Any, sampling: SamplingParams, screen: Screen | None, *, trees: bool
) -> list[Generation]:
    """Writes the one text to stdout as it comes."""
    stream = decoder.stream(prompt, sampling, trees=trees)
    if screen is not None:
        return [screen.stream(stream)]
    while True:
        try:
            print(next(stream).text, end="", flush=True)
        except StopIteration as end:  # a finished stream hands over its Generation
            print(flush=True)
            return [end.value]


def _write_all(
    decoder: SpecDecoder, prompt: Any, sampling: SamplingParams, screen: Screen | None, *, trees: bool
) -> list[Generation]:
    """Writes the texts of all generations to stdout, once they are finished."""
    generations = decoder.generate(prompt, sampling, trees=trees)
    for number, generation in enumerate(generations):
        if number:
            print("----")
        if screen is None:
            print(generation.text)
        else:
            screen.whole(generation)
    sys.stdout.flush()
    return generations


def _save_trace(decoder: SpecDecoder, prompt: Any, sampling: SamplingParams, done: Sequence[Generation], name: str) -> None:
    """Writes what the texts' rounds did, without times: nothing runs twice here."""
    from specdec.trace.record import trace_of

    made = trace_of(decoder, [prompt] * len(done), [sampling.of_choice(number) for number in range(len(done))], done)
    write_files({name: made.save_html})


def _show_logprobs(decoder: SpecDecoder, generation: Generation) -> None:
    """A line a token on stderr: its text and log-probability, and then those of the likeliest tokens."""
    for each in generation.logprobs or ():
        likeliest = "".join(f"  {decoder.tokenizer.piece(token)!r} {logprob:.4f}" for token, logprob in each.top.items())
        print(f"{decoder.tokenizer.piece(each.token)!r:<16} {each.logprob:9.4f} {likeliest}", file=sys.stderr)


def _about(decoder: SpecDecoder, generations: Sequence[Generation], seconds: float) -> str:
    """A line about what was generated."""
    stats, tokens = Stats.total([each.stats for each in generations]), sum(len(each.token_ids) for each in generations)
    line = f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tok/s (prefill included, nothing warmed up)"
    if decoder.settings.options.prefix_caching:
        line += f", {stats.cached_tokens} of {sum(len(each.prompt_token_ids) for each in generations)} prompt tokens cached"
    if decoder.settings.target_backend != "native":
        line += f", target by {decoder.settings.target_backend}"
    if decoder.head is None:
        return line + "; plain decoding"
    if not stats.rounds:
        return line + "; no round ran"
    return f"{line}; accept length {stats.accept_length:.2f} over {stats.rounds} rounds"
