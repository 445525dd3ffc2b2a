"""docs/API.md against the code: every public name is on the page, and the page has no name that is not in the code.

The page's own rules: a class has a section `## Name`, a method with settings worth a table a section `### Class.method`, and a
command a section `### specdec NAME`.  The first cell of every table row names what the row is about, in backticks.  A command's
section names all of its flags in backticks, in tables or in sentences; flags of several commands have sections of their own.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

import specdec
from specdec import shipped
from specdec.bench.measurement import Measurement
from specdec.bench.prompt_file import read_prompts
from specdec.checks import setting_of
from specdec.cli.entry import build_parser
from specdec.cli.flags import flag_of
from specdec.train.__main__ import build_parser as train_parser
from specdec.train.settings import HeadRun, TargetRun

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "API.md").read_text()
CLASSES = {name: getattr(specdec, name) for name in specdec.__all__}
SERVING = (ROOT / "docs" / "SERVING.md").read_text()
SHARED_FLAGS = "Flags of `specdec bench`, `specdec verify`, `specdec generate` and `specdec trace`"
SHARING = ("bench", "verify", "generate", "trace")
TRAINING = {"head": "specdec train", "target": "scripts/train_target"}
RUNS = {"head": HeadRun, "target": TargetRun}  # whose fields are flags, left out of a command line that names no value
SETTINGS = ("EngineOptions", "SamplingParams", "SpecConfig")  # classes that callers make, of which defaults matter
METHOD_SECTIONS = re.findall(r"^### ([A-Z]\w+\.\w+)$", PAGE, re.M)


def section(heading: str, page: str = PAGE) -> str:
    """What stands under a heading, up to the next heading of any level; empty if there is no such heading."""
    match = re.search(rf"^#+ {re.escape(heading)}$\n(.*?)(?=^#|\Z)", page, re.S | re.M)
    return match[1] if match else ""


def first_cells(text: str) -> list[str]:
    """The first cell of each row of the tables in a section, without headings and rulers."""
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")]
    return [cell for cell in rows if cell.startswith("`")]


def items(text: str) -> list[str]:
    """What the rows of a section are about, as it is written; a row may be about several things."""
    return [item for cell in first_cells(text) for item in re.findall(r"`([^`]+)`", cell)]


def names(text: str) -> list[str]:
    """The names that the rows of a section are about; of a method, its name."""
    return [re.match(r"[\w.]+", item)[0] for item in items(text)]  # type: ignore[index]


def members(cls: type) -> set[str]:
    """Public names of a class: its fields, methods and properties, and the attributes that its __init__ sets."""
    found = {name for base in cls.__mro__[:-1] for name in vars(base) if not name.startswith("_")}
    if dataclasses.is_dataclass(cls):
        return found | {field.name for field in dataclasses.fields(cls) if not field.name.startswith("_")}
    return found | attributes_set(cls)


def attributes_set(cls: type) -> set[str]:
    """Public attributes assigned on self in __init__."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls.__init__)))  # type: ignore[misc]
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    on_self = {node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == "self"}
    return {name for name in on_self if not name.startswith("_")}


def parameters(function: Any) -> list[str]:
    """Names of what a caller passes, without those that EngineOptions documents."""
    options = CLASSES.get("EngineOptions")
    elsewhere = {field.name for field in dataclasses.fields(options)} if options else set()
    kept = inspect.signature(function).parameters.values()
    return [p.name for p in kept if p.name not in elsewhere | {"self", "cls"} and p.kind is not p.VAR_KEYWORD]


def methods(cls: type) -> dict[str, Any]:
    return {name: getattr(cls, name) for name in members(cls) if callable(getattr(cls, name, None))}


def flags(parser: argparse.ArgumentParser) -> set[str]:
    """Options, and what positional arguments are called."""
    found: set[str] = set()
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            found |= set(action.option_strings) or {str(action.metavar or action.dest)}
    return found - {"-h", "--help"}


def documented_flags(heading: str, page: str = PAGE) -> set[str]:
    """The flags and the arguments in capitals that a section names in backticks: `--seed N` is about --seed."""
    text = re.sub(r"^```.*?^```$", "", section(heading, page), flags=re.S | re.M)
    return set(re.findall(r"`(--[a-z][\w-]*|[A-Z]+(?=`))", text)) - {"--help"}


def engine_flags(command: str) -> set[str]:
    """Those of a command that runs a model; of them only the commands that take rows have one for max_batch_size."""
    options = dataclasses.fields(specdec.EngineOptions)
    fields = {flag_of(field.name) for field in options if command not in setting_of(field).decided_by}
    return (fields - {"--max-batch-size"}) | {"--no-smoke"}


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    (action,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return action.choices


def test_the_page_is_read_as_it_is_meant() -> None:
    """Keeps out: a reader of the page that finds nothing, or takes the rows of another section."""
    page = "## A\n| name |\n|---|\n| `x` | `y` |\n| `f(a, b)`, `g` | z |\n### A.f\n| `a` |\n## B\n| `--seed N` | x |\n"
    page += "`--off` is for `FILE`, `NO_COLOR` and `x`.\n```sh\n--other\n```\n"
    assert items(section("A", page)) == ["x", "f(a, b)", "g"] and names(section("A", page)) == ["x", "f", "g"]
    assert names(section("A.f", page)) == ["a"] and section("C", page) == ""
    assert documented_flags("B", page) == {"--seed", "--off", "FILE"}
    assert members(specdec.Chunk) == {"text", "token_ids", "origins", "sources", "logprobs", "rounds", "prompt_logprobs"}
    assert "engine" in members(specdec.SpecDecoder)


@pytest.mark.parametrize("name", CLASSES)
def test_every_name_of_a_class_is_on_the_page_and_no_other(name: str) -> None:
    """Keeps out: a field, a method or a keyword that nobody can look up, and one that was renamed or removed."""
    listed = names(section(name))
    assert sorted(listed) == sorted(members(CLASSES[name])), f"docs/API.md, section {name}"


@pytest.mark.parametrize("name", CLASSES)
def test_methods_are_shown_with_their_parameters(name: str) -> None:
    """Keeps out: a parameter that the page does not name, or names otherwise."""
    for method, function in methods(CLASSES[name]).items():
        expected, own = parameters(function), section(f"{name}.{method}")
        (item,) = [item for item in items(section(name)) if re.match(rf"{method}\b", item)]
        if own:
            assert names(own) == expected, f"docs/API.md, section {name}.{method}"
            assert item == f"{method}(...)"
        else:
            assert item == f"{method}({', '.join(expected)})"


@pytest.mark.parametrize("heading", [name for name in CLASSES if name in SETTINGS] + METHOD_SECTIONS)
def test_defaults_on_the_page_are_the_codes(heading: str) -> None:
    """Keeps out: a default that changed, or that the page gets wrong."""
    cls, _, method = heading.partition(".")
    known = inspect.signature(getattr(CLASSES[cls], method) if method else CLASSES[cls]).parameters
    rows = [line.split("|")[1:3] for line in section(heading).splitlines() if line.startswith("| `")]
    shown = {name.strip(" `"): default.strip(" `").replace('"', "'") for name, default in rows}
    expected = {
        name: "" if known[name].default is inspect.Parameter.empty else repr(known[name].default)
        for name in shown
        if name in known
    }
    assert expected and {name: shown[name] for name in expected} == expected


def test_no_class_is_on_the_page_that_is_not_public() -> None:
    """Keeps out: a page about a class that can't be imported from specdec."""
    assert set(re.findall(r"^## ([A-Z]\w+)$", PAGE, re.M)) == set(CLASSES)
    shown = [heading.split(".") for heading in METHOD_SECTIONS]
    assert shown and all(hasattr(CLASSES[cls], method) for cls, method in shown)


def test_every_flag_is_on_the_page_and_no_other() -> None:
    """Keeps out: a flag that --help knows and the page does not, and the reverse."""
    parsers, shared = subparsers(build_parser()), documented_flags(SHARED_FLAGS)
    assert set(re.findall(r"^### specdec ([\w-]+)$", PAGE, re.M)) == set(parsers)
    assert flags(build_parser()) == {"--version"} and "`specdec --version`" in section("The command line")
    for command, parser in parsers.items():
        listed = documented_flags(f"specdec {command}")
        listed |= shared | engine_flags(command) if command in SHARING else set()
        listed |= documented_flags("Flags of the server", SERVING) | engine_flags(command) if command == "serve" else set()
        assert listed == flags(parser), f"docs/API.md, section specdec {command}"


def test_every_training_flag_is_on_the_page_with_its_default() -> None:
    """Keeps out: a setting of a training run that the page does not name or whose default has changed, and the reverse."""
    for command, parser in subparsers(train_parser()).items():
        assert documented_flags(TRAINING[command]) == flags(parser), f"docs/API.md, section {TRAINING[command]}"
        given = dict(re.findall(r"`--([\w-]+) ([\w.-]+)`", section(TRAINING[command]).split("explains:")[1].split(".\n")[0]))
        settings = {field.name.replace("_", "-"): field.default for field in dataclasses.fields(RUNS[command])}
        defaults = {name: str(settings.get(name, parser.get_default(name.replace("-", "_")))) for name in given}
        assert len(given) > 15 and given == defaults, f"docs/API.md, section {TRAINING[command]}"


def test_help_explains_every_flag() -> None:
    """Keeps out: a flag of which the page gives only the name, and --help nothing."""
    for parser in (*subparsers(build_parser()).values(), *subparsers(train_parser()).values()):
        assert [action.dest for action in parser._actions if not action.help] == []


def test_the_keys_of_a_prompt_file_are_on_the_page(tmp_path: Path) -> None:
    """Keeps out: a key that the page promises and the reader refuses, or that the reader takes in silence."""
    listed, file = names(section("Prompt files")), tmp_path / "p.jsonl"
    values = {"token_ids": [1, 2], "turns": ["hi"], "messages": [{"role": "user", "content": "hi"}]}
    for key in listed:
        file.write_text(json.dumps({key: values.get(key, "hi")}))
        assert len(read_prompts(file)) == 1, key
    file.write_text(json.dumps({"other": "hi"}))
    with pytest.raises(ValueError, match="must have one of the keys") as error:
        read_prompts(file)
    assert set(re.findall(r"\w+", str(error.value).partition("keys ")[2].partition(";")[0])) - {"or"} == set(listed)


def test_the_keys_of_a_measurement_are_on_the_page() -> None:
    """Keeps out: a page that describes another file than `--json` writes."""
    written = Measurement({}, {}, {}, {}).as_json()
    assert sorted(names(section("The file of `specdec bench --json`"))) == sorted(written)


def test_the_shipped_pair_is_on_the_page() -> None:
    """Keeps out: a function of specdec.shipped, which examples use, that the page does not name."""
    public = [name for name, value in vars(shipped).items() if inspect.isfunction(value) and not name.startswith("_")]
    assert sorted(names(section("The shipped pair"))) == sorted(public)
