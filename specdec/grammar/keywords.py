"""What a JSON schema may be: an object whose keywords are those of JSON Schema, or annotations that say nothing of a text.

JSON Schema itself takes a keyword that it does not know for an annotation, so a misspelled one holds a text to nothing.  Here
it is refused.  Whether a text can be held to a known keyword is for the library to say.  OpenAPI's `nullable`, which clients
write of optional arguments, becomes a type.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specdec.checks import distinct, nearest_name, shown

# Of drafts 4 to 2020-12, by what their values hold: schemas by name, schemas in a row, one schema or several, no schema.
BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
IN_A_ROW = ("allOf", "anyOf", "oneOf", "prefixItems")
SCHEMAS = (
    "items", "additionalItems", "unevaluatedItems", "contains", "additionalProperties", "unevaluatedProperties",
    "propertyNames", "not", "if", "then", "else", "contentSchema",
)  # fmt: skip
VALUES = (
    "type", "enum", "const", "multipleOf", "maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum", "maxLength",
    "minLength", "pattern", "format", "maxItems", "minItems", "uniqueItems", "maxContains", "minContains", "maxProperties",
    "minProperties", "required", "dependentRequired", "contentEncoding", "contentMediaType", "$schema", "$id", "id", "$ref",
    "$anchor", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "$vocabulary", "$comment", "nullable",
)  # fmt: skip
ANNOTATIONS = (  # the second line is OpenAPI's, the third is of editors and forms
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
    "example", "discriminator", "xml", "externalDocs",
    "enumNames", "enumDescriptions", "markdownDescription", "errorMessage",
)  # fmt: skip
KNOWN = (*BY_NAME, *IN_A_ROW, *SCHEMAS, *VALUES, *ANNOTATIONS)
GUIDANCE = "x-guidance"  # the library's own settings, which it reads in the whole schema alone
OWN = "x-"  # with which names begin that a program adds for itself
EXAMPLE = '{"type": "object"}'
TOO_DEEP = "json_schema is nested too deeply; nearest setting that works: its parts in $defs, with a $ref for each"
ELSEWHERE = {"divisibleBy": "multipleOf", "extends": "allOf"}
NULLABLE = "nullable"
TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
FREE_FORMATS = ("password", "path", "file-path", "directory-path", "binary", "json-string")  # every text has these
# Keywords that narrow what others allow and to which the library holds no text, and the formats to which it holds texts.
UNHELD = (
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames", "dependentRequired",
    "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties", "contentSchema",
)  # fmt: skip
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
LOOKS_AROUND = re.compile(r"\(\?(=|!|<=|<!)")


def schema_as_json(name: str, value: Any) -> str:
    """The schema as JSON, given so or as a dict.  ValueError or TypeError for anything else."""
    if isinstance(value, str):
        try:
            schema = json.loads(value, object_pairs_hook=distinct)
        except RecursionError:
            raise ValueError(TOO_DEEP) from None
        except ValueError as error:
            raise ValueError(f"{name} is not usable JSON: {error}; expected a schema such as {EXAMPLE}") from None
    else:
        schema = value
    if not isinstance(schema, Mapping):
        got = f"{value!r} of type {type(value).__name__}"[:300]
        hint = ", for a class of pydantic its model_json_schema()" if hasattr(value, "model_json_schema") else ""
        raise TypeError(f"{name} must be a dict, or JSON of an object, such as {EXAMPLE}{hint}; got {got}")
    try:
        written = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must hold what JSON can hold: {error}") from None
    _check_keywords(schema)
    if f'"{NULLABLE}"' in written or '"format"' in written:
        return json.dumps(_in_plain_words(json.loads(written)), ensure_ascii=False)
    return value if isinstance(value, str) else written


def held_part(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without what the library holds no text to, changed in place: it allows what the whole allows, and more."""
    for inner, _ in _schemas_in(schema):
        for name in UNHELD:
            inner.pop(name, None)
        if "oneOf" in inner and "anyOf" not in inner:  # the library wants to see that no text obeys two of them
            inner["anyOf"] = inner.pop("oneOf")
        if inner.get("format", FORMATS[0]) not in FORMATS:
            del inner["format"]
        if isinstance(pattern := inner.get("pattern"), str) and LOOKS_AROUND.search(pattern):
            del inner["pattern"]
    return schema


def _check_keywords(schema: Mapping[str, Any]) -> None:
    """ValueError for the first keyword that nobody knows, with its place in the schema.

    The library's own `"x-guidance": {"lenient": true}` says that keywords which hold a text to nothing are wanted.
    """
    options = schema.get(GUIDANCE, {})
    if not isinstance(options, Mapping):
        raise ValueError(
            f'json_schema must have an object for {GUIDANCE}, such as {{"lenient": true}}, got {str(options)[:100]}; nearest '
            "setting that works: leave it out"
        )
    if options.get("lenient") is True:
        return
    if isinstance(schema.get("schema"), Mapping):
        raise ValueError(
            "json_schema must be the schema itself, got an object that holds it as 'schema', as OpenAI's response_format does; "
            "nearest setting that works: what 'schema' holds"
        )
    for inner, place in _schemas_in(schema):
        for name, held in inner.items():
            if name == GUIDANCE and place != "#":
                raise ValueError(
                    f"json_schema has {GUIDANCE} at {place[:200]}, where it would do nothing; nearest setting that works: "
                    "one in the whole schema"
                )
            if name not in KNOWN and not str(name).startswith(OWN):
                raise ValueError(_unknown(str(name)[:100], place))
            if name == "type" and isinstance(held, str) and held not in TYPES:
                raise ValueError(
                    f"json_schema has the unknown type {held[:100]!r} at {place[:200]}; nearest setting that works: "
                    f"{nearest_name(held[:100], TYPES) or 'leave it out'}"
                )
            if name == NULLABLE and not isinstance(held, bool):
                raise ValueError(
                    f"json_schema must have true or false for {NULLABLE} at {place[:200]}, got {shown(held)}; nearest setting "
                    'that works: a type such as ["string", "null"]'
                )


def _schemas_in(schema: Any) -> Iterator[tuple[Any, str]]:
    """Every object within a schema that is a schema, itself first, and its place.  No recursion: schemas may be deep."""
    left: list[tuple[Any, str]] = [(schema, "#")]
    while left:
        value, place = left.pop()
        if isinstance(value, Mapping):
            yield value, place
            for name, held in value.items():
                if name in BY_NAME and isinstance(held, Mapping):
                    left += [(each, f"{place}/{name}/{own}") for own, each in held.items()]
                elif name in IN_A_ROW or name in SCHEMAS:
                    left.append((held, f"{place}/{name}"))
        elif isinstance(value, Sequence) and not isinstance(value, str):
            left += [(each, f"{place}/{number}") for number, each in enumerate(value)]


def _in_plain_words(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema, changed in place: null is a type where OpenAPI allows it, beside a type, and no format is free."""
    for inner, _ in _schemas_in(schema):
        kind = inner.get("type")
        if inner.pop(NULLABLE, False) is True and kind is not None:
            kinds = kind if isinstance(kind, list) else [kind]
            inner["type"] = kinds if "null" in kinds else [*kinds, "null"]
        if inner.get("format") in FREE_FORMATS:
            del inner["format"]
    return schema


def _unknown(name: str, place: str) -> str:
    nearest = ELSEWHERE.get(name) or nearest_name(name, KNOWN) or "leave it out"
    return (
        f"json_schema has the unknown keyword {name!r} at {place[:200]}; expected those of JSON Schema, or names that begin "
        f"with {OWN}; nearest setting that works: {nearest}"
    )
