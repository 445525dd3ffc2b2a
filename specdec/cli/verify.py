"""`specdec verify`: whether speculation changes what a target writes, told from rounding."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec import __version__
from specdec.cli import flags
from specdec.cli.terminal.output import check_files, console, json_writer, write_files
from specdec.cli.terminal.waiting import over
from specdec.config import SamplingParams
from specdec.draft.kind import Draft, spelled
from specdec.options import EngineOptions

if TYPE_CHECKING:
    from specdec.decoder import SpecDecoder

HELP = "check that speculation changes no token, but where two tie within rounding"
USUAL_PROMPTS = 8


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    flags.add_prompt_flags(parser, num_prompts=str(USUAL_PROMPTS))
    add("--spec", type=flags.tree_shape, action=flags.StoreOnce, metavar="S,k,nd", help=f"{flags.SPEC_HELP}; default: 5,4,16")
    add("--json", type=flags.not_empty, metavar="FILE", help="write every finding, the settings and definitions")
    add("--replay", type=flags.not_empty, metavar="FILE", help="run a text again that `serve --audit` found to be wrong")
    flags.add_sampling_flags(parser)
    flags.add_grammar_flags(parser)
    flags.add_engine_flags(parser, "verify")


def run(args: argparse.Namespace) -> int:
    check_files({"--json": args.json})
    if args.replay:
        return _replay(args)
    target, draft = flags.pair_of(args, [])
    if draft is None:
        raise ValueError("--draft is missing: verify compares speculative with plain decoding; give the head of the --target")
    sampling = flags.sampling_of(args, seed=0, least=2)
    decoder, prompts, facts = _load(args, target, draft, sampling)
    from specdec.bench.encode import with_seeds

    over()
    with decoder:
        found = decoder.verify(prompts, with_seeds(sampling, len(prompts)), progress=True)
    try:
        from specdec.lossless.show import print_verification

        print_verification(found, console())
    finally:
        write_files({args.json: json_writer(lambda: {**found.as_json(), **facts})})
    return 0 if found.passed else 1


def _replay(args: argparse.Namespace) -> int:
    """What the file says of model and settings holds, but for flags that say otherwise."""
    from specdec.lossless.replay import ReplayFile, replay

    file = ReplayFile.read(args.replay)
    options = {item.name for item in fields(EngineOptions)}
    changed = args.parser.changed(args, {"replay", "json", "target", "draft", "pace", *options})
    if changed:
        raise ValueError(f"{', '.join(changed)} would do nothing with --replay, whose file names prompt, sampling and tree")
    given = {name: value for name, value in vars(args).items() if name in options and value != args.parser.get_default(name)}
    target, draft = args.target or file.target, args.draft or (None if args.target else file.draft)
    if not target:
        raise ValueError(
            "the replay file does not say which model wrote it; nearest thing that works: --target and its --draft"
        )
    from specdec.decoder import SpecDecoder
    from specdec.lossless.show import print_replay
    from specdec.session import Session

    with SpecDecoder.from_pretrained(target, draft, file.shape if draft else None, options=file.options(**given)) as decoder:
        over()
        found = replay(Session(decoder), file)
    print_replay(file, found, console())
    facts = {"replay": args.replay, "texts": [each.as_json() for each in found]}
    write_files({args.json: json_writer(lambda: facts)})
    return 0 if not any(each.wrong for each in found) else 1


def _load(
    args: argparse.Namespace, target: str | Path, draft: Draft, sampling: SamplingParams
) -> tuple[SpecDecoder, list[list[int]], dict[str, Any]]:
    """The decoder, with room for the longest prompt; the prompts' ids; and what is verified with which versions."""
    from specdec import shipped
    from specdec.bench.encode import encode_prompts, prompt_facts
    from specdec.bench.prompt_file import read_prompts
    from specdec.lossless.verify import check_sampling

    check_sampling([sampling])
    engine, source = flags.engine_of(args), Path(args.prompts) if args.prompts else shipped.prompts_file()
    listed = read_prompts(source, args.num_prompts)[: args.num_prompts or USUAL_PROMPTS]
    from specdec.decoder import SpecDecoder
    from specdec.loading.about.machine import versions
    from specdec.models.checkpoints.checkpoint import resolve_target
    from specdec.prompts.tokenizer import Tokenizer

    tokenizer = Tokenizer(resolve_target(target, "target"), engine.chat_template)
    prompts = encode_prompts(listed, str(source), target, tokenizer, sampling, engine, chat=args.chat)
    length = engine.max_seq_len or max(map(len, prompts)) + sampling.max_tokens
    engine = replace(engine, max_seq_len=length)
    facts = {
        "target": str(target),
        "draft": spelled(draft),
        "prompts_from": prompt_facts(prompts, listed, str(source), chat=args.chat),
        "versions": versions() | {"specdec": __version__},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return SpecDecoder.from_pretrained(target, draft, args.spec, options=engine), prompts, facts
