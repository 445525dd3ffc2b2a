"""The command line: flags, then a call into bench, doctor or the decoder.  Heavy imports happen inside the commands.

What a user got wrong is one line on stderr and exit code 2.  Exit code 1: `bench` found outputs that differ.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from specdec import __version__
from specdec.config import SamplingParams, SpecConfig

DEFAULT_SPECS = (SpecConfig(5, 4, 16), SpecConfig(5, 1, 6))
# Written out, since help must not wait for torch; a test holds them to the code.
DTYPES = ("auto", "float32", "bfloat16", "float16")
BACKENDS = ("auto", "torch", "triton", "fa2", "fa3", "fa4")
MODEL_BACKENDS = ("auto", "native", "transformers")
KV_DTYPES = ("auto", "fp8", "int8")


class Parser(argparse.ArgumentParser):
    """argparse, but a wrong flag is one line too."""

    def error(self, message: str) -> NoReturn:
        _complain(message + f"; see {self.prog} --help")
        raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    args = build_parser().parse_args(argv)
    show, warnings.showwarning = warnings.showwarning, _show_warning
    try:
        return args.run(args)
    except KeyboardInterrupt:
        print("specdec: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `specdec generate | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if os.environ.get("SPECDEC_DEBUG"):
            raise
        _complain(f"{error.strerror}: {error.filename}" if error.filename and error.strerror else str(error))
    except (ValueError, TypeError) as error:
        if os.environ.get("SPECDEC_DEBUG"):
            raise
        _complain(str(error))
    finally:
        warnings.showwarning = show
    return 2


def _complain(message: str, kind: str = "error") -> None:
    print(f"specdec: {kind}: " + " ".join(message.split()), file=sys.stderr)


def _show_warning(message: Warning | str, *_where: Any, **_line: Any) -> None:
    """As Python's own, but a line that says nothing of code."""
    _complain(str(message), "warning")


# ---- flags ----


def build_parser() -> Parser:
    parser = Parser(
        prog="specdec",
        description="Speculative decoding with EAGLE heads.",
        epilog="SPECDEC_DEBUG=1 in the environment shows the traceback of an error.",
    )
    parser.add_argument("--version", action="version", version=f"specdec {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    bench = commands.add_parser("bench", help="measure a pair against its own autoregressive decoding")
    _bench_flags(bench)
    bench.set_defaults(run=_bench)
    generate = commands.add_parser("generate", help="stream a text")
    _generate_flags(generate)
    generate.set_defaults(run=_generate)
    doctor = commands.add_parser("doctor", help="what this machine is, and what can run on it")
    doctor.add_argument("--table", action="store_true", help="print what each attention backend can do, on any machine")
    doctor.set_defaults(run=_doctor)
    return parser


def _bench_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    shapes = " and ".join(f"{s.num_steps},{s.topk},{s.num_draft_tokens}" for s in DEFAULT_SPECS)
    add("--prompts", metavar="FILE", help="text, one a line, or .jsonl (token_ids, prompt, text, question, task, turns)")
    add("--num-prompts", type=int, metavar="N", help="the file's first N; default: 8, or as many as the largest batch")
    add("--spec", type=_spec, action="append", metavar="S,k,nd", help=f"tree shape, repeatable (S: or auto); default: {shapes}")
    add("--batch-sizes", type=_ints, default=(1, 8), metavar="N,N", help="default: 1,8")
    add("--max-tokens", type=int, default=64, metavar="N", help="output tokens of a prompt; default: %(default)s")
    add("--repeats", type=int, default=3, metavar="N", help="timed passes a side; default: %(default)s")
    add("--chat", action="store_true", help="apply the target's chat template to the prompts")
    add("--threads", type=int, metavar="N", help="CPU threads of both sides; default: 1 for the shipped pair, else torch's own")
    add("--profile", action="store_true", help="print where each millisecond of a round goes, beside the byte limit")
    forced = "force acceptance, one probability a level, for capacity planning; the numbers are marked SYNTHETIC"
    add("--synthetic-acceptance", type=_floats, metavar="P,P,..", help=forced)
    add("--json", metavar="FILE", help="write raw counters, all times, settings and definitions")
    add("--plot", metavar="FILE.png", help="write a figure (needs matplotlib)")
    _sampling_flags(parser)
    _engine_flags(parser)


def _generate_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("prompt", nargs="?", metavar="PROMPT", help="default: read from stdin")
    add("--spec", type=_spec, metavar="S,k,nd", help="tree shape; S may be auto; default: 5,4,16")
    add("--no-speculate", "--no-draft", action="store_true", help="plain autoregressive decoding")
    add("--max-tokens", type=int, default=128, metavar="N", help="default: %(default)s")
    add("--stop", action="append", metavar="TEXT", help="end before this text; may be given several times")
    add("--stop-token-id", type=int, action="append", metavar="ID", help="end at this token; may be given several times")
    add("--chat", action="store_true", help="PROMPT is a user's message: apply the chat template")
    add("--stats", action="store_true", help="print accept length and tok/s to stderr")
    _sampling_flags(parser)
    _engine_flags(parser)


def _sampling_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("sampling").add_argument
    add("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    add("--top-p", type=float, metavar="P")
    add("--top-k", type=int, metavar="N")
    add("--seed", type=int, metavar="N", help="bench samples with 0 unless told otherwise, generate with a random one")
    add("--ignore-eos", action="store_true", help="go on behind the end of text")


def _engine_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("models and engine").add_argument
    add("--target", metavar="DIR", help="folder or hub id of the model; default: the pair that ships with specdec")
    add("--draft", metavar="DIR", help="folder or hub id of its EAGLE head")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1; default: %(default)s")
    add("--dtype", default="auto", choices=DTYPES, help="default: %(default)s")
    add("--attention", default="auto", choices=BACKENDS, help="default: %(default)s")
    add("--kv-cache-dtype", default="auto", choices=KV_DTYPES, help="keys and values kept; default: auto")
    add("--prefix-caching", action="store_true", help="prompts that begin as earlier ones did start behind what is known")
    add("--page-size", type=int, default=16, metavar="N", help="tokens of a KV page; default: %(default)s")
    add("--backend", default="auto", choices=MODEL_BACKENDS, help="who computes the target; default: %(default)s")
    add("--max-seq-len", type=int, metavar="N", help="prompt and output; default: bench as needed, generate the model's")
    add("--cuda-graphs", choices=("round", "step", "off"), default="round", help="one graph a round, one a phase, or none")


def _spec(text: str) -> SpecConfig:
    try:
        steps, topk, nodes = (part if part == "auto" and not i else int(part) for i, part in enumerate(text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected S,k,nd such as 5,4,16, or auto,4,16: only S can be auto; got {text!r}"
        ) from None
    try:
        return SpecConfig(steps, topk, nodes)  # type: ignore[arg-type]  # "auto" is the first alone
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _ints(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers such as 1,8, got {text!r}") from None


def _floats(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected probabilities such as 0.8,0.7,0.6, got {text!r}") from None


def _sampling(args: argparse.Namespace) -> SamplingParams:
    """Flags that greedy decoding would not look at are errors: nothing is ignored."""
    given = {name: getattr(args, name) for name in ("top_p", "top_k", "seed") if getattr(args, name) is not None}
    idle = given.keys() - ({"seed"} if getattr(args, "synthetic_acceptance", None) else set())  # forced draws have one
    if args.temperature == 0 and idle:
        flags = ", ".join("--" + name.replace("_", "-") for name in given if name in idle)
        raise ValueError(f"{flags} would do nothing at --temperature 0 (greedy); give a temperature, or leave it out")
    return SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, ignore_eos=args.ignore_eos, **given)


def _engine(args: argparse.Namespace) -> dict[str, Any]:
    names = ("device", "dtype", "attention", "page_size", "kv_cache_dtype", "backend", "prefix_caching")
    graphs = False if args.cuda_graphs == "off" else args.cuda_graphs
    return {name: getattr(args, name) for name in names} | {"cuda_graphs": graphs}


# ---- commands ----


def _bench(args: argparse.Namespace) -> int:
    from specdec import shipped
    from specdec.bench import plots
    from specdec.bench.prompt_file import read_prompts

    for path in filter(None, (args.json, args.plot)):  # asked before the long run, not behind it
        if Path(path).is_dir() or not Path(path).absolute().parent.is_dir():
            raise ValueError(f"{path} can't be written: expected a file in a folder that exists")
    if args.plot:
        plots.require(Path(args.plot))
    if args.target and not args.draft:
        raise ValueError("--target needs --draft: the shipped head fits the shipped target only")
    sampling = _sampling(args)
    if sampling.temperature > 0 and sampling.seed is None:
        sampling = replace(sampling, seed=0)
    source = Path(args.prompts) if args.prompts else shipped.prompts_file()
    prompts = read_prompts(source, args.num_prompts)
    from specdec.bench.report import print_report
    from specdec.bench.run import BenchOptions

    options = BenchOptions(
        target=args.target or shipped.target_folder(),
        draft=args.draft or shipped.draft_folder(),
        prompts=prompts,
        num_prompts=args.num_prompts,
        prompts_source=str(source),
        specs=tuple(args.spec or DEFAULT_SPECS),
        batch_sizes=args.batch_sizes,
        sampling=sampling,
        repeats=args.repeats,
        chat=args.chat,
        engine=_engine(args),
        max_seq_len=args.max_seq_len,
        profile=args.profile,
        synthetic_acceptance=args.synthetic_acceptance,
    )
    _set_threads(args)
    measurement = _with_progress(options)
    if args.json:
        Path(args.json).write_text(json.dumps(measurement.as_json(), indent=1) + "\n")
    if args.plot:
        plots.write_plot(measurement, Path(args.plot))
    from rich.console import Console

    print_report(measurement, Console())
    return 1 if measurement.diverged else 0


def _set_threads(args: argparse.Namespace) -> None:
    """The shipped pair's matrices are too small to share: a second thread gains nothing, and where another program takes its
    core, every small operation waits for it (rounds of 10 ms were seen to take 400)."""
    import torch

    if args.threads is not None and args.threads < 1:
        raise ValueError(f"--threads must be at least 1, got {args.threads}")
    if args.threads or not args.target:
        torch.set_num_threads(args.threads or 1)


def _with_progress(options: Any) -> Any:
    """Runs the benchmark, and says on stderr how far it is."""
    from specdec.bench.progress import show_progress
    from specdec.bench.run import run_bench

    with show_progress() as progress:
        return run_bench(options, progress)


def _generate(args: argparse.Namespace) -> int:
    sampling = replace(_sampling(args), stop=args.stop, stop_token_ids=args.stop_token_id)
    target, draft = _generate_pair(args)
    prompt = _read_prompt(args.prompt)
    from specdec.decoder import SpecDecoder

    decoder = SpecDecoder.from_pretrained(
        target, draft, args.spec, max_batch_size=1, max_seq_len=args.max_seq_len, **_engine(args)
    )
    if not decoder.tokenizer.is_present:
        raise ValueError(f"{target} holds no tokenizer, and specdec generate is about text")
    stats = _stream(decoder, [{"role": "user", "content": prompt}] if args.chat else prompt, sampling)
    if args.stats:
        from specdec.startup import STARTUP

        print(f"{stats}\nstart-up, first passes included: {STARTUP.report()}", file=sys.stderr)
    return 0


def _stream(decoder: Any, prompt: Any, sampling: SamplingParams) -> str:
    """Writes the text to stdout as it comes; returns a line about it."""
    start = time.perf_counter()
    stream = decoder.stream(prompt, sampling)
    while True:
        try:
            print(next(stream).text, end="", flush=True)
        except StopIteration as end:  # a finished stream hands over its Generation
            generation = end.value
            break
    print(flush=True)
    seconds, stats, tokens = time.perf_counter() - start, generation.stats, len(generation.token_ids)
    line = f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tok/s (prefill included, nothing warmed up)"
    if decoder.settings.prefix_caching:
        line += f", {stats.cached_tokens} of {len(generation.prompt_token_ids)} prompt tokens cached"
    if decoder.settings.backend != "native":
        line += f", target by {decoder.settings.backend}"
    if decoder.head is None:
        return line + "; plain decoding"
    if not stats.rounds:
        return line + "; no round ran"
    return f"{line}; accept length {stats.accept_length:.2f} over {stats.rounds} rounds"


def _generate_pair(args: argparse.Namespace) -> tuple[Any, Any]:
    """Target and draft; the draft is None for plain decoding, and then flags about it are errors."""
    from specdec import shipped

    if args.no_speculate and (args.draft or args.spec):
        raise ValueError("--draft and --spec would do nothing with --no-speculate; leave one or the other out")
    if args.spec and args.target and not args.draft:
        raise ValueError("--spec would do nothing without --draft: the shipped head fits the shipped target only")
    target = args.target or shipped.target_folder()
    if args.no_speculate or (args.target and not args.draft):
        return target, None
    return target, args.draft or shipped.draft_folder()


def _read_prompt(argument: str | None) -> str:
    if argument is None and sys.stdin.isatty():
        raise ValueError("PROMPT is missing: give it as an argument, or on stdin")
    prompt = sys.stdin.read().rstrip("\n") if argument is None else argument
    if not prompt:
        raise ValueError("PROMPT is empty: expected text")
    return prompt


def _doctor(args: argparse.Namespace) -> int:
    from rich.console import Console

    from specdec.doctor import print_capabilities, run_doctor

    if args.table:
        print_capabilities()
    else:
        run_doctor(Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
