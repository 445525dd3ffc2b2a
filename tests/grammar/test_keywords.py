"""Keywords of JSON schemas: those that exist are taken, and misspelled ones are named, wherever they stand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specdec import SamplingParams
from specdec.grammar.keywords import BY_NAME, IN_A_ROW, KNOWN, SCHEMAS

WRONG = {"type": "string", "maxlength": 3}


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (WRONG, "unknown keyword 'maxlength' at #; .* nearest setting that works: maxLength$"),
        ({"type": "object", "propertes": {}}, "'propertes' at #; .* works: properties$"),
        (
            {"properties": {"age": {"type": ["integer"], "nullable": "yes"}}},
            r"true or false for nullable at #/properties/age, got 'yes'; .*, .null",
        ),
        ({"type": "string", "zzz": 1}, "'zzz' at #; .* works: leave it out$"),
        ({"type": "object", "x-guidance": 5}, "must have an object for x-guidance, .* got 5; .* works: leave it out$"),
        ({"x-guidance": None}, "must have an object for x-guidance, .* got None"),
        ({"properties": {"a": {"x-guidance": {"lenient": True}}}}, "x-guidance at #/properties/a, where it would do nothing"),
        ({"name": "pet", "schema": {"type": "object"}}, "must be the schema itself, .* works: what 'schema' holds$"),
        ({"$defs": {"a": {"anyOf": [{}, {"items": WRONG}]}}}, "'maxlength' at #/[$]defs/a/anyOf/1/items; "),
    ],
)
def test_misspelled_keywords_are_named(schema: dict[str, Any], said: str) -> None:
    """Keeps out: a text that a schema holds to less than its author thinks."""
    with pytest.raises(ValueError, match=said):
        SamplingParams(json_schema=schema)


def test_keywords_are_found_wherever_schemas_stand() -> None:
    """Keeps out: a place for schemas that nobody looks at."""
    held: list[dict[str, Any]] = [{name: {"own": WRONG}} for name in BY_NAME] + [{name: [{}, WRONG]} for name in IN_A_ROW]
    for schema in held + [{name: WRONG} for name in SCHEMAS]:
        with pytest.raises(ValueError, match="maxlength"):
            SamplingParams(json_schema=schema)


def test_what_is_no_keyword_is_left_alone() -> None:
    """Keeps out: names of properties, values and annotations that are taken for keywords; a schema too deep to be looked at."""
    for name in KNOWN:
        SamplingParams(json_schema={name: {} if name in BY_NAME else [] if name in IN_A_ROW else True})
    taken: list[dict[str, Any]] = [
        {"properties": {"maxlength": {"type": "string"}, "schema": {}, "x-guidance": {}}, "required": ["maxlength"]},
        {"enum": [WRONG], "default": WRONG, "const": WRONG, "examples": [WRONG]},
        {"type": "string", "x-order": 3},
        {**WRONG, "x-guidance": {"lenient": True}},
        {"dependencies": {"a": ["b"]}, "items": [True, {}], "additionalProperties": False},
    ]
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(300):
        deep = {"type": "array", "items": deep}
    for schema in [*taken, deep]:
        assert json.loads(str(SamplingParams(json_schema=schema).json_schema)) == schema


def test_nullable_becomes_a_type() -> None:
    """As smolagents writes optional arguments.  Keeps out: an agent that can't run at all, null where nobody allowed it, and a
    property called so that is lost."""
    text = {"type": "string", "nullable": True}
    held = {"a": text, "b": {"type": ["integer", "null"], "nullable": True}, "c": {"type": "string", "nullable": False}}
    given = {"type": "object", "properties": {**held, "nullable": {"enum": [text]}, "d": {"items": {**text, "title": "T"}}}}
    or_null = {"type": ["string", "null"]}
    expected = {"a": or_null, "b": {"type": ["integer", "null"]}, "c": {"type": "string"}, "nullable": {"enum": [text]}}
    for schema in (given, json.dumps(given)):
        read = json.loads(str(SamplingParams(json_schema=schema).json_schema))["properties"]
        assert read == {**expected, "d": {"items": {**or_null, "title": "T"}}}
    assert given["properties"]["a"] is text and "nullable" in text  # type: ignore[index]  # the caller's own is as it was
