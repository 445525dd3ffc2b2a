"""Schemas and values that a format which writes arguments one by one can't take: named at the door, or read as text."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from specdec.chat.formats.pythonic import PYTHONIC
from specdec.chat.formats.tagged import GLM, QWEN_XML
from specdec.chat.lark import LarkWriter
from specdec.chat.said import Said, ToolFormat
from specdec.chat.tools import Tool


def tool(**schema: Any) -> Tool:
    return Tool("f", {"type": "object", **schema})


@pytest.mark.parametrize(
    ("form", "schema", "fault"),
    [
        (PYTHONIC, {"properties": []}, r"of 'f' must have an object for 'properties' .*, got \[\] and \[\]; nearest"),
        (GLM, {"properties": {}, "required": 5}, "a list for 'required', got {} and 5; nearest"),
        (GLM, {"properties": {"a</arg_key>": {}}}, "'a</arg_key>' of 'f' holds '</arg_key>' .*; nearest"),
        (QWEN_XML, {"properties": {"a>b": {}}}, "'a>b' of 'f' holds '>' .*; nearest"),
        (QWEN_XML, {"properties": {"a": {"enum": ["x</parameter>"]}}}, "'a' of 'f' holds '</parameter>' .*; nearest"),
    ],
)
def test_a_schema_that_can_not_be_written_is_named(form: ToolFormat, schema: dict[str, Any], fault: str) -> None:
    """Keeps out: an internal error, or calls that can't be read because a mark ends a name too early."""
    with pytest.raises(ValueError, match=fault):
        form.after([tool(**schema)], True, LarkWriter({}))


@pytest.mark.parametrize("schema", [{"type": ["string", {}]}, {"enum": "ab", "type": "string"}, {"anyOf": [{}], "oneOf": 5}])
def test_what_the_library_refuses_gets_to_it(schema: dict[str, Any]) -> None:
    """Keeps out: "unhashable type", and an enum whose letters are taken for its choices."""
    assert json.dumps(schema)[1:-1] in GLM.after([tool(properties={"x": schema})], True, lark := LarkWriter({})) + lark.written(
        ""
    )


def test_references_that_branch_end_soon() -> None:
    """Keeps out: a request that holds a thread for hours, since each step of a reference has three more."""
    branching = {"anyOf": [{"$ref": "#/$defs/a"}] * 3}
    began = time.monotonic()
    GLM.after([tool(properties={"x": {"$ref": "#/$defs/a"}}, **{"$defs": {"a": branching}})], True, LarkWriter({}))
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0e5", 0.0), ("-00.5", -0.5), ("007", 7), (r'"\ud800"', "\ud800"), ("1e999", None), ("9" * 5000, None),
        ("[" * 5000, None),
    ],
)  # fmt: skip
def test_odd_values_are_read_or_left_over(text: str, value: Any) -> None:
    """Keeps out: an answer that fails because of a number or half of a character that the model wrote, and Infinity as JSON."""
    reads = ((PYTHONIC, f"x={text})]"), (GLM, f"f<arg_key>x</arg_key><arg_value>{text}</arg_value></tool_call>"))
    for form, written in reads:
        if form is GLM and text in ("-00.5", "007"):
            continue  # no JSON
        reader = form.reader([tool(properties={"x": {}})], form.markers([tool()])[0])
        said = reader.feed(written) + reader.finish()
        if value is None:
            assert said == [] and reader.leftover == written
        else:
            call, arguments = said
            assert call == Said("call", "f") and json.loads(arguments.text) == {"x": value}
            arguments.text.encode()
