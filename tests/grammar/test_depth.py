"""Depth of schemas and grammars: what would end the whole process is refused before the library reads it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from toolkit.checkpoints.tokenizers import byte_tokenizer

from specdec.config import GrammarKind
from specdec.grammar.depth import MAX_DEPTH, check_depth
from specdec.grammar.library import MAX_REASON, Grammars


def chained(step: Any, count: int, **more: Any) -> str:
    """A schema whose parts refer to each other in a row.  step: makes a part of a reference to the next one."""
    parts = {f"a{i}": step(f"#/$defs/a{i + 1}") for i in range(count)} | {f"a{count}": {"type": "string"}}
    return json.dumps({"$defs": parts, "$ref": "#/$defs/a0", **more})


def rules(count: int) -> str:
    return "start: r0\n" + "".join(f'r{i}: "a" r{i + 1}?\n' for i in range(count)) + f'r{count}: "b"\n'


DEEP: list[tuple[GrammarKind, str]] = [
    ("grammar", rules(20000)),
    ("grammar", "".join(f'r{i} ::= "a" r{i + 1}\n' for i in range(20000)) + 'r20000 ::= "b"\nroot ::= r0\n'),
    ("grammar", f"start: %json {chained(lambda ref: {'$ref': ref}, 5000)}\n"),
    ("json_schema", chained(lambda ref: {"type": "object", "properties": {"x": {"$ref": ref}}}, 5000)),
    ("json_schema", chained(lambda ref: {"anyOf": [{"$ref": ref}, {"$ref": "#"}]}, 5000)),
    ("json_schema", chained(lambda ref: {"$ref": ref.replace("#/$defs/", "#"), "$anchor": "z"}, 5000)),
    ("json_schema", chained(lambda ref: {"$ref": ref.replace("$", "%24")}, 5000)),
]


@pytest.mark.parametrize(("kind", "text"), DEEP, ids=[f"{kind}{number}" for number, (kind, _) in enumerate(DEEP)])
def test_a_deep_chain_is_refused(kind: GrammarKind, text: str) -> None:
    """Keeps out: one request that ends the server, since the library follows such a chain until the stack is full."""
    with pytest.raises(ValueError, match=rf"^{kind} can't be used: .* nest up to \d+ levels .* at most {MAX_DEPTH}; nearest"):
        check_depth(kind, text)


def test_what_is_not_deep_is_taken() -> None:
    """Keeps out: a refusal of many parts side by side, of recursive ones, and of chains that the library bears."""
    wide = {
        "$defs": {f"a{i}": {"type": "string"} for i in range(3000)},
        "anyOf": [{"$ref": f"#/$defs/a{i}"} for i in range(3000)],
    }
    tree = {"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}}
    for kind, text in (("json_schema", json.dumps(wide)), ("json_schema", json.dumps(tree)), ("regex", "(" * 5000)):
        check_depth(kind, text)  # type: ignore[arg-type]
    inner = byte_tokenizer(300)
    grammars = Grammars(inner.backend_tokenizer.to_str, 300, [2])
    grammars.check("grammar", rules(MAX_DEPTH - 10))
    grammars.check("json_schema", chained(lambda ref: {"$ref": ref}, MAX_DEPTH - 10))


def test_a_refusal_is_short() -> None:
    """Keeps out: an error that repeats megabytes of what was given."""
    grammars = Grammars(byte_tokenizer(300).backend_tokenizer.to_str, 300, [2])
    kinds: list[tuple[GrammarKind, str]] = [("regex", "(" * 100_000), ("grammar", "start: " + "(" * 100_000)]
    for kind, text in kinds:
        with pytest.raises(ValueError, match=f"^{kind} can't be used: ") as caught:
            grammars.check(kind, text)
        assert len(str(caught.value)) < MAX_REASON + 200
