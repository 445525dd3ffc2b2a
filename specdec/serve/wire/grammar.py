"""What a body says of the text's form: OpenAI's response_format, or structured_outputs, which has more kinds."""

from __future__ import annotations

import re
from typing import Any

from specdec.checks import nearest_name
from specdec.serve.wire.errors import wrong
from specdec.serve.wire.fields import only_used

GRAMMAR_FIELDS = ("response_format", "structured_outputs")
CHOICE = "choice"  # of structured_outputs, too: a list of texts, of which the text is one
KINDS = {"json": "json_schema", "regex": "regex", "grammar": "grammar"}  # of structured_outputs, as SamplingParams calls them
TYPES = ("text", "json_object", "json_schema")
SPECIAL = r"[\\.+*?()|\[\]{}^$#&~-]"  # characters that mean something in an expression
ANY_OBJECT = {"type": "object"}


def grammar_of(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The field that says what the text must be, and that as options of SamplingParams; empty: the text may be anything.

    ApiError 400 for a field that says nothing that is understood, and for both fields.
    """
    found = {}
    if "response_format" in values and (schema := _response_format(values["response_format"])) is not None:
        found["response_format"] = {"json_schema": schema}
    if "structured_outputs" in values:
        found["structured_outputs"] = _structured_outputs(values["structured_outputs"])
    if len(found) > 1:
        fault = "response_format and structured_outputs both say what the text must be; leave one or the other out"
        raise wrong("structured_outputs", fault)
    return found


def _response_format(value: Any) -> Any:
    """The schema; None: the text may be anything."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in TYPES:
        said = kind if isinstance(kind, str) else value if isinstance(value, str) else ""
        near = 'structured_outputs {"regex": ...}' if said == "regex" else f'{{"type": "{_nearest_type(said)}"}}'
        expected = f"response_format must be an object whose type is one of {', '.join(TYPES)}"
        raise wrong("response_format", f"{expected}, got {value!r}"[:300] + f"; nearest: {near}")
    if kind != "json_schema":
        only_used(value, ("type",), {}, "response_format.")
        return ANY_OBJECT if kind == "json_object" else None
    held = only_used(value, ("type", "json_schema"), {}, "response_format.").get("json_schema")
    name = "response_format.json_schema"
    if not isinstance(held, dict):
        raise wrong(name, f'{name} must be an object such as {{"name": "answer", "schema": {{...}}}}, got {held!r}'[:400])
    # Texts are always held to the schema, strictly; a name and a description are for models that are told of the schema.
    used = only_used(held, ("name", "description", "schema", "strict"), {}, f"{name}.")
    for key, of, is_named in (("name", str, "a text"), ("description", str, "a text"), ("strict", bool, "true or false")):
        if (given := used.get(key)) is not None and not isinstance(given, of):
            raise wrong(f"{name}.{key}", f"{name}.{key} must be {is_named}, got {given!r}"[:400])
    schema = used.get("schema")
    if not isinstance(schema, dict):
        raise wrong(f"{name}.schema", f"{name}.schema must be a JSON schema, an object, got {schema!r}"[:400])
    return schema


def _nearest_type(said: str) -> str:
    return "json_object" if "json" in said and "schema" not in said else nearest_name(said[:100], TYPES) or "text"


def _structured_outputs(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong("structured_outputs", f"structured_outputs must be an object, got {value!r}"[:400])
    used = only_used(value, (*KINDS, CHOICE), {}, "structured_outputs.")
    if len(used) != 1:
        expected = f"structured_outputs must have one of the keys {', '.join((*KINDS, CHOICE))}"
        raise wrong("structured_outputs", f"{expected}, got {sorted(used)}")
    if CHOICE in used:
        return {"regex": _choice_pattern(used[CHOICE])}
    return {KINDS[name]: held for name, held in used.items()}


def _choice_pattern(texts: Any) -> str:
    """The regular expression of these texts alone."""
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        name = f"structured_outputs.{CHOICE}"
        raise wrong(name, f"{name} must be a list of texts, got {texts!r}"[:400])
    plain = [re.sub(SPECIAL, lambda found: "\\" + found[0], text) for text in texts]
    return "|".join(f"({text})" for text in plain)
