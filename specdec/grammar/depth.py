"""How deeply the parts of a schema or a grammar stand within each other, before the library reads it.

The library follows references by recursion and looks at no limit there: a chain of thousands ends the whole process.  Here
nothing is compiled; a bound is enough, and parts that refer to each other in a circle count as one, the sum of their depths.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from typing import Any
from urllib.parse import unquote

from specdec.config import GrammarKind

MAX_DEPTH = 1000  # the library fails at 2,000 and more, with the usual stack of a thread
QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/')  # texts, comments, expressions
RULE = re.compile(r"^[ \t]*[?!]*([\w-]+)(?:::\w+)?(?:\[[^\]\n]*\])?[ \t]*:", re.MULTILINE)
NAME = re.compile(r"[\w-]+")
BY_ID = ("$id", "id", "$anchor", "$dynamicAnchor")
Parts = dict[str, tuple[int, set[str]]]  # by name: its own depth, and the parts that it refers to


def check_depth(kind: GrammarKind, text: str) -> None:
    """ValueError for what nests more than MAX_DEPTH levels.  A regular expression can't refer to anything."""
    if kind == "regex":
        return
    depths = (_depth_of_schema(text),) if kind == "json_schema" else _depths_of_grammar(text)
    if (depth := max(depths)) > MAX_DEPTH:
        raise ValueError(
            f"{kind} can't be used: its parts nest up to {depth} levels through their references; expected at most "
            f"{MAX_DEPTH}; nearest thing that works: repetitions (items, or a rule with * or +) instead of a chain of parts"
        )


def deepest(parts: Parts) -> int:
    """A bound of the depth along any chain of references."""
    known = {name: [other for other in refers if other in parts] for name, (_, refers) in parts.items()}
    sorter, heights = TopologicalSorter(known), dict[str, int]()
    with suppress(CycleError):  # what stands in no circle comes all the same
        sorter.prepare()
    while ready := sorter.get_ready():
        for name in ready:
            heights[name] = parts[name][0] + max((heights[other] for other in known[name]), default=0)
        sorter.done(*ready)
    return max(heights.values(), default=0) + sum(depth for name, (depth, _) in parts.items() if name not in heights)


def _depth_of_schema(text: str) -> int:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):  # which the library refuses, too
        return 0
    parts: Parts = {}
    left = ["#"]
    while left:
        place = left.pop()
        if place in parts:
            continue
        found = _at(schema, place)
        if found is None or (place != "#" and _names_itself(found)):  # not by its place: it may be any part
            return sum(1 for _ in _containers(schema))
        depth, refers = 0, set[str]()
        for level, value in _containers(found):
            depth = max(depth, level)
            if isinstance(value, Mapping) and isinstance(ref := value.get("$ref"), str):
                refers.add(ref)
        parts[place] = (depth, refers)
        left += refers
    return deepest(parts)


def _names_itself(schema: Any) -> bool:
    return any(
        isinstance(value, Mapping) and isinstance(value.get(key), str) for _, value in _containers(schema) for key in BY_ID
    )


def _containers(schema: Any) -> Iterator[tuple[int, Any]]:
    """Every object and list with its level, from 1 on."""
    left = [(1, schema)]
    while left:
        level, value = left.pop()
        if isinstance(value, Mapping | list):
            yield level, value
            inner: Iterable[Any] = value.values() if isinstance(value, Mapping) else value
            left += [(level + 1, each) for each in inner]


def _at(schema: Any, place: str) -> Any:
    """What a reference points to; None: it is no path, or there is nothing."""
    if place in ("#", "#/"):
        return schema
    if not place.startswith("#/"):
        return None
    for part in unquote(place[2:]).split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, Mapping):
            schema = schema.get(name)
        elif isinstance(schema, list) and name.isascii() and name.isdigit() and int(name[:9]) < len(schema):
            schema = schema[int(name[:9])]
        else:
            return None
    return schema


def _depths_of_grammar(text: str) -> Iterator[int]:
    """Of the rules, and of each schema within them."""
    plain = QUOTED.sub(" ", text.replace("::=", ":"))
    rules = list(RULE.finditer(plain))
    parts: Parts = {}
    for rule, after in zip(rules, [*rules[1:], None], strict=False):
        body = plain[rule.end() : after.start() if after else len(plain)]
        depth, refers = parts.get(rule[1], (1, set()))
        parts[rule[1]] = (depth + _parentheses(body), refers | set(NAME.findall(body)))
    yield deepest(parts)
    reader = json.JSONDecoder()
    for found in re.finditer(r"%json\s*", text):
        with suppress(ValueError, RecursionError):
            yield _depth_of_schema(json.dumps(reader.raw_decode(text, found.end())[0]))


def _parentheses(body: str) -> int:
    depth = most = 0
    for character in body:
        depth += (character in "([{") - (character in ")]}")
        most = max(most, depth)
    return most
