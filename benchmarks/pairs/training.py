"""The steps of a comparison that write text and train heads: every kind by `specdec train`, with the same rows and steps.

The target asks itself questions and then answers all requests, once for all kinds.  Nothing here measures.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

from pairs.edits import edits_of
from pairs.plan import FILES, KINDS, PairsPlan, PartsFolder
from pairs.requests import HELD, known_runs, requests_of, without_known, write_evaluation, write_requests
from specdec import SamplingParams, SpecDecoder
from specdec.cli import main as specdec

MARK = "QUESTION-GOES-HERE"
ASKED_AT_ONCE, ASKED_TOKENS = 256, 80
EDITED = 16  # edits of each kind
SELF_TEXT = "self_text.pt"
TRAINED = (  # settings of the plan that `specdec train` has, by its names
    "texts", "width", "longest_prompt", "greedy_share", "steps", "batch", "lr", "warmup", "num_steps", "draft_vocab_size",
    "intermediate_size", "keep_states", "seed",
)  # fmt: skip
FEW = {"steps": 1, "batch": 1, "draft_vocab_size": 64, "intermediate_size": 8, "keep_states": 0}  # of a run for its texts alone


def write_prompts(folder: PartsFolder, plan: PairsPlan, texts: Path, evaluation: Path) -> None:
    """The requests of texts, those held out, and the prompts to measure with."""
    files = [evaluation / f"{name}.jsonl" for name in FILES]
    known, bench = known_runs(files), max(plan.bench_prompts, *plan.batches)
    asks = requests_of(texts, plan.requests, plan.seed, known)
    held = min(HELD, len(asks) // 4)
    folder.begin(plan)
    write_requests(folder.path / "held.jsonl", asks[:held], plan.chat)
    write_requests(folder.path / "requests.jsonl", asks[held:], plan.chat)
    for name, file in zip(FILES, files, strict=True):
        write_evaluation(folder.prompts(name), file, max(plan.eval_prompts, bench), plan.characters)
    lines = [json.dumps(line) + "\n" for line in edits_of(texts, EDITED, plan.seed)]
    (folder.path / "edits.jsonl").write_text("".join(lines))  # for `texts.sources`
    # The target asks later, where these files are not: what it must not ask goes along.
    (folder.path / "known.json").write_text(json.dumps(sorted(map(" ".join, known))))
    folder.keep("prompts-all", {"requests": len(asks) - held, "held": held})


def ask_target(folder: PartsFolder, plan: PairsPlan) -> dict[str, Any]:
    """The target writes users' turns: those that it ended by itself are asked too.  Part of `texts`."""
    known = {tuple(run.split(" ")) for run in json.loads((folder.path / "known.json").read_text())}
    asks: list[str] = []
    settings: dict[str, Any] = {"max_batch_size": ASKED_AT_ONCE, "device": plan.device, "max_seq_len": 2 * ASKED_TOKENS}
    with SpecDecoder.from_pretrained(plan.target, **settings) as decoder:
        begin = "Once upon a time"
        if plan.chat:
            ids = decoder.tokenizer.encode_chat([{"role": "user", "content": MARK}], "an empty chat")
            begin = decoder.tokenizer.decode_all(ids).partition(MARK)[0]
        for first in range(0, plan.asks, ASKED_AT_ONCE):
            seeds = range(first, min(first + ASKED_AT_ONCE, plan.asks))
            params = [SamplingParams(max_tokens=ASKED_TOKENS, temperature=0.9, seed=plan.seed + seed) for seed in seeds]
            written = decoder.generate([begin] * len(params), params)
            asks += [each.text.strip() for each in written if each.finish_reason == "eos" and each.text.strip()]
    asks = without_known(asks, known)
    write_requests(folder.path / "asked.jsonl", asks, plan.chat)
    return {"asked": plan.asks, "kept": len(asks)}


def train_arguments(folder: PartsFolder, plan: PairsPlan, kind: str, out: Path, **other: int) -> list[str]:
    """The command line of `specdec train` for a kind.  other: settings that differ from the plan's."""
    settings = {name: getattr(plan, name) for name in TRAINED} | other
    if kind == "dflash2":  # which proposes any token
        del settings["draft_vocab_size"]
    settings |= {"eval_every": max(1, settings["steps"] // 6), "eval_prompts": min(64, plan.eval_prompts)}
    asked = [folder.path / name for name in ("requests.jsonl", "asked.jsonl") if (folder.path / name).read_text()]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    if plan.threads:
        flags.append(f"--threads={plan.threads}")
    return [
        "train", "--target", plan.target, "--text", *map(str, asked), "--eval-text", str(folder.path / "held.jsonl"), "--split",
        "lines", "--kind", kind, "--device", plan.device, "--out", str(out), *flags,
    ]  # fmt: skip


def write_texts(folder: PartsFolder, plan: PairsPlan) -> dict[str, Any]:
    """The rows that the target writes, which all kinds learn from.  What an earlier call wrote is kept."""
    out = folder.path / "texts"
    go_on = ["--resume"] if (out / SELF_TEXT).is_file() else ["--overwrite"]
    begun = time.monotonic()
    _run([*train_arguments(folder, plan, KINDS[0], out, **FEW), *go_on])
    for file in out.iterdir():  # the head of one step
        if file.name != SELF_TEXT:
            file.unlink()
    return {"rows": plan.texts, "width": plan.width, "seconds": round(time.monotonic() - begun, 1)}


def train_kind(folder: PartsFolder, plan: PairsPlan, kind: str) -> dict[str, Any]:
    """A head of the kind, in its folder.  A run that was cut short goes on from its checkpoint."""
    out, begun = folder.head(kind), time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    shutil.copy(folder.path / "texts" / SELF_TEXT, out)
    _run([*train_arguments(folder, plan, kind, out), "--resume"])
    for name in (SELF_TEXT, "checkpoint.pt"):
        (out / name).unlink(missing_ok=True)
    told = json.loads((out / "training.json").read_text())
    size = (out / "model.safetensors").stat().st_size
    return {"seconds": round(time.monotonic() - begun, 1), "size_mb": round(size / 1e6, 2), "steps": plan.steps, **told}


def _run(arguments: list[str]) -> None:
    if code := specdec(arguments):
        raise RuntimeError(f"specdec {' '.join(arguments)} ended with {code}")
