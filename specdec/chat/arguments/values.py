"""Arguments that a format writes one by one, some of them as they are, without the quotes of JSON.

Which ones are written so follows from their schemas, for a grammar and a reader alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from specdec.chat.arguments.literals import json_value
from specdec.chat.lark import LarkWriter, joined, one_of
from specdec.chat.tools import Tool
from specdec.checks import shown

BOUND = ("pattern", "format", "minLength", "maxLength", "enum", "const", "contentEncoding", "contentMediaType")
UNIONS = ("anyOf", "oneOf")
MAX_REFS, MAX_BRANCHES = 32, 256


@dataclass(frozen=True)
class Parameter:
    """One parameter of a function.

    schema: its own, which stands alone.  types: of the JSON that it may be; None: of any.
    is_plain: whether a text is written as it is.  choices: the only texts that it may be; None: there are others.
    """

    name: str
    schema: Mapping[str, Any]
    is_required: bool
    types: frozenset[str] | None
    is_plain: bool
    choices: tuple[str, ...] | None = None

    def value_of(self, text: str) -> Any:
        """The value that a text stands for.  ValueError if it should be JSON and is not."""
        if self.is_plain:
            return None if text == "null" and self.types is not None and "null" in self.types else text
        return json_value(text)

    def expression(self, before_end: str, end: str, lark: LarkWriter) -> str:
        """What matches a value and the mark after it.

        before_end: what stands between them, where that can't be part of a text.
        """
        if self.choices is not None:
            return joined(one_of(lark.text(each) for each in self.choices), lark.text(before_end + end))
        if self.is_plain:
            return lark.text_before(end)
        return joined(lark.json(self.schema), lark.text(before_end + end))


def parameters_of(tool: Tool) -> list[Parameter]:
    """The parameters in the order of the schema.  ValueError, with the tool's name, where the schema has none by name.

    What else is wrong with a parameter's schema the grammar's library says.
    """
    schema = tool.parameters
    if odd := [key for key in ("anyOf", "oneOf", "allOf", "$ref", "patternProperties") if key in schema]:
        raise ValueError(
            f"the parameters of {tool.name!r} hold {odd[0]}, which this model's format of calls can't write; nearest thing "
            "that works: an object with properties"
        )
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list | tuple):
        raise ValueError(
            f"the parameters of {tool.name!r} must have an object for 'properties' and a list for 'required', got "
            f"{shown(properties)} and {shown(required)}; nearest setting that works: {{}} and []"
        )
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return [
        _parameter(name, {**(held if isinstance(held, Mapping) else {}), **shared}, name in required)
        for name, held in properties.items()
    ]


def all_in_order(parameters: Sequence[Parameter], expressions: Sequence[str], between: str, lark: LarkWriter) -> str:
    """What matches the required parameters and any of the others, in their order.  between: two of them; may be empty.

    expressions: of each parameter.
    """
    if not between:
        return joined(*(each if of.is_required else f"({each})?" for of, each in zip(parameters, expressions, strict=True)))
    more = first = ""  # what may follow some parameter, and what may follow none
    for of, each in reversed(list(zip(parameters, expressions, strict=True))):
        here = lark.named(each, "arg")
        begun, later = joined(here, more), joined(between, here)
        if of.is_required:
            first, more = begun, joined(later, more)
        else:
            first = f"({begun} | {first})" if first else f"({begun})?"
            more = joined(f"({later})?", more)
        first, more = (lark.named(text, "args") if text else "" for text in (first, more))
    return first


def _parameter(name: str, schema: Mapping[str, Any], is_required: bool) -> Parameter:
    branches = list(islice(_branches(schema, schema, MAX_REFS), MAX_BRANCHES + 1))
    if len(branches) > MAX_BRANCHES:  # references double them at each step
        branches = [{}]
    found = [_types(branch) for branch in branches]
    types = None if any(each is None for each in found) else frozenset().union(*(each or () for each in found))
    is_text = types is not None and "string" in types and types <= {"string", "null"}
    if (
        is_text
        and types == frozenset(["string"])
        and len(branches) == 1
        and isinstance(branches[0].get("enum"), list)
        and not any(key in branches[0] for key in BOUND if key != "enum")
    ):
        return Parameter(name, schema, is_required, types, True, tuple(branches[0]["enum"]))
    is_plain = is_text and not any(key in branch for branch in branches for key in BOUND)
    return Parameter(name, schema, is_required, types, is_plain)


def _branches(schema: Any, root: Mapping[str, Any], left: int) -> Iterator[Mapping[str, Any]]:
    """What a schema may be, with references followed; an empty one for what is not understood."""
    if not isinstance(schema, Mapping) or left == 0:
        yield {}
    elif isinstance(schema.get("$ref"), str):
        held: Any = root
        for part in schema["$ref"].removeprefix("#/").split("/"):
            held = held.get(part) if isinstance(held, Mapping) else None
        yield from _branches(held, root, left - 1)
    elif any(isinstance(schema.get(key), list) for key in UNIONS):
        for key in UNIONS:
            for each in schema[key] if isinstance(schema.get(key), list) else ():
                yield from _branches(each, root, left - 1)
    else:
        yield schema


def _types(schema: Mapping[str, Any]) -> frozenset[str] | None:
    if "allOf" in schema or "not" in schema or "if" in schema:
        return None
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else None
    if values is not None:
        return frozenset("string" if isinstance(each, str) else "null" if each is None else "other" for each in values)
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset([kind])
    return frozenset(map(str, kind)) if isinstance(kind, list) else None
