"""The steps of a comparison that write text and train heads: every kind by `specdec train`, with the same rows and steps.

The target asks itself questions and then answers all requests, once for all kinds.  Nothing here measures.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import torch

from pairs.edits import edits_of
from pairs.plan import FILES, KINDS, LONG, PairsPlan, PartsFolder, TimeBudget
from pairs.requests import known_runs, requests_of, without_known, write_evaluation, write_requests
from specdec import SamplingParams, SpecDecoder
from specdec.cli import main as specdec
from specdec.loading.build import free_memory

MARK = "QUESTION-GOES-HERE"
ASKED_AT_ONCE, ASKED_TOKENS = 256, 80
EDITED = 32  # edits of each kind
TRAINED = (  # settings of the plan that `specdec train` has, by its names
    "texts", "width", "longest_prompt", "greedy_share", "held_out", "batch", "lr", "warmup", "num_steps", "draft_vocab_size",
    "intermediate_size", "seed",
)  # fmt: skip
FEW = {"steps": 1, "batch": 1, "draft_vocab_size": 64, "intermediate_size": 8, "eval_prompts": 1}  # of a run for its text alone
AFTER_STEPS = 60.0  # seconds that the last numbers of a run, and the saving of its head, may take


def write_prompts(folder: PartsFolder, plan: PairsPlan, texts: Path, evaluation: Path) -> None:
    """The requests of texts, edits, and the prompts to measure with."""
    files = [evaluation / f"{name}.jsonl" for name in FILES]
    known, bench = known_runs(files), max(plan.bench_prompts, *plan.batches)
    asks = requests_of(texts, plan.requests, plan.seed, known)
    folder.begin(plan)
    (folder.path / "requests.json").write_text(json.dumps(asks))
    for name, file in zip(FILES, files, strict=True):
        write_evaluation(folder.prompts(name), file, max(plan.eval_prompts, bench), plan.characters)
    lines = [json.dumps(line) + "\n" for line in edits_of(texts, EDITED, plan.seed)]
    (folder.path / "edits.jsonl").write_text("".join(lines))  # for `texts.sources`
    # The target asks later, where these files are not: what it must not ask goes along.
    (folder.path / "known.json").write_text(json.dumps(sorted(map(" ".join, known))))
    folder.keep("prompts-all", {"requests": len(asks)})
    print(f"{folder.path}: the plan, {len(asks):,} requests, and prompts of {', '.join(FILES)} to measure with")


def ask_target(folder: PartsFolder, plan: PairsPlan) -> dict[str, Any]:
    """The target writes users' turns: those that it ended by itself are asked beside the requests."""
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
    asks, others = without_known(asks, known), json.loads((folder.path / "requests.json").read_text())
    mixed = random.Random(plan.seed).sample([*asks, *others], len(asks) + len(others))  # the last ones are held out
    write_requests(folder.path / "asks.jsonl", mixed, plan.chat)
    return {"asked": plan.asks, "kept": len(asks), "requests": len(mixed)}


def train_arguments(folder: PartsFolder, plan: PairsPlan, name: str, out: Path, **other: int) -> list[str]:
    """The command line of `specdec train` for a head.  name: its kind, or one that is trained for long.  other: settings that
    differ from the plan's.
    """
    kind = name.removesuffix(LONG)
    settings = {each: getattr(plan, each) for each in TRAINED} | {"eval_prompts": min(64, plan.eval_prompts)}
    # As many steps for each kind; the long run ends when nothing gets better.
    settings |= {"steps": plan.steps, "patience": 0} if kind == name else {"seconds": plan.long_seconds}
    settings |= other
    if kind == "dflash2":  # which proposes any token
        del settings["draft_vocab_size"]
    if plan.threads:
        settings["threads"] = plan.threads
    return [
        "train", "--target", plan.target, "--text", str(folder.path / "asks.jsonl"), "--self-text", str(folder.self_text),
        "--kind", kind, "--device", plan.device, "--out", str(out), "--checkpoint-size", "small",
        *(f"--{each.replace('_', '-')}={value}" for each, value in settings.items()),
    ]  # fmt: skip


def write_texts(folder: PartsFolder, plan: PairsPlan) -> dict[str, Any]:
    """The rows that the target writes, which all kinds learn from.  What an earlier call wrote is kept."""
    begun, out = time.monotonic(), folder.path / "scratch"
    _run([*train_arguments(folder, plan, KINDS[0], out, **FEW), "--overwrite"])
    for file in out.iterdir():  # the head of one step
        file.unlink()
    out.rmdir()
    return {"rows": plan.texts, "width": plan.width, "seconds": round(time.monotonic() - begun, 1)}


def train_head(folder: PartsFolder, plan: PairsPlan, name: str, budget: TimeBudget) -> dict[str, Any] | None:
    """A head in its folder; None where the time of the call ended first, and another call goes on from the checkpoint."""
    out, checkpoint = folder.head(name), folder.head(name) / "checkpoint.pt"
    most = max(1, int(budget.left - AFTER_STEPS))
    go_on = "--resume" if checkpoint.is_file() else "--overwrite"
    (out / "training.json").unlink(missing_ok=True)
    _run([*train_arguments(folder, plan, name, out, call_seconds=most), go_on])
    if not (out / "training.json").is_file():
        return None
    checkpoint.unlink()
    told: dict[str, Any] = json.loads((out / "training.json").read_text())
    return {"size_mb": round(told["bytes"] / 1e6, 2), **told}


def _run(arguments: list[str]) -> None:
    code = specdec(arguments)
    free_memory(torch.device("cuda" if torch.cuda.is_available() else "cpu"))  # the next kind needs it
    if code:
        raise RuntimeError(f"specdec {' '.join(arguments)} ended with {code}")
