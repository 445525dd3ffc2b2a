"""200 random JSON schemas on a pair: whether every text parses and fits its schema, and whether speculation changes one.

    python benchmarks texts.grammar_texts --out benchmarks/texts/results/grammar_texts.json
    python benchmarks texts.grammar_texts --target stories260K --draft stories260K-eagle3 --prompts prompts.jsonl

Needs the package jsonschema, a judge that knows nothing of the library that makes the masks.  Strings, numbers and arrays are
bounded, because the small targets were not trained to end any.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import torch

from specdec import Generation, SamplingParams, SpecConfig, SpecDecoder, Stats, shipped

PROMPTS = 200
SAMPLINGS = {"greedy": SamplingParams(), "temperature 0.8": SamplingParams(temperature=0.8, seed=0)}
NAMES = ("name", "age", "kind", "city", "tags", "is_big", "size", "friend", "note", "when")


def random_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """The schema of a value: at the top an object, below it anything."""
    kind = (
        "object"
        if depth == 0
        else draw.choice(["string", "integer", "number", "boolean", "enum", "pattern", "array", "object"])
    )
    if kind in ("array", "object") and depth == 2:
        kind = "string"
    if kind == "object":
        names = draw.sample(NAMES, draw.randint(1, 4 if depth == 0 else 2))
        required = [name for name in names if draw.random() < 0.8] or names[:1]
        held = {name: random_schema(draw, depth + 1) for name in names}
        return {"type": "object", "properties": held, "required": required, "additionalProperties": False}
    if kind == "array":
        most = draw.randint(1, 3)
        return {"type": "array", "items": random_schema(draw, depth + 1), "minItems": draw.randint(0, most), "maxItems": most}
    simple: dict[str, dict[str, Any]] = {
        "string": {"type": "string", "maxLength": draw.randint(3, 16)},
        "integer": {"type": "integer", "minimum": draw.randint(-20, 0), "maximum": draw.randint(1, 5000)},
        "number": {"type": "number", "minimum": 0, "maximum": draw.randint(1, 99), "multipleOf": 0.5},
        "boolean": {"type": "boolean"},
        "enum": {"enum": draw.sample(["red", "blue", "a little dog", "Tom", 7, None, True], 3)},
        "pattern": {"type": "string", "pattern": "^[A-Z][a-z]{2,7}( [a-z]{1,5})?$"},
    }
    return simple[kind]


def fault(output: Generation, schema: dict[str, Any]) -> str | None:
    """What is wrong with a text; None: it parses, and fits the schema."""
    if output.finish_reason != "eos":
        return f"ended by {output.finish_reason}"
    try:
        jsonschema.validate(json.loads(output.text), schema)
    except (json.JSONDecodeError, jsonschema.ValidationError) as error:
        return f"{type(error).__name__}: {error}".split("\n")[0]
    return None


def run(
    decoder: SpecDecoder, prompts: list[Any], schemas: list[dict[str, Any]], base: SamplingParams, most: int
) -> dict[str, Any]:
    """One row of the table: the same requests with and without speculation."""
    params = [
        replace(base, max_tokens=most, json_schema=schema, seed=None if base.seed is None else base.seed + number)
        for number, schema in enumerate(schemas)
    ]
    start = time.perf_counter()
    fast = decoder.generate(prompts, params, progress=True)
    seconds = time.perf_counter() - start
    plain = decoder.generate(prompts, params, speculate=False, progress=True)
    judged = [fault(out, schema) for out, schema in zip(fast, schemas, strict=True)]
    faults = [{"number": i, "fault": said, "text": fast[i].text, "schema": schemas[i]} for i, said in enumerate(judged) if said]
    stats = Stats.total([out.stats for out in fast])
    return {
        "texts": len(fast), "tokens": sum(len(out.token_ids) for out in fast), "fit": len(fast) - len(faults), "faults": faults,
        "differ_from_plain": sum(a.token_ids != b.token_ids for a, b in zip(fast, plain, strict=True)),
        "accept_length": stats.accept_length, "seconds": seconds, "first": [out.text for out in fast[:3]],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=shipped.target_folder())
    parser.add_argument("--draft", type=Path, default=shipped.draft_folder())
    parser.add_argument(
        "--prompts", type=Path, default=shipped.prompts_file(), help="one object with prompt or token_ids a line"
    )
    parser.add_argument("--num-prompts", type=int, default=PROMPTS)
    parser.add_argument("--max-tokens", type=int, default=460)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    lines = [json.loads(line) for line in args.prompts.read_text().splitlines()]
    draw = random.Random(0)
    prompts = [lines[i % len(lines)].get("prompt") or lines[i % len(lines)]["token_ids"] for i in range(args.num_prompts)]
    schemas = [random_schema(draw) for _ in prompts]
    for schema in schemas[::2]:  # half of the texts without blanks, which the small targets like to write
        schema["x-guidance"] = {"whitespace_pattern": ""}
    spec = SpecConfig(5, 4, 16)
    rows = {}
    with SpecDecoder.from_pretrained(
        args.target, args.draft, spec, device=args.device, dtype="float32", max_batch_size=8
    ) as decoder:
        for name, base in SAMPLINGS.items():
            rows[name] = run(decoder, prompts, schemas, base, args.max_tokens)
            print(name, {key: value for key, value in rows[name].items() if key != "first"}, flush=True)
    result = {
        "target": args.target.name, "draft": args.draft.name, "spec": spec.label, "dtype": "float32", "device": args.device,
        "torch": torch.__version__, "python": platform.python_version(), "date": time.strftime("%Y-%m-%d"),
        "max_tokens": args.max_tokens, "distinct_schemas": len({json.dumps(schema) for schema in schemas}), "rows": rows,
    }  # fmt: skip
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
