"""What a request says of tools: which there are, and which must or may be called.  The form is that of OpenAI's API.

Every fault is a ValueError or TypeError that begins with the name of what is wrong, such as tools[0].function.name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from specdec.checks import mark, nearest_name, shown
from specdec.grammar.keywords import held_part, schema_as_json

MAX_TOOLS = 128  # OpenAI's limit
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}  # where nobody says, as OpenAI
EXAMPLE = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
# Keywords of a schema that may allow properties besides those it names.
OPEN = {
    "additionalProperties", "unevaluatedProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf", "if",
    "dependentSchemas", "dependencies",
}  # fmt: skip
TOOL_FIELDS, FUNCTION_FIELDS = ("type", "function"), ("name", "description", "parameters", "strict")
Choice = Literal["none", "auto", "required"]


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.  parameters: a JSON schema of an object.  given: how the template is told of it."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: NOTHING, hash=False)
    given: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class ToolRules:
    """Which tools there are.  choice: whether one may be, or must be called.  names: of those that may be; None: all.

    several: whether an answer may call more than one.
    """

    tools: tuple[Tool, ...] = ()
    choice: Choice = "auto"
    names: tuple[str, ...] | None = None
    several: bool = True

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """Those that an answer may call."""
        if self.choice == "none":
            return ()
        return tuple(tool for tool in self.tools if self.names is None or tool.name in self.names)

    @property
    def for_template(self) -> list[Mapping[str, Any]] | None:
        """What the chat template is told; None: of no tool."""
        return [tool.given for tool in self.tools] if self.tools and self.choice != "none" else None


def read_rules(tools: Any, choice: Any = None, several: Any = None) -> ToolRules:
    """The rules of OpenAI's fields `tools`, `tool_choice` and `parallel_tool_calls`; None: the field was left out."""
    read = () if tools is None else _tools(tools)
    if several is not None and not isinstance(several, bool):
        raise _fault(TypeError, "parallel_tool_calls", f"must be true or false, got {shown(several)}")
    mode, names = _choice(choice, read)
    if mode != "none" and choice is not None and not read and choice != "auto":
        fault = f"is {shown(choice)}, but there are no tools; nearest setting that works: 'none'"
        raise _fault(ValueError, "tool_choice", fault)
    return ToolRules(read, mode if read else "none", names, several is not False)


def _tools(value: Any) -> tuple[Tool, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise _fault(TypeError, "tools", f"must be a list of {EXAMPLE}, got {shown(value)}")
    if len(value) > MAX_TOOLS:
        raise _fault(ValueError, "tools", f"must hold at most {MAX_TOOLS}, got {len(value)}")
    read = tuple(_tool(each, f"tools[{index}]") for index, each in enumerate(value))
    for index, tool in enumerate(read):
        if tool.name in {other.name for other in read[:index]}:
            where = f"tools[{index}].function.name"
            raise _fault(ValueError, where, f"must be another name than {tool.name!r}, which is taken")
    return read


def _tool(value: Any, name: str) -> Tool:
    kind = value.get("type", "function") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or kind != "function" or not isinstance(value.get("function"), Mapping):
        other = f", got one of type {kind!r}, which no model here can call" if kind not in (None, "function") else ""
        raise _fault(ValueError, name, f"must be {EXAMPLE}{other or f', got {shown(value)}'}")
    function = value["function"]
    _only(value, TOOL_FIELDS, name)
    _only(function, FUNCTION_FIELDS, f"{name}.function")
    called = function.get("name")
    if not isinstance(called, str) or not NAME.fullmatch(called):
        said = f"must be 1 to 64 letters, digits, underscores, dots and hyphens, got {shown(called)}"
        near = re.sub("[^a-zA-Z0-9_.-]", "_", called)[:64] if isinstance(called, str) and called else "get_weather"
        raise _fault(ValueError, f"{name}.function.name", f"{said}; nearest setting that works: {near!r}")
    for key, kinds, what in (("description", str, "a text"), ("strict", bool, "true or false")):
        if (held := function.get(key)) is not None and not isinstance(held, kinds):
            raise _fault(TypeError, f"{name}.function.{key}", f"must be {what}, got {shown(held)}")
    parameters = function.get("parameters")
    is_strict = function.get("strict") is True
    checked = NOTHING if parameters is None else _schema(parameters, f"{name}.function.parameters", is_strict)
    # Templates write a description and parameters without asking whether there are any.
    told = {"description": "", "parameters": NOTHING, **{key: held for key, held in function.items() if held is not None}}
    return Tool(called, checked, {"type": "function", "function": told})


def _schema(value: Any, name: str, is_strict: bool) -> Mapping[str, Any]:
    """The schema as arguments are held to it: whatever of it can't be held is an error later, where it is strict."""
    try:
        value = json.loads(schema_as_json("json_schema", value))
    except (TypeError, ValueError) as error:
        raise _fault(type(error), name, str(error).removeprefix("json_schema ")) from None
    is_open = "properties" not in value or not OPEN.isdisjoint(value)
    if not is_strict:
        value = held_part(value)
    if value == {}:
        return NOTHING
    kind = value.get("type", "object")
    if kind != "object":
        raise _fault(ValueError, name, f"must be the schema of an object, got the type {shown(kind)}; nearest: 'object'")
    if is_open:
        return {"type": "object", **value}
    return {"type": "object", **value, "additionalProperties": False}  # a function takes no argument that it does not name


def _choice(value: Any, tools: Sequence[Tool]) -> tuple[Choice, tuple[str, ...] | None]:
    if value is None:
        return "auto", None
    if isinstance(value, str):
        if value not in ("none", "auto", "required"):
            near = "required" if value == "any" else nearest_name(value, ["none", "auto", "required"]) or "auto"
            said = f"must be 'none', 'auto', 'required' or a named function, got {value[:100]!r}"
            raise _fault(ValueError, "tool_choice", f"{said}; nearest setting that works: {near!r}")
        return value, None  # type: ignore[return-value]
    if isinstance(value, Mapping) and value.get("type") == "function":
        return "required", (_called(value, "tool_choice", tools),)
    if isinstance(value, Mapping) and value.get("type") == "allowed_tools":
        held = value.get("allowed_tools")
        if isinstance(held, Mapping) and held.get("mode") in ("auto", "required") and isinstance(held.get("tools"), list):
            where = "tool_choice.allowed_tools.tools"
            names = tuple(_called(each, f"{where}[{index}]", tools) for index, each in enumerate(held["tools"]))
            if names:
                return held["mode"], names
    expected = 'must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}'
    raise _fault(ValueError, "tool_choice", f"{expected}, got {shown(value)}")


def _called(value: Any, name: str, tools: Sequence[Tool]) -> str:
    """The name of a tool that a choice names."""
    function = value.get("function") if isinstance(value, Mapping) else None
    called = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(called, str):
        expected = 'must be {"type": "function", "function": {"name": ...}}'
        raise _fault(ValueError, name, f"{expected}, got {shown(value)}")
    known = [tool.name for tool in tools]
    if called not in known:
        near = nearest_name(called, known) or (known[0] if known else "none")
        fault = f"names {called[:100]!r}, which is none of the tools; nearest setting that works: {near!r}"
        raise _fault(ValueError, f"{name}.function.name", fault)
    return called


def _only(value: Mapping[str, Any], known: Sequence[str], name: str) -> None:
    for key in value:
        if key not in known:
            near = nearest_name(str(key)[:100], list(known)) or "leave it out"
            raise _fault(ValueError, f"{name}.{str(key)[:100]}", f"is not supported: there is no such field; nearest: {near}")


def _fault(kind: type[Exception], name: str, said: str) -> Exception:
    """An error that begins with the name, and is marked with it."""
    error = kind(f"{name} {said}")
    mark(error, name)
    return error
