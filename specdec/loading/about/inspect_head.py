"""What a drafter's folder holds, in specdec's own terms: the facts of `specdec inspect`.

Reads the config and the headers of weight files; of the tensors the vocabulary map alone, and the norms of heads whose
converter may have lost a layer; of a small model its tokenizer too.  No GPU is used.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from specdec.draft.find import how_to_read, open_by_files, refuse_idle
from specdec.draft.formats.facts import UNKNOWN, facts_of
from specdec.draft.formats.open import open_head
from specdec.draft.kind import SUFFIX
from specdec.draft.kinds import all_kinds, kind_of, kind_of_files
from specdec.loading.about.inspect_target import stored_as
from specdec.loading.about.pairs import pairs
from specdec.loading.vocabularies import match_vocabulary
from specdec.models.checkpoints.checkpoint import resolve_target
from specdec.models.registry import choose_target
from specdec.options import EngineOptions


def head_facts(head: str | Path, target: str | Path | None, options: EngineOptions) -> dict[str, Any]:
    """Everything, as plain data.  ValueError as when the drafter is loaded: by the config, a tensor, or against the target."""
    kind, config, target_folder, is_named = kind_of(head), None, None, False
    if (kind and not kind.has_files) or head == SUFFIX:
        instead = "".join(f", or {other.name}" for other in all_kinds() if other.has_files)
        raise ValueError(f"MODEL: {head!r} is a drafter without files; nearest thing that works: the folder of a head{instead}")
    if kind:
        refuse_idle(options, kind.name)
        if target is None:
            raise ValueError(f"inspect {kind.name} needs --target, whose own layers these are; or give the folder of a head")
    folder = None if kind else resolve_target(head, "MODEL")
    if target is not None:
        target_folder = resolve_target(target, "--target")
        config = choose_target(target_folder).config
    if folder is None:
        assert kind and config and target_folder
        folder, facts = target_folder, kind.open(target_folder, config).facts()
    elif config and target_folder and (opened := open_by_files(folder, options, config, target_folder)):
        match_vocabulary(opened, target_folder, config)
        facts = opened.facts()
    elif config is None and (needs := kind_of_files(folder, options)):
        raise ValueError(f"inspect of {needs.title} needs --target, by which it is understood; got {folder} alone")
    else:
        is_named = options.draft_format != "auto"
        facts = facts_of(open_head(folder, config, how_to_read(options)), config is not None)
    return {
        "folder": str(folder),
        "kind": "head",
        "target_weights": UNKNOWN if config is None else stored_as(config),
        "format": facts.format,
        "format_named": is_named,
        "published_by": facts.published_by,
        "head": facts.head,
        "meanings": facts.meanings,
        "tensors": facts.tensors,
        "beside": facts.beside,
    }


def print_facts(facts: dict[str, Any], console: Console) -> None:
    """As tables: of a head, or of a target."""
    if facts["kind"] == "target":
        _print_target(facts, console)
        return
    by = "named" if facts["format_named"] else "detected"
    console.print(Text(f"{facts['folder']}: layout {facts['format']} ({by}), as published by {facts['published_by']}", "bold"))
    console.print(Text(f"the target's weights: {facts['target_weights']}"))
    _print_tables({"Head": facts["head"], "Taken to mean": facts["meanings"], "Beside weights": facts["beside"]}, console)
    console.print()
    shapes = {name: " x ".join(map(str, shape)) for name, shape in facts["tensors"].items()}
    console.print(pairs(f"Weights ({len(shapes)})", shapes.items()))


def _print_target(facts: dict[str, Any], console: Console) -> None:
    named = ", ".join(facts["architectures"] or ())
    inside = f", the text model within {facts['wrapper']}" if "wrapper" in facts else ""
    console.print(Text(f"{facts['folder']}: a {facts['family']} target{named and f' ({named})'}{inside}", "bold"))
    code = {"native": "specdec's own module", "transformers": "transformers' code with specdec's attention"}
    console.print(Text(f"runs through {code[facts['backend']]}: {facts['why']}"))
    weights = {key: f"{value:,}" if isinstance(value, int) else value for key, value in facts["weights"].items()}
    weights["bytes of the files"] += f" ({facts['weights']['bytes of the files'] / 1e9:.3g} GB)"
    of = {"Sizes": facts["target"], "Weights": weights, "Text": facts["text"], "What drafts for it": facts["drafters"]}
    _print_tables({**of, "Taken to mean": facts["meanings"]}, console)


def _print_tables(tables: dict[str, dict[str, Any]], console: Console) -> None:
    for title, rows in tables.items():
        if rows:
            console.print()
            console.print(pairs(title, ((key, _shown(value)) for key, value in rows.items())))


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str) or value is None:
        return value or "not said"
    said = json.dumps(value, ensure_ascii=False)
    return (said[1:-1] if isinstance(value, (dict, list)) else said).replace('"', "")  # what lies within keeps its brackets
