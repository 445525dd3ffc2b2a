"""The tools of /v1/responses as a chat has them.  What is wrong with a function the chat's reader says.

A namespace is a group of functions, which a chat knows as `namespace.function`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.checks import shown
from specdec.serve.wire.errors import wrong
from specdec.serve.wire.fields import only_used

FUNCTION = ("type", "name", "description", "parameters", "strict")
NAMESPACE = ("type", "name", "description", "tools")
OFFLINE = "external_web_access"  # false: a search among pages that a server has kept, and this one keeps none


def read_tools(value: Any) -> list[dict[str, Any]]:
    """The functions.  ApiError 400 for a tool that a server would have to run itself."""
    if not isinstance(value, list):
        raise wrong("tools", f"tools must be a list, got {shown(value)}")
    return [tool for index, each in enumerate(value) for tool in _functions(each, f"tools[{index}]")]


def namespaces_of(tools: Any) -> dict[str, str]:
    """The namespace of each function that has one, by the name that a chat knows.  tools: those of a body that was read."""
    spaces = [each for each in tools or () if each.get("type") == "namespace"]
    return {in_namespace(each["name"], tool["name"]): each["name"] for each in spaces for tool in each["tools"]}


def in_namespace(namespace: Any, name: Any) -> Any:
    """What a chat calls a function.  namespace: None for one that has none."""
    return name if namespace is None else f"{namespace}.{name}"


def called(name: str, namespaces: Mapping[str, str]) -> dict[str, str]:
    """The fields of a call that say what is called.  name: the chat's."""
    space = namespaces.get(name)
    return {"name": name} if space is None else {"name": name.removeprefix(f"{space}."), "namespace": space}


def read_choice(value: Any) -> Any:
    """The field tool_choice as a chat has it."""
    if isinstance(value, dict) and value.get("type") == "function" and isinstance(value.get("name"), str):
        return {"type": "function", "function": {"name": in_namespace(value.get("namespace"), value["name"])}}
    return value


def _functions(value: Any, name: str) -> list[dict[str, Any]]:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "namespace":
        space = only_used(value, NAMESPACE, {}, f"{name}.")
        if not isinstance(space.get("name"), str) or not isinstance(space.get("tools"), list):
            expected = '{"type": "namespace", "name": ..., "tools": [...]}'
            raise wrong(name, f"{name} must be {expected}, with a text and a list of functions; got {shown(value)}")
        return [_function(each, f"{name}.tools[{index}]", space["name"]) for index, each in enumerate(space["tools"])]
    if kind == "web_search" and value.get(OFFLINE) is False:
        return []
    return [_function(value, name)]


def _function(value: Any, name: str, namespace: str | None = None) -> dict[str, Any]:
    if not isinstance(value, dict) or value.get("type") != "function":
        expected = (
            f'{name} must be {{"type": "function", "name": ..., "parameters": {{...}}}}: this server runs no tools itself'
        )
        raise wrong(name, f"{expected}; nearest thing that works: leave the tool out; got {shown(value)}")
    told = only_used(value, FUNCTION, {}, f"{name}.")
    told["name"] = in_namespace(namespace, told.get("name"))
    return {"type": "function", "function": {key: each for key, each in told.items() if key != "type"}}
