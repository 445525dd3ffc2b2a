"""The command line's flags: the engine's come from the options, and what is not understood is said with the nearest flag."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from toolkit.serving.options import NUMBERS, other_number

from specdec import EngineOptions, SamplingParams, SpecConfig, cli, shipped
from specdec.bench.prompt_file import KEYS
from specdec.checks import setting_of
from specdec.cli.entry import build_parser
from specdec.cli.flags import engine_of, flag_of, sampling_of, tree_shape
from specdec.options import usable_cpus
from specdec.train.__main__ import build_parser as train_parser

OPTIONS = fields(EngineOptions)
COMMANDS = ("bench", "generate", "serve", "trace", "verify")
OTHER: dict[str, tuple[list[str], Any]] = {  # of each option: a value that is not its default, as a flag and as it arrives
    "device": (["cuda:1"], "cuda:1"),
    "dtype": (["bfloat16"], "bfloat16"),
    "max_batch_size": (["3"], 3),
    "max_seq_len": (["99"], 99),
    "page_size": (["sequence"], "sequence"),
    "attention": (["fa3"], "fa3"),
    "cuda_graphs": (["off"], False),
    "kv_cache_dtype": (["int8"], "int8"),
    "kv_cache_memory": (["2GiB"], 2 << 30),
    "int8_queries": ([], True),
    "draft_format": (["modelopt"], "modelopt"),
    "draft_pickle": ([], True),
    "draft_quantize": (["fp8"], "fp8"),
    "beyond_trained": (["stop"], "stop"),
    "smoke": ([], False),
    "backend": (["transformers"], "transformers"),
    "quantize": (["int4"], "int4"),
    "pack_weights": ([], True),
    "prefix_caching": ([], True),
    "state_cache": (["2GiB"], 2 << 30),
    "deterministic": ([], True),
    "tensor_parallel_size": (["2"], 2),
    "expert_parallel": (["experts"], "experts"),
    "decode_context_parallel_size": (["2"], 2),
    "context_interleave": (["8"], 8),
    "prefill_chunk": (["64"], 64),
    "threads": (["1"], 1),
    "corpus": (["notes.txt"], "notes.txt"),
    "chat_template": (["chat.jinja"], "chat.jinja"),
    "corpus_memory": (["1GiB"], 1 << 30),
    "audit": (["0.5"], 0.5),
    "audit_max_tokens": (["99"], 99),
    "audit_busy": (["0.5"], 0.5),
    "audit_stop": ([], True),
    "audit_folder": (["wrong"], "wrong"),
    "shapes": (["3,1 5,8,32"], (SpecConfig(3, 1), SpecConfig(5, 8, 32))),
}

# Of each field of SamplingParams: a command line, and the value that arrives, which is not the default.
SAMPLED: dict[str, tuple[list[str], Any]] = {
    "max_tokens": (["--max-tokens", "7"], 7),
    "temperature": (["--temperature", "0.5"], 0.5),
    "stop": (["--stop", "a", "--stop", "b"], ("a", "b")),
    "stop_token_ids": (["--stop-token-id", "5", "--stop-token-id", "6"], (5, 6)),
    "ignore_eos": (["--ignore-eos"], True),
    "logit_bias": (["--logit-bias", "5=2"], {5: 2.0}),
    "bad_words": (["--bad-word-ids", "5,6", "--bad-word-ids", "7"], ((5, 6), (7,))),
    "json_schema": (["--json-schema", "{}"], "{}"),
    "regex": (["--regex", "a"], "a"),
    "grammar": (["--grammar", "start: x"], "start: x"),
    "logprobs": (["--logprobs", "2"], 2),
    "logprobs_mode": (["--logprobs", "0", "--logprobs-mode", "processed"], "processed"),
    "n": (["--temperature", "1", "--n", "2"], 2),
    "prediction": (["--prediction", __file__], Path(__file__).read_text()),
    **{name: (["--temperature", "1", flag_of(name), str(other_number(name))], other_number(name)) for name in NUMBERS},
}
# The others have one text a prompt, print no probabilities, and run many prompts, of which a prediction is one's.
GENERATE_ALONE = ("logprobs", "logprobs_mode", "n", "prediction")
# --draft names who drafts, --spec the shape, --no-speculate or a --target alone decodes plainly; the last two are for programs.
NO_FLAG = ("sources", "shape", "speculate", "prompt_logprobs", "include_stop_str_in_output")
NOT_IN_BENCH = ("json_schema", "regex", "grammar")  # rounds with a grammar have a benchmark, texts.grammar_rounds


def help_of(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    """The help as one line."""
    with pytest.raises(SystemExit) as end:
        cli.main([*command, "--help"])
    assert end.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def error_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line on stderr of a command line that is wrong."""
    try:
        code: Any = cli.main(argv)
    except SystemExit as end:
        code = end.code
    out = capsys.readouterr()
    assert (code, out.out) == (2, "") and out.err.startswith("specdec: error: ") and out.err.count("\n") == 1, out.err
    return out.err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_in_the_help(capsys: pytest.CaptureFixture[str], command: str) -> None:
    """Keeps out: an engine setting that Python takes and the command line does not."""
    said = help_of(capsys, command)
    for item in OPTIONS:
        instead = setting_of(item).decided_by.get(command)
        assert (instead or setting_of(item).meaning) in said
        assert instead is not None or flag_of(item.name) in said, item.name


@pytest.mark.parametrize("parser", [build_parser(), train_parser()], ids=["specdec", "train"])
def test_every_flag_says_what_it_means(parser: argparse.ArgumentParser) -> None:
    """Keeps out: a flag of which --help knows the default alone."""
    for command in next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices.values():
        for action in command._actions:
            assert action.help and not action.help.startswith("default"), f"{command.prog}: {action.dest}"


def test_the_help_names_every_key_of_a_prompt_file(capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: a key that the reader takes and --help does not name."""
    assert ", ".join(KEYS) in help_of(capsys, "bench")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_arrives(command: str) -> None:
    """Keeps out: a flag that parses and does nothing, and a default that differs from the library's."""
    parse = build_parser().parse_args
    assert engine_of(parse([command])) == EngineOptions()
    for item in OPTIONS:
        if command in setting_of(item).decided_by:
            continue
        words, value = OTHER[item.name]
        assert value != item.default
        args = parse([command, flag_of(f"no_{item.name}" if item.default is True else item.name), *words])
        assert engine_of(args) == EngineOptions(**{item.name: value}), item.name


@pytest.mark.parametrize("command", ["bench", "generate", "trace", "verify"])
@pytest.mark.parametrize("name", [item.name for item in fields(SamplingParams) if item.name not in NO_FLAG])
def test_every_sampling_option_arrives(name: str, command: str) -> None:
    """Keeps out: an option that Python and HTTP have and the command line has not, or reads and loses."""
    words, value = SAMPLED[name]
    assert getattr(SamplingParams(), name) != value
    without = (*GENERATE_ALONE, *NOT_IN_BENCH) if command == "bench" else () if command == "generate" else GENERATE_ALONE
    parser = build_parser()
    if name in without:
        with pytest.raises(SystemExit):
            parser.parse_args([command, *words])
        return
    args = parser.parse_args([command, *words])
    assert getattr(sampling_of(args), name) == value


@pytest.mark.parametrize("name", NO_FLAG)
def test_an_option_without_a_flag_is_refused(capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Keeps out: a list of options without flags that goes on after one has got a flag."""
    assert f"unrecognized arguments: {flag_of(name)}" in error_of(capsys, "generate", "hi", flag_of(name))


def test_bad_words_may_be_texts() -> None:
    """Keeps out: --bad-word lost beside --bad-word-ids."""
    assert sampling_of(build_parser().parse_args(["verify", "--bad-word", "a", "--bad-word", " b"])).bad_words == ("a", " b")


def test_every_option_is_in_doctors_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a doctor that knows fewer settings than the engine, and one that does not say what auto takes."""
    monkeypatch.setenv("COLUMNS", "300")
    assert cli.main(["doctor", "--details"]) == 0
    table = capsys.readouterr().out.partition("Engine settings")[2]
    for item in OPTIONS:
        (line,) = (line for line in table.splitlines() if line.split()[:1] == [item.name])
        assert setting_of(item).meaning in " ".join(line.split())
    assert re.search(r"device +auto: (cpu|cuda:\d)", table) and re.search(r"attention +auto: (torch|triton|fa4) \(", table)


@pytest.mark.slow
def test_every_option_is_in_benchs_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Keeps out: a measurement that nobody can repeat, because a setting of it was not written down."""
    flags = "--num-prompts 1 --batch-sizes 1 --spec 2,2,4 --max-tokens 4 --repeats 1 --device cpu --page-size 4"
    assert cli.main(["bench", *flags.split(), "--json", str(tmp_path / "o.json")]) == 0
    settings = json.loads((tmp_path / "o.json").read_text())["settings"]
    assert {item.name for item in OPTIONS} <= settings.keys()
    assert (settings["page_size"], settings["max_batch_size"], settings["threads"]) == (4, 1, 1)
    assert (settings["device"], settings["dtype"], settings["backend"]) == ("cpu", "float32", "native")


@pytest.mark.parametrize("flag", ["--target", "--draft", "--prompts", "--json", "--plot", "--device", "--dtype", "--spec"])
def test_an_empty_value_is_an_error(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    """Keeps out: `--draft "$HEAD"` with HEAD unset, which silently measured the shipped head; `--json ""`, which wrote none."""
    assert f"argument {flag}: expected " in error_of(capsys, "bench", flag, "")
    if flag in ("--target", "--draft"):
        assert "got an empty value" in error_of(capsys, "generate", "hi", flag, "")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["bench", "--maxtokens", "5"], "--maxtokens 5; nearest: --max-tokens;"),
        (["bench", "--kv-cache-type=fp8"], "--kv-cache-type=fp8; nearest: --kv-cache-dtype;"),
        (["generate", "hi", "--temprature", "1", "--chatt"], "nearest: --temperature, --chat;"),
        (["generate", "hi", "--batch-sizes", "1"], "unrecognized arguments: --batch-sizes 1"),
        (["bench", "--nonsense"], "arguments: --nonsense; see specdec bench --help"),
        (["doctor", "--tabel"], "nearest: --table; see specdec doctor --help"),
        (["generate", "hi", "--max-tok", "5"], "nearest: --max-tokens"),
        (["generate", "hi", "--attention", "tritn"], "expected one of auto, torch, triton, .* got 'tritn'; nearest: triton"),
        (["bench", "--cuda-graphs", "False"], "--cuda-graphs: expected one of round, step, off, got 'False'"),
        (["generate", "hi", "--threads", "two"], "expected auto or a number, got 'two'"),
        (["generate", "hi", "--threads", "10000"], f"got 10000; nearest setting that works: threads={usable_cpus()}\n"),
        (["bench", "--threads", "0"], "got 0; nearest setting that works: threads=1\n"),
    ],
)
def test_what_is_wrong_comes_with_the_nearest(capsys: pytest.CaptureFixture[str], argv: list[str], said: str) -> None:
    """Keeps out: a typing mistake that has to be looked up, a flag cut short that means another one tomorrow, and
    --threads 10000, which hung."""
    assert re.search(said, error_of(capsys, *argv))


def test_exit_codes_are_in_the_help_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: a script that has to guess what 1 and 2 mean, and ten lines about it at the end of every command's help."""
    said = help_of(capsys).partition("exit codes:")[2]
    assert [int(code) for code in re.findall(r"(?<= )\d+(?=  ?[a-z])", " " + said)] == [0, 1, 2, 130, 141]
    assert not [name for name in (*COMMANDS, "doctor") if "exit codes" in help_of(capsys, name)]


def test_a_tree_shape_may_leave_its_size_out() -> None:
    """Keeps out: three numbers where two say all."""
    assert tree_shape("5,4,16") == SpecConfig(5, 4, 16) and tree_shape("auto,1,6") == SpecConfig("auto", 1, 6)
    assert tree_shape("5,4") == SpecConfig(num_steps=5, topk=4) and tree_shape("3,1") == SpecConfig(3, 1, 4)


@pytest.mark.slow
def test_a_target_without_a_draft_is_measured_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Keeps out: a bench that demands a draft that generate does not, and a comparison with nothing."""
    target, out = str(shipped.target_folder()), tmp_path / "o.json"
    flags = "--num-prompts 2 --batch-sizes 1,2 --max-tokens 6 --repeats 2 --device cpu --temperature 1 --seed 3"
    assert cli.main(["bench", "--target", target, *flags.split(), "--json", str(out)]) == 0
    said, data = capsys.readouterr().out, json.loads(out.read_text())
    assert "No draft was given" in " ".join(said.split()) and "speed-up" not in said
    assert (data["cells"], data["settings"]["draft"]) == ([], None)
    assert [cell["batch_size"] for cell in data["plain_cells"]] == [1, 2]
    for cell in data["plain_cells"]:
        counters = cell["baseline"]["counters"]
        assert counters["drafted"] == 0 and cell["baseline"]["output_tokens"] == [12, 12] and cell["empty"] == []
        assert cell["derived"]["tokens_per_second"] > 0 and cell["derived"]["ms_per_step"] > 0
