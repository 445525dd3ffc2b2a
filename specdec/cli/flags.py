"""Flags that commands share, and what their values mean.  The flags of the engine come from the fields of EngineOptions."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, NoReturn

from specdec.checks import nearest_name, read_some, setting_of
from specdec.cli.terminal.output import complain
from specdec.config import SAMPLING_OPTIONS, SamplingParams, SpecConfig, idle_options
from specdec.draft.kind import Draft
from specdec.draft.kinds import listed
from specdec.options import EngineOptions

SPEC_HELP = (
    "shape of the draft tree: levels, branches, nodes; nd may be left out, S may be auto; a fourth number is the deepest level "
    "of matches beside `--draft suffix`"
)
OFF = "off"  # how the command line spells the choice False


class FlagParser(argparse.ArgumentParser):
    """argparse, but what is wrong is one line, and a flag that does not exist brings the nearest one that does."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **settings)
        self.register("type", int, _whole)
        self.register("type", float, _number)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, extra = self.parse_known_args(args, namespace)
        if extra:
            command: FlagParser = getattr(found, "parser", self)
            command.error(f"unrecognized arguments: {' '.join(extra)}{command.nearest_flags(extra)}")
        return found

    def changed(self, args: argparse.Namespace, besides: Collection[str]) -> list[str]:
        """The flags that are not what they are by default, but for some fields.  args: what this parser has read."""
        read = ((name, value) for name, value in vars(args).items() if name not in besides)
        return [flag_of(name) for name, value in read if value != self.get_default(name)]

    def nearest_flags(self, unknown: Sequence[str]) -> str:
        """The flag that exists for each that does not; empty if none is alike."""
        names = [word.partition("=")[0].lstrip("-") for word in unknown if word.startswith("-")]
        known = [flag.lstrip("-") for flag in self._option_string_actions]  # without dashes, in which all flags are alike
        alike = ["--" + name for name in (nearest_name(name, known) for name in names) if name]
        return f"; nearest: {', '.join(alike)}" if alike else ""

    def error(self, message: str) -> NoReturn:
        complain(f"{message}; see {self.prog} --help")
        sys.exit(2)


class StoreOnce(argparse.Action):
    """Stores a value, and refuses a second one, of which there may be several in another command."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None) -> None:
        if getattr(namespace, self.dest) is not None:
            parser.error(f"argument {option}: expected one value, got two; only specdec bench and eval-head take several")
        setattr(namespace, self.dest, values)


class StoreSources(argparse.Action):
    """Stores a drafter, or a list of several sources."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None) -> None:
        before = getattr(namespace, self.dest)
        several = [] if before is None else before if isinstance(before, list) else [before]
        setattr(namespace, self.dest, [*several, values] if several else values)


# ---- prompts ----


def add_prompt_flags(parser: argparse.ArgumentParser, num_prompts: str) -> None:
    """What commands that run a file of prompts share.  num_prompts: how many they run if nobody says."""
    add = parser.add_argument
    lines = "text, one prompt a line, or .jsonl with one of these keys a line: token_ids, prompt, text, question, task, turns, "
    lines += "messages; default: held-out prompts of the shipped pair"
    add("--prompts", type=not_empty, metavar="FILE", help=lines)
    add("--num-prompts", type=int, metavar="N", help=f"the file's first N; default: {num_prompts}")
    add("--max-tokens", type=int, default=64, metavar="N", help="output tokens of a prompt; default: %(default)s")
    add("--chat", action="store_true", help="apply the target's chat template to the prompts")


# ---- sampling ----


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    lists: list[tuple[str, str, Callable[[str], Any], str, str]] = [  # options that one number does not give
        ("stop", "--stop", not_empty, "TEXT", "end before this text"),
        ("stop_token_ids", "--stop-token-id", int, "ID", "end at this token"),
        ("logit_bias", "--logit-bias", id_and_number, "ID=NUMBER", "add NUMBER to a token's logit"),
        ("bad_words", "--bad-word", not_empty, "TEXT", "a text that the output does not complete"),
        ("bad_words", "--bad-word-ids", ints, "ID,ID", "ids of tokens that the output does not write one after the other"),
    ]
    add = parser.add_argument_group("sampling").add_argument
    add("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    for name, declared in SAMPLING_OPTIONS.items():
        if declared.meaning:
            add(flag_of(name), type=declared.column or int, metavar=declared.metavar, help=declared.meaning)
        elif name == "ignore_eos":
            add("--ignore-eos", action="store_true", help="go on after the end of text")
        for _, flag, kind, metavar, meaning in (each for each in lists if each[0] == name):
            add(flag, type=kind, action="append", metavar=metavar, help=f"{meaning}; may be given several times")


def add_grammar_flags(parser: argparse.ArgumentParser) -> None:
    """What the text must be; one of them at most."""
    add = parser.add_argument_group("structured output").add_argument
    add("--json-schema", type=_schema, metavar="FILE_OR_JSON", help="the text is JSON that this schema allows")
    meaning = "the whole text matches this regular expression"
    add("--regex", type=lambda text: _some(text, "regular expression", text), metavar="REGEX", help=meaning)
    add("--grammar", type=_grammar, metavar="FILE_OR_TEXT", help="the text is one of this grammar, in Lark's notation or GBNF")


def add_prediction_flag(parser: argparse.ArgumentParser) -> None:
    """What one text may well be.  Commands that run many prompts have none: a prediction is of one prompt."""
    meaning = "text that the answer may well repeat, as of the file that it edits; needs `--draft ngram`, or a second, `suffix`"
    parser.add_argument("--prediction", type=lambda name: _read(name, "a file of text"), metavar="FILE", help=meaning)


def sampling_of(args: argparse.Namespace, seed: int | None = None, least: int = 1) -> SamplingParams:
    """Flags that greedy decoding would not look at are errors: nothing is ignored.

    seed: of sampled texts without a --seed.  least: how many tokens the command needs.
    """
    if args.max_tokens <= 0:  # Python may ask for the prompt alone with 0, for which no command has a flag
        got = f"got {args.max_tokens}; nearest setting that works: --max-tokens {least}"
        raise ValueError(f"max_tokens must be >= {least}, {got}")
    given = {name: getattr(args, name) for name in SAMPLING_OPTIONS if getattr(args, name, None) is not None}
    if seed is not None and args.temperature > 0:
        given.setdefault("seed", seed)
    has_own_draws = {"seed"} if getattr(args, "synthetic_acceptance", None) else set()  # forced acceptance draws by seed
    if idle := idle_options(args.temperature, given.keys() - has_own_draws):
        flags = ", ".join(map(flag_of, idle))
        raise ValueError(f"{flags} would do nothing at --temperature 0 (greedy); give a temperature, or leave it out")
    if args.logit_bias is not None:
        given["logit_bias"] = dict(args.logit_bias)
        if len(given["logit_bias"]) < len(args.logit_bias):
            raise ValueError("--logit-bias names a token twice; give each token once")
    if args.bad_word and args.bad_word_ids:
        raise ValueError("--bad-word names texts and --bad-word-ids lists of ids; nearest thing that works: all of them as ids")
    return SamplingParams(**given, stop_token_ids=args.stop_token_id, bad_words=args.bad_word or args.bad_word_ids)


# ---- models and engine ----


def add_engine_flags(parser: argparse.ArgumentParser, command: str) -> None:
    """--target, --draft and a flag for every engine option, but for those that the command decides in another way."""
    decided = [decided_by(item, command) for item in fields(EngineOptions)]
    group = parser.add_argument_group("models and engine", "; ".join(filter(None, decided)) or None)
    target = "folder or hub id of the model, or a GGUF file; default: the pair that ships with specdec"
    group.add_argument("--target", type=not_empty, metavar="DIR", help=target)
    add_draft_flag(group, "without it, a --target decodes plainly")
    add_option_flags(group, EngineOptions, [item.name for item in fields(EngineOptions) if decided_by(item, command)])


def add_draft_flag(group: argparse._ActionsContainer, without: str) -> None:
    """--draft, of which there may be several.  without: what happens without it."""
    kinds = listed(lambda kind: kind.help)
    draft = f"folder or hub id of its draft head or of a small model, or {kinds}; a second one, `suffix`, joins matches in the "
    draft += f"text; so do `corpus` and `answers`, matches in corpora and in earlier answers; {without}"
    group.add_argument("--draft", type=not_empty, action=StoreSources, metavar="DIR", help=draft)


def add_option_flags(group: argparse._ActionsContainer, options: type, without: Sequence[str]) -> None:
    """A flag for every field of a class of options, but for those without one."""
    for item in fields(options):
        if item.name not in without:
            group.add_argument(flag_of(item.name), **_flag_details(item))


def decided_by(item: Field[Any], command: str) -> str:
    """What a command's help says of an option for which it has no flag; empty if it has one."""
    return setting_of(item).decided_by.get(command, "")


def engine_of(args: argparse.Namespace, **decided: Any) -> EngineOptions:
    """The engine options of a command line.  decided: the values of options that have no flag in this command."""
    given = {item.name: getattr(args, item.name) for item in fields(EngineOptions) if item.name in args}
    return EngineOptions(**given, **decided)


def pair_of(args: argparse.Namespace, needs_draft: Sequence[str]) -> tuple[str | Path, Draft]:
    """Target and draft; the draft is None where a target was given alone.

    needs_draft: flags that were given and would do nothing then, which is an error.
    """
    from specdec import shipped

    if args.target and not args.draft:
        if needs_draft:
            named = ", ".join(needs_draft)
            raise ValueError(f"{named} would do nothing without --draft: the shipped head fits the shipped target only")
        return args.target, None
    return args.target or shipped.target_folder(), args.draft or shipped.draft_folder()


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def _flag_details(item: Field[Any]) -> dict[str, Any]:
    """What argparse is to know of an option."""
    setting = setting_of(item)
    meaning = setting.meaning.replace("%", "%%")
    if isinstance(item.default, bool):
        action = argparse.BooleanOptionalAction if item.default else "store_true"
        return {"action": action, "default": item.default, "help": meaning}
    details: dict[str, Any] = {"default": item.default, "help": meaning}
    if item.default is not None:
        details["help"] += f"; default: {item.default}"
    if setting.choices:
        spelled = {OFF if choice is False else choice: choice for choice in setting.choices}
        return {**details, "type": _one_of(spelled), "metavar": "{" + ",".join(spelled) + "}"}
    if setting.bounds is None:
        return {**details, "type": not_empty, "metavar": setting.metavar}
    word = item.default if isinstance(item.default, str) else setting.word
    return {**details, "type": int if word is None else _word_or_int(word), "metavar": "N"}


# ---- values ----


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text[:80]!r}{_nearest_whole(text)}") from None


def _nearest_whole(text: str) -> str:
    try:
        number = float(text)
        return f"; nearest: {1 if 0 < number < 1 else int(number)}" if abs(number) < 1e15 else ""  # 0 may mean "no limit"
    except ValueError:
        return ""


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text[:80]!r}") from None


def not_empty(text: str) -> str:
    """An empty name is a variable of the user's shell that was not set: taking the default instead would hide that."""
    if not text:
        raise argparse.ArgumentTypeError("expected a name, got an empty value; leave the flag out for its default")
    return text


def _one_of(spelled: dict[str, Any]) -> Callable[[str], Any]:
    def choice(text: str) -> Any:
        if text not in spelled:
            alike = nearest_name(text, spelled)
            hint = f"; nearest: {alike}" if alike else ""
            raise argparse.ArgumentTypeError(f"expected one of {', '.join(spelled)}, got {text!r}{hint}")
        return spelled[text]

    return choice


def tree_shape(text: str) -> SpecConfig:
    """S,k,nd or S,k, or S,k,nd,depth for several sources."""
    try:
        steps, topk, *more = (part if part == "auto" and not i else int(part) for i, part in enumerate(text.split(",")))
        if len(more) > 2:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(
            "expected S,k,nd such as 5,4,16, or S,k such as 5,4, or 5,4,16,12 with `--draft suffix`, or auto,4,16: only S can "
            f"be auto; got {text!r}"
        ) from None
    given = dict(zip(("num_steps", "topk", "num_draft_tokens", "max_depth"), (steps, topk, *more)))
    try:
        return SpecConfig(**given)  # type: ignore[arg-type]  # "auto" is the first alone
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _schema(text: str) -> str:
    """JSON as it stands, or what a file holds."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # the second of a schema that is nested too deeply, as the door says then
        return text if text.lstrip().startswith("{") else _read(text, "JSON of an object, or a file")
    if not isinstance(value, dict) and not Path(text).is_file():
        got = "a list" if isinstance(value, list) else f"{text[:200]!r}"
        raise argparse.ArgumentTypeError(f"expected a JSON object, such as {{}}, or a file of one, got {got}")
    return text if isinstance(value, dict) else _read(text, "JSON of an object, or a file")


def _grammar(text: str) -> str:
    """What a file holds, if there is one of that name, or if the text can be no grammar, for want of a rule; else the text."""
    is_name = 0 < len(text) < 256 and "\n" not in text
    if not is_name or (":" in text and not Path(text).is_file()):
        return _some(text, "grammar", text.strip())
    return _read(text, "a grammar, which has a rule such as 'start: \"yes\"', or a file")


def _some(text: str, expected: str, has_some: object) -> str:
    if not has_some:
        raise argparse.ArgumentTypeError(f"expected a {expected}, got an empty value; leave the flag out for any text")
    return text


def _read(name: str, expected: str) -> str:
    try:
        return read_some(Path(not_empty(name))).decode()
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"expected {expected} that can be read, got {name[:200]!r}: {error}") from None


def _bias(text: str) -> tuple[int, float]:
    token, _, added = text.partition("=")
    return int(token), float(added)


def _as(made: Callable[[str], Any], expected: str) -> Callable[[str], Any]:
    """What `made` makes of a text, and where it raises ValueError, what was expected."""

    def value(text: str) -> Any:
        try:
            return made(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}") from None

    return value


def _word_or_int(word: str) -> Callable[[str], Any]:
    return _as(lambda text: text if text == word else int(text), f"{word} or a number")


id_and_number = _as(_bias, "ID=NUMBER such as 50=-100")
ints = _as(lambda text: tuple(map(int, text.split(","))), "numbers such as 1,8")
floats = _as(lambda text: tuple(map(float, text.split(","))), "probabilities such as 0.8,0.7,0.6")
