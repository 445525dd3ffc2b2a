"""The command line: what it prints where, its exit codes, and that a wrong word costs one line and no time."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest

from specdec import SamplingParams, cli, shipped
from specdec.cli import entry
from specdec.screen.progress import PACE, Pace

needs_pair = pytest.mark.skipif(not shipped.is_complete(), reason="the shipped pair is not complete")
TINY = "--num-prompts 2 --batch-sizes 1,2 --spec 2,2,4 --max-tokens 6 --repeats 1 --device cpu".split()


def run(capsys, *argv: str, pace: Pace | None = None) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    try:
        code = entry.main(argv, pace)
    except SystemExit as error:
        code = error.code
    out = capsys.readouterr()
    return code, out.out, out.err


def command(function) -> argparse.Namespace:
    """What the parser makes of a command line whose command is this function."""
    return argparse.Namespace(command="doctor", run=function, pace=PACE)


def noted(function, order: list[str]):
    """The function, but its calls are written down."""

    def call(*args, **kwargs):
        order.append(function.__name__)
        return function(*args, **kwargs)

    return call


def test_help_is_quick(tmp_path):
    """Keeps out: seconds of torch before a line of help."""
    code = "import sys; from specdec.cli.entry import build_parser as parser; "
    code += "print(parser().format_help(), {'torch', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.endswith(" set()\n") and "generate" in done.stdout


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "arguments are required: COMMAND"),
        (["brench"], "invalid choice: 'brench'"),
        (["bench", "--nonsense"], "unrecognized arguments: --nonsense; see specdec bench --help"),
        (["bench", "--spec", "5"], "S,k such as 5,4, or 5,4,16,12 with `--draft suffix`, or auto,4,16: only S can be auto"),
        (["bench", "--spec", "5,4,16,8,1"], "only S can be auto; got '5,4,16,8,1'"),
        (["bench", "--spec", "5,4,16,1"], "max_depth must be in [5, 15], got 1"),
        (["bench", "--spec", "auto"], "or auto,4,16: only S can be auto; got 'auto'"),
        (["bench", "--spec", "5,auto,6"], "or auto,4,16: only S can be auto; got '5,auto,6'"),
        (["bench", "--num-prompts", "0"], "--num-prompts must be >= 1, got 0; nearest setting that works: --num-prompts=1"),
        (["bench", "--num-prompts", "-1"], "--num-prompts must be >= 1, got -1"),
        (["bench", "--max-tokens", "1"], "max_tokens must be >= 2"),
        (["bench", "--spec", "5,1,16"], "num_draft_tokens=6"),
        (["bench", "--batch-sizes", "1;8"], "expected numbers such as 1,8"),
        (["bench", "--target", "a", "--spec", "5,4,16"], "--spec would do nothing without --draft"),
        (["bench", "--target", "a", "--spec", "5,4,16", "--plot", "o.png"], "--spec, --plot would do nothing without --draft"),
        (["bench", "--top-p", "0.5"], "--top-p would do nothing at --temperature 0"),
        (["bench", "--json", "/no/such/folder/out.json"], "can't be written"),
        (["bench", "--prompts", "/no/such/file.jsonl"], "got no file at '/no/such/file.jsonl'"),
        (["bench", "--plot", "out.nonsense"], "--plot must end in one of"),
        (["bench", "--synthetic-acceptance", "0.8;0.7"], "expected probabilities such as 0.8,0.7,0.6, got '0.8;0.7'"),
        (["bench", "--synthetic-acceptance", "0.8,0.7"], "one probability a level, 5 for the shape 5,4,16; got 2"),
        (["bench", "--synthetic-acceptance", "1,1,1,1,-1"], "synthetic_acceptance[4] must be in [0.0, 1.0], got -1.0"),
        (["bench", "--synthetic-acceptance", "1,1,1,1,1", "--top-p", "1", "--seed", "3"], "--top-p would do nothing"),
        (["bench", "--profile", "--max-tokens", "9"], "--max-tokens 25"),
        (["bench", "--synthetic-acceptance", "1", "--target", "a"], "--synthetic-acceptance would do nothing without --draft"),
        (["bench", "--prompts", "/"], "got a folder at '/'"),
        (["bench", "--num-prompts", "2", "--batch-sizes", "99"], "got --num-prompts 2; nearest settings: --batch-sizes 2, or"),
        (["bench", "--repeats", "1.5"], "argument --repeats: expected a whole number, got '1.5'; nearest: 1"),
        (["train", "--call-seconds", "0.5"], "argument --call-seconds: expected a whole number, got '0.5'; nearest: 1"),
        (["verify", "--spec", "5,4,16", "--spec", "5,1,6"], "argument --spec: expected one value, got two"),
        (["plan", "--target", "a", "--gpu-memory", "80"], "got '80'; nearest: 80GB"),
        (["plan", "--target", "a", "--gpu-memory", "8GB", "--context", "0"], "--context must be >= 2, got 0"),
        (["plan", "--target", "a", "--gpu-memory", "8GB", "--batch", "0"], "--batch must be in [1, 4096], got 0"),
        (["inspect", "ngram"], "MODEL: 'ngram' is a drafter without files"),
        (["inspect", "suffix"], "MODEL: 'suffix' is a drafter without files"),
        (["generate", "--temperature", "1", "--top-p", "0", "hi"], "got 0.0; nearest setting that works: a top_p above 0"),
        (["generate", "--max-tokens", "abc", "hi"], "argument --max-tokens: expected a whole number, got 'abc'"),
        (["generate", "--temperature", "", "hi"], "argument --temperature: expected a number, got ''"),
        (["generate", "--max-tokens", "0", "hi"], "must be >= 1, got 0; nearest setting that works: --max-tokens 1\n"),
        (["verify", "--max-tokens", "-3"], "must be >= 2, got -3; nearest setting that works: --max-tokens 2\n"),
        (["generate", "--seed", "1", "hi"], "--seed would do nothing at --temperature 0"),
        (["generate", "--min-p", "0.1", "hi"], "--min-p would do nothing at --temperature 0"),
        (["generate", "--logit-bias", "5", "hi"], "expected ID=NUMBER such as 50=-100, got '5'"),
        (["generate", "--logit-bias", "5=1", "--logit-bias", "5=2", "hi"], "--logit-bias names a token twice"),
        (["generate", "--bad-word", "a", "--bad-word-ids", "5,6", "hi"], "works: all of them as ids"),
        (["generate", "--bad-word-ids", "5,a", "hi"], "argument --bad-word-ids: expected numbers such as 1,8, got '5,a'"),
        (["verify", "--stop", ""], "argument --stop: expected a name, got an empty value"),
        (["bench", "--synthetic-acceptance", "1,1,1,1,1", "--stop", "a"], "stop and stop_token_ids say where the target's own"),
        (["generate", "--min-tokens", "200", "hi"], "min_tokens must be at most max_tokens = 128, got 200"),
        (["generate", "--logprobs-mode", "processed", "hi"], "logprobs_mode would do nothing without logprobs"),
        (["generate", "--n", "0", "hi"], "n must be in"),
        (["generate", "--n", "3", "hi"], "--n 3 would print one text 3 times at --temperature 0"),
        (["generate", "--regex", "a", "--grammar", "start: x", "hi"], "regex and grammar both say what the text must be"),
        (["generate", "--json-schema", "/no/such/schema", "hi"], "expected JSON of an object, or a file that can be read"),
        (["generate", "--json-schema", "{", "hi"], "json_schema is not usable JSON"),
        (["generate", "--json-schema", '{"a":' * 3000 + "1" + "}" * 3000, "hi"], "json_schema is nested too deeply"),
        (["generate", "--regex", "", "hi"], "expected a regular expression, got an empty value"),
        (["generate", "--grammar", "", "hi"], "expected a grammar, got an empty value"),
        (["generate", "--grammar", "no_file.lark", "hi"], "or a file that can be read, got 'no_file.lark'"),
        (["generate", "--grammar", 'start "yes"', "hi"], "expected a grammar, which has a rule such as 'start: \"yes\"', or"),
        (["generate", "--json-schema", "[]", "hi"], "expected a JSON object, such as {}, or a file of one, got a list"),
        (["generate", "--json-schema", "true", "hi"], "expected a JSON object, such as {}, or a file of one, got 'true'"),
        (["generate", "--regex", "a", "--ignore-eos", "hi"], "ignore_eos would go on after the end that regex asks for"),
        (["generate", "--no-speculate", "--spec", "5,4,16", "hi"], "would do nothing with --no-speculate"),
        (["generate", "--target", "a", "--spec", "5,4,16", "hi"], "--spec would do nothing without --draft"),
        (["generate", "--target", "/no/such/model", "hi"], "expected an existing model folder or a hub id"),
        (["generate", "--target", "a", ""], "PROMPT is empty"),
        (["generate", "--target", "a", "caf\udce9"], "PROMPT is not UTF-8 text from character 3 on"),
    ],
)
def test_a_wrong_word_is_one_line(capsys, argv, said):
    """Keeps out: tracebacks for typing mistakes, pages of usage, flags that are ignored, hints at what a command lacks."""
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.startswith("specdec: error: ") and err.count("\n") == 1, err
    assert said in err


def test_an_absent_pair_says_what_to_give_instead(capsys, monkeypatch, tmp_path):
    """Keeps out: a file error from deep inside the loader when an installation lacks the pair."""
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    code, out, _ = run(capsys, "doctor")
    assert code == 0 and "incomplete" in out, "a doctor must not need the thing that it is asked about"
    for argv, flag in (
        (["bench"], "--target DIR"),
        (["bench", "--target", "a"], "--prompts FILE"),
        (["generate", "hi"], "--target DIR"),
    ):
        code, _, err = run(capsys, *argv)
        assert code == 2 and "is not in this installation" in err and flag in err
    assert not shipped.is_complete()


def test_a_plot_without_matplotlib_fails_before_the_run(capsys, monkeypatch):
    """Keeps out: minutes of measuring that end in an import error."""
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    code, _, err = run(capsys, "bench", "--plot", "out.png")
    assert code == 2 and "pip install matplotlib" in err and "specdec[" not in err


def test_interrupting_is_no_traceback(capsys):
    """Keeps out: forty lines of stack for Ctrl-C."""

    def interrupted(_):
        raise KeyboardInterrupt

    assert entry.run(command(interrupted)) == 130
    assert capsys.readouterr() == ("", "specdec: interrupted\n")


def test_interrupting_while_commands_are_imported_is_no_traceback(tmp_path):
    """Keeps out: Ctrl-C in the first tenths of a second that shows forty lines of imports."""
    code = (
        "import os, signal, sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'specdec.cli.flags': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "from specdec.cli import main\n"
        "sys.exit(main(['doctor']))\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "specdec: interrupted\n")


def test_a_warning_is_one_line_too(capsys):
    """Keeps out: a file name, a line number and a line of code where a user should read why transformers runs the target."""

    def warns(_):
        warnings.warn("backend='auto' takes\n transformers", stacklevel=2)
        return 0

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        before = warnings.showwarning
        assert entry.run(command(warns)) == 0
        assert warnings.showwarning is before
    assert capsys.readouterr() == ("", "specdec: warning: backend='auto' takes transformers\n")


def test_debugging_shows_where(monkeypatch):
    """Keeps out: a bug of ours that looks like a user's mistake and can't be found."""
    monkeypatch.setenv("SPECDEC_DEBUG", "1")
    with pytest.raises(ValueError, match="PROMPT is empty"):
        cli.main(["generate", "--target", "a", ""])


def test_doctor_says_what_runs_here(capsys, monkeypatch):
    """Keeps out: a doctor whose lines a terminal breaks, or that says nothing of a part."""
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = run(capsys, "doctor", "--details")
    assert (code, err) == (0, "")
    for word in ("Machine", "torch", "triton", "fa3", "why not", "attention", "Shipped pair"):
        assert word in out
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 80
    assert "nearest setting" not in " ".join(out.split()), "nobody asked for a setting that could be replaced"


@pytest.mark.slow
def test_doctor_runs_in_a_bare_process(tmp_path):
    """Keeps out: a doctor that dies without triton, flash-attn or matplotlib."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['matplotlib', 'flash_attn']));"
        "from specdec.cli import main; sys.exit(main(['doctor']))"
    )
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PATH": ""}
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@needs_pair
def test_generate_streams_the_text_and_nothing_else(capsys):
    """Keeps out: banners on stdout, a stream that differs from generate, stats where the text goes."""
    from specdec import SpecDecoder

    argv = ["generate", "Once upon a time", "--max-tokens", "24", "--device", "cpu"]
    code, out, err = run(capsys, *argv, "--stats")
    decoder = SpecDecoder.from_pretrained(shipped.target_folder(), device="cpu", max_batch_size=1)
    (plain,) = decoder.generate("Once upon a time", SamplingParams(max_tokens=24))
    assert (code, out) == (0, plain.text + "\n")
    assert "accept length" in err and "tok/s" in err and "start-up, first passes included: " in err
    assert "; no round ran\n" in run(capsys, *argv, "--max-tokens", "1", "--stats")[2]
    _, same, err = run(capsys, *argv, "--no-speculate", "--stats")
    assert same == out and "; plain decoding\n" in err and "target by" not in err
    _, same, err = run(capsys, *argv, "--no-speculate", "--backend", "transformers", "--stats")
    assert same == out and ", target by transformers; plain decoding\n" in err


@needs_pair
def test_generate_with_every_option(capsys):
    """Keeps out: a flag that is read and not handed on; log-probabilities and the line between texts where text goes."""
    from specdec import SpecDecoder

    base = ["generate", "The dog", "--max-tokens", "24", "--device", "cpu"]
    flags = {
        "--min-p": "0.3", "--repetition-penalty": "1.5", "--presence-penalty": "0.7", "--frequency-penalty": "0.9",
        "--logit-bias": "300=5", "--bad-word": " was", "--min-tokens": "7", "--temperature": "0.9", "--seed": "4", "--n": "2",
        "--logprobs": "1", "--logprobs-mode": "processed",
    }  # fmt: skip
    params = SamplingParams(
        24, 0.9, seed=4, min_p=0.3, repetition_penalty=1.5, presence_penalty=0.7, frequency_penalty=0.9, logit_bias={300: 5.0},
        bad_words=[" was"], min_tokens=7, n=2, logprobs=1, logprobs_mode="processed",
    )  # fmt: skip
    decoder = SpecDecoder.from_pretrained(shipped.target_folder(), shipped.draft_folder(), device="cpu")
    first, second = decoder.generate("The dog", params)
    code, out, err = run(capsys, *base, *[word for flag in flags.items() for word in flag])
    assert (code, out) == (0, f"{first.text}\n----\n{second.text}\n")
    lines = [line for line in err.splitlines() if not line.startswith("specdec")]
    assert len(lines) == len(first.token_ids) + len(second.token_ids)
    assert first.logprobs is not None and f"{first.logprobs[0].logprob:.4f}" in lines[0]


@pytest.mark.slow_cases(keep=0)
@needs_pair
def test_generate_reads_stdin_and_stops(capsys):
    """Keeps out: flags that parse and don't arrive."""
    code = (
        "import sys; from specdec import cli, startup; ended = cli.main(); "
        "print(*list(startup.STARTUP.stages)[:2], sep=', ', file=sys.stderr); sys.exit(ended)"
    )
    argv = [sys.executable, "-P", "-c", code, "generate", "--max-tokens", "40", "--stop", " ", "--device", "cpu"]
    done = subprocess.run(argv, input="Once upon a time\n", capture_output=True, text=True)
    assert done.returncode == 0 and " " not in done.stdout.rstrip("\n")
    assert "prompt from stdin" in done.stderr  # for which one may wait long: no seconds of imports
    assert run(capsys, "generate", "hi", "--chat", "--device", "cpu")[0] == 2  # the pair has no chat template
    sampled = [
        run(capsys, "generate", "The", "--temperature", "1", "--seed", seed, "--max-tokens", "20", "--device", "cpu")[1]
        for seed in ("1", "1", "2")
    ]
    assert sampled[0] == sampled[1] != sampled[2]


@pytest.mark.slow
@needs_pair
def test_bench_end_to_end(capsys, monkeypatch, tmp_path):
    """Keeps out: a report that needs a terminal, a JSON nobody can recompute, a plot that is no picture."""
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = run(
        capsys,
        "bench",
        *TINY,
        "--json",
        str(tmp_path / "o.json"),
        "--plot",
        str(tmp_path / "o.png"),
        pace=Pace(600.0, first=0.0),
    )
    assert code == 0 and err.startswith("specdec: bench: loading (0 s)\n")
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 80 and len(out.splitlines()) <= 40
    data = json.loads((tmp_path / "o.json").read_text())
    assert set(data["bench_seconds"]) == {"loading", "cells"}
    assert all({"decoder", "warm-up", "timed", "phases"} <= set(cell["bench_seconds"]) for cell in data["cells"])
    assert [cell["batch_size"] for cell in data["cells"]] == [1, 2]
    for cell in data["cells"]:
        assert cell["outputs"] == {"prompts": 2, "passes": 2, "differing": [], "is_synthetic": False, "empty": []}
        assert cell["baseline"]["output_tokens"] == cell["speculative"]["output_tokens"]
        assert cell["derived"]["speed_up"] > 0 and cell["derived"]["ms_per_round_by_phase"]["verify"] > 0
    assert len(data["prompts"]["sha256"]) == 64 and data["versions"]["torch"] and data["machine"]["cpu"]
    assert (tmp_path / "o.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow_cases(keep=0)
@needs_pair
def test_bench_profiles_and_plans(capsys, monkeypatch, tmp_path):
    """Keeps out: forced acceptance that some line forgets to mention, draws that no seed repeats, a profile of one kind."""
    from specdec.bench import byte_limit
    from specdec.bench import run as bench_run

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setitem(byte_limit.READ_BYTES, "cpu", 4 << 20)
    monkeypatch.setattr(bench_run, "profile_work", partial(bench_run.profile_work, rounds=5))
    order: list[str] = []
    for name in ("measure_cell", "read_bandwidth"):
        monkeypatch.setattr(bench_run, name, noted(getattr(bench_run, name), order))
    flags = ["--synthetic-acceptance", "1,0.5", "--seed", "5", "--max-tokens", "16"]
    more, found = ["--profile", "--details", "--explain", "--plot", str(tmp_path / "o.png")], []
    for name in ("a.json", "b.json"):
        code, out, err = run(
            capsys,
            "bench",
            *TINY,
            *flags,
            *(more if not found else ()),
            "--json",
            str(tmp_path / name),
            pace=Pace(600.0, first=0.0),
        )
        assert code == 0 and err.startswith("specdec: bench: loading")
        assert max(len(line.rstrip()) for line in out.splitlines()) <= 80
        found.append((json.loads((tmp_path / name).read_text()), out))
    (data, out), (again, _) = found
    assert out.count("SYNTHETIC") > 20 and "plain step, batch 2" in out and "SYNTHETIC: round 2,2,4, batch 2" in out
    assert data["synthetic_acceptance"] == [1.0, 0.5] and data["settings"]["sampling"]["ignore_eos"] is True
    assert [budget["spec"] for budget in data["budgets"]] == [None, [2, 2, 4], None, [2, 2, 4]]
    assert order[:3] == ["measure_cell"] * 2 + ["read_bandwidth"], "its tensor would be in the cells' peak"
    for budget in data["budgets"]:
        assert budget["bandwidth"] == data["machine"]["read_bandwidth"] > 0
        assert budget["derived"]["ms"] > 0 < budget["derived"]["byte_limit_ms"] and sum(budget["phases_ms"].values()) > 0
    counters = [cell["speculative"]["counters"] for cell in data["cells"]]
    assert all(c["accepted_by_depth"][0] == c["rounds"] for c in counters), "the first level is always accepted"
    assert counters == [cell["speculative"]["counters"] for cell in again["cells"]]


@pytest.mark.slow
@needs_pair
def test_bench_with_the_users_own_files(capsys, tmp_path):
    """Keeps out: defaults that come through where a flag was given."""
    prompts, out = tmp_path / "p.txt", tmp_path / "o.json"
    prompts.write_text("Once there was a dog\nA cat sat down\n")
    argv = ["--prompts", str(prompts), "--target", str(shipped.target_folder()), "--draft", str(shipped.draft_folder())]
    more = ["--temperature", "0.8", "--top-k", "20", "--page-size", "4", "--max-seq-len", "99", "--ignore-eos"]
    assert run(capsys, "bench", *TINY, *argv, *more, "--json", str(out))[0] == 0
    settings = json.loads(out.read_text())["settings"]
    assert (settings["page_size"], settings["max_seq_len"], settings["dtype"]) == (4, 99, "float32")
    assert settings["sampling"] == vars(SamplingParams(6, 0.8, top_k=20, seed=0, ignore_eos=True))
    assert run(capsys, "bench", *TINY, *argv, "--max-seq-len", "8")[0] == 2


@pytest.mark.slow
@needs_pair
def test_bench_fails_when_the_text_is_wrong(capsys, monkeypatch):
    """Keeps out: exit code 0, and a speed-up, for a verifier that lies."""
    from specdec.decoder import SpecDecoder

    honest = SpecDecoder.generate

    def lying(self, prompts, sampling=None, *, speculate=True):
        outputs = honest(self, prompts, sampling, speculate=speculate)
        if speculate:
            outputs[0].token_ids[3] ^= 1
        return outputs

    monkeypatch.setattr(SpecDecoder, "generate", lying)
    code, out, _ = run(capsys, "bench", *TINY, "--details")
    assert code == 1 and out.startswith("OUTPUTS DIFFER")
    assert "speed-up not shown: outputs differ (1 of 2 equal)" in out and "DIVERGED at output token 3" in out


def test_the_shipped_paths_are_inside_the_package():
    """Keeps out: paths that hold in a checkout and not in a wheel."""
    assert shipped.FOLDER == Path(cli.__file__).parents[1] / "pair"
