"""Traces as data, as a page and as text."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from toolkit.serving.traces import drawn_trace

from specdec import SamplingParams, SpecConfig, SpecDecoder, cli, shipped
from specdec.generation import NodeTable, Round
from specdec.trace.as_text import as_text
from specdec.trace.html import as_html
from specdec.trace.trace import Trace, TracedText


@pytest.fixture(scope="module")
def decoder() -> Iterator[SpecDecoder]:
    settings: dict[str, Any] = {"device": "cpu", "max_batch_size": 4, "max_seq_len": 128, "smoke": False}
    with SpecDecoder.from_pretrained(shipped.target_folder(), shipped.draft_folder(), SpecConfig(5, 4, 16), **settings) as made:
        yield made


@pytest.fixture(scope="module")
def trace(decoder: SpecDecoder) -> Trace:
    return decoder.trace(["Once upon a time", [1, 403, 407]], SamplingParams(max_tokens=24, temperature=0.8))


def test_pieces_are_the_text(trace: Trace, decoder: SpecDecoder) -> None:
    """Keeps out: a page that shows another text than the decoder wrote, a seed that the second run does not have."""
    first = trace.texts[0]
    assert first.prompt + first.text == decoder.tokenizer.decode([*decoder.encode(first.prompt), *first.tokens])
    assert len(first.times) == len(first.rounds) and not trace.texts[1].times
    assert all(
        {*each.phases} == {"draft", "verify", "extend"} and each.wall >= sum(each.phases.values()) for each in first.times
    )


def test_a_second_run_of_other_rounds_is_called_so(trace: Trace) -> None:
    """Keeps out: times that stand beside rounds which they are not of: the first run's answer is a source of the second."""
    assert "times" not in trace.about
    drafts, settings = [str(shipped.draft_folder()), "answers"], {"device": "cpu", "max_seq_len": 128, "smoke": False}
    with SpecDecoder.from_pretrained(shipped.target_folder(), drafts, SpecConfig(2, 1, 9, max_depth=8), **settings) as learns:
        made = learns.trace("Once upon a time", SamplingParams(max_tokens=24))
    (text,) = made.texts
    assert len(text.times) < len(text.rounds)
    wanted = f"of other rounds than these: {len(text.times)} with .* in place of {len(text.rounds)} with "
    assert re.match(wanted, made.about["times"]) and made.about["times"] in as_html(made)


def test_the_text_names_sources() -> None:
    """Keeps out: nodes whose source nobody sees, and one that is counted though its node was not taken."""
    trace = drawn_trace(random.Random(3), 1)
    (text,) = trace.texts
    lines = [*as_text(trace)]
    nodes = [source for each in text.rounds for source in each.sources[1:]]
    assert any(nodes)
    for name in {*nodes} - {""}:
        assert sum(name in line.split() for line in lines[2:]) >= sum(node == name for node in nodes)
    taken = Counter(each.sources[node] for each in text.rounds if each.sources for node in each.path[1:])
    assert lines[1] == "accepted " + ", ".join(f"{count} from {name}" for name, count in taken.most_common())


def test_json_keeps_all() -> None:
    """Keeps out: what is lost or changed on the way into a file and back."""
    for seed in range(20):
        made = drawn_trace(random.Random(seed), 3)
        again = Trace.from_json(made.as_json())
        assert again.as_json() == made.as_json() and again.pieces == made.pieces and again.about == made.about
        for one, other in zip(again.texts, made.texts, strict=True):
            assert [each.sources for each in one.rounds] == [each.sources for each in other.rounds]
            assert [each.tree[:4] for each in one.rounds] == [each.tree[:4] for each in other.rounds]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda held: held.pop("format"), "is no trace"),
        (lambda held: held.update(version=2), "version 2"),
        (lambda held: held.pop("texts"), "'texts' is missing"),
        (lambda held: held["texts"][0].update(tokens="abc"), "whole numbers"),
        (lambda held: held["texts"][0]["pieces"].pop(), "differ in length"),
        (lambda held: held["texts"][0].update(finish="soon"), "finish"),
        (lambda held: held["texts"][0]["rounds"][0]["parents"].append(0), "columns differ"),
        (lambda held: held["texts"][0]["rounds"][0].update(accepted=99), "outside of its text"),
        (lambda held: held["texts"][0]["rounds"][0]["chosen"].__setitem__(0, 999_999), "did not choose"),
        (lambda held: held["texts"][0]["rounds"][0]["parents"].__setitem__(1, 5), "comes too late"),
        (lambda held: held["texts"][0]["rounds"][0]["scores"].__setitem__(1, "high"), "a number"),
        (lambda held: held["texts"][0]["rounds"][0]["scores"].__setitem__(1, 1000), "logarithms, at most 0, got 1000"),
        (lambda held: held.update(about=None), "expected an object, got None"),
        (lambda held: held.update(texts={}), "expected a list"),
        (lambda held: held["texts"].append([]), "expected an object"),
    ],
)
def test_damaged_json_is_named(trace: Trace, change: Any, said: str) -> None:
    """Keeps out: a page without its tree, or a script's error, in place of what is wrong with the file."""
    held = json.loads(trace.as_json())
    change(held)
    with pytest.raises(ValueError, match=said):
        Trace.from_json(json.dumps(held), "x.json")


def test_a_trace_stays_where_it_is(trace: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: a page that takes the place of the trace it was made of; a traceback of JSON in JSON in JSON."""
    kept = tmp_path / "kept.json"
    kept.write_text(trace.as_json())
    assert cli.main(["trace", str(kept), "--out", str(kept)]) != 0
    said = capsys.readouterr().err
    assert "--out" in said and "kept.html" in said and kept.read_text() == trace.as_json()
    with pytest.raises(ValueError, match="nested too deeply"):
        Trace.from_json("[" * 100_000)


class Elements(HTMLParser):
    """The names of all elements, and the texts of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names, self.scripts = list[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.names.append(tag)

    def handle_data(self, data: str) -> None:
        if self.names and self.names[-1] == "script":
            self.scripts.append(data)


def test_texts_stay_texts_in_the_page(trace: Trace) -> None:
    """Keeps out: a prompt that ends the script's element, brings elements of its own, or is taken for a mark of the page."""
    usual, page = Elements(as_html(trace)), as_html(drawn_trace(random.Random(1), 4))
    found = Elements(page)
    assert found.names == usual.names and found.names.count("script") == 2
    assert json.loads(found.scripts[0]) == json.loads(drawn_trace(random.Random(1), 4).as_json())
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "") and "https://" not in page


def test_two_thousand_tokens_are_less_than_3_mb(tmp_path: Path) -> None:
    """Keeps out: a page too large to send, also where each of 60 nodes of each round was rejected."""
    chance = random.Random(3)
    tree = NodeTable(
        [chance.randrange(90_000, 99_999) for _ in range(60)],
        [max(0, n - 1) for n in range(60)],
        [chance.randrange(10_000, 89_999) for _ in range(60)],
        [-3.142] * 60,
        [0] * 60,
    )
    rounds = [Round(n, 0, tree) for n in range(1, 2000)]
    text = TracedText("a prompt", 2, [12_345] * 2000, [" word"] * 2000, [0] * 2000, "length", rounds)
    Trace({}, {n: " word" for n in {*tree.tokens, *tree.chosen}}, [text]).save_html(tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 3_000_000


def test_every_node_has_its_line() -> None:
    """Keeps out: a branch that is left out or stands elsewhere, sources of another node, by reading the lines back."""
    for seed in range(30):
        made = drawn_trace(random.Random(seed), 1)
        made.pieces.update({n: f"t{n}" for n in range(120)})
        lines, text = list(as_text(made)), made.texts[0]
        starts = [i for i, line in enumerate(lines) if line.startswith("round ")]
        for each, begin, end in zip(text.rounds, starts, [*starts[1:], len(lines)], strict=True):
            tree, above, found, of_nodes = each.tree, list[str](), list[tuple[int, str, str]](), Counter[str]()
            accepted = Counter(each.sources[n] for n in each.path[1:] if each.sources)
            assert all(f"{count} by {name}" in lines[begin] for name, count in accepted.items())
            assert lines[begin].count(" by ") == len(accepted)
            for line in lines[begin + 1 : end]:
                name = line.lstrip("\u2502\u251c\u2514\u2500 ")
                if not name:
                    continue
                depth = (len(line) - len(name)) // 3
                above = [*above[:depth], name.split("'")[1]]
                found.append((depth, name.split("'")[1], above[depth - 1] if depth else ""))
                of_nodes.update({"drafter", "suffix", "drafter+suffix"} & {*name.split()})
            depths = [0]
            for n in range(1, len(tree.tokens)):
                depths.append(depths[tree.parents[n]] + 1)
            end_node = each.path[-1]
            wanted = [(depths[n], f"t{t}", f"t{tree.tokens[tree.parents[n]]}" if n else "") for n, t in enumerate(tree.tokens)]
            wanted.append((depths[end_node] + 1, f"t{tree.chosen[end_node]}", f"t{tree.tokens[end_node]}"))
            assert sorted(found) == sorted(wanted) and of_nodes == Counter(filter(None, each.sources))


def test_json_is_utf_8_everywhere(tmp_path: Path) -> None:
    """Keeps out: a trace in the encoding of the machine that made it, which another one reads wrong, or none at all."""
    made, again = drawn_trace(random.Random(3), 3), tmp_path / "again.json"
    (kept := tmp_path / "kept.json").write_text(made.as_json(), encoding="utf-8")
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-P", "-m", "specdec.cli", "trace", str(kept), "--json", str(again)]
    assert subprocess.run(command, env=plain, capture_output=True, text=True).returncode == 0
    assert again.read_bytes() == kept.read_bytes()


def test_sources_keep_their_order() -> None:
    """Keeps out: a kept trace that calls "drafter+suffix" "suffix+drafter", since the suffix alone stands before."""
    tree = NodeTable([5, 6, 7, 8], [0, 0, 0, 0], [6, 1, 1, 1], [], [0, 2, 3, 4])
    rounds = [Round(1, 1, tree, ("drafter", "suffix", "prediction"))]
    made = Trace({}, {}, [TracedText("", 1, [5, 6, 1], ["", "", ""], [0, 1, 0], "eos", rounds)])
    assert Trace.from_json(made.as_json()).as_json() == made.as_json()
    with pytest.raises(ValueError, match="trace is damaged"):
        Trace.from_json(made.as_json().replace('"suffix","drafter+suffix"', '"suffix+drafter","drafter+suffix"'))
