"""Trains a draft head for a target, and measures the finished head with the runtime itself.

The target writes the text that the head learns from.  A head is EAGLE-3's (arXiv 2503.01840), or one that drafts in one pass:
P-EAGLE (arXiv 2602.01469), DFlash (arXiv 2602.06036), DFlash2 or DSpark.  This file knows settings, files and the order of
the steps; `selftext` writes the text, `heads/` makes and saves heads, `unroll` and `block_loss` compute losses, `step` and
`loop` run the optimizer, and `card/` measures the head and says what it is worth.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from specdec.checks import require_int
from specdec.decoder import SpecDecoder
from specdec.draft.formats.body import default_aux_layers
from specdec.draft.formats.empty import empty_head
from specdec.draft.head import DraftHead
from specdec.loading.resolve import resolve_device
from specdec.loading.threads import set_training_threads, using_threads
from specdec.models.checkpoints.checkpoint import resolve_target
from specdec.models.config import ModelConfig
from specdec.models.registry import choose_target
from specdec.models.target import Target
from specdec.options import EngineOptions, usable_cpus
from specdec.screen.progress import show_progress
from specdec.train.card.card import CARD_FILES, write_card
from specdec.train.card.measure import measure
from specdec.train.checkpoint import Progress
from specdec.train.folder import WEIGHTS, begin_run, fingerprint, prepare_out, put_model, text_fingerprint
from specdec.train.heads.files import layout_fault, save
from specdec.train.heads.fresh import spec_of
from specdec.train.lesson.lesson import Lesson, dtype_of
from specdec.train.loop import PAUSED
from specdec.train.selftext import eval_prompts, write_text
from specdec.train.settings import HeadRun, default_rate
from specdec.train.text.documents import Document
from specdec.train.text.heldout import load_corpus, set_aside

ROWS_AT_ONCE = {"cuda": 512, "cpu": 256}  # texts that the target writes at once


@using_threads(None)
def train_head(
    run: HeadRun,
    target: str | Path,
    texts: Sequence[str | Path],
    out: str | Path,
    *,
    eval_texts: Sequence[str | Path] = (),
    self_text: str | Path | None = None,
    checkpoint: str | Path | None = None,
    split: str = "auto",
    aux_layers: Sequence[int] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    device: str = "auto",
    threads: int | None = None,
    around_steps: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Progress:
    """Trains a head, saves it in the folder `out`, and measures its accept length.

    target: the target's folder, hub id or GGUF file.  texts: files as text/documents.py describes them; their documents
    open the rows that the target writes.  Held-out documents are used for nothing but the final accept length.
    eval_texts: files of further held-out documents, which are measured apart.
    self_text: the file of the rows that the target writes, which runs may share; None: self_text.pt in `out`.
    checkpoint: the file that `resume` goes on from; None: checkpoint.pt in `out`.
    split: how text without separators falls into documents.
    out: gets config.json and model.safetensors of the weights with the lowest evaluation loss, then a card (README.md) and
    training.json with the settings and results.
    aux_layers: 0-based numbers of the target layers whose outputs are the head's features; None: those of EAGLE-3's authors.
    overwrite: whether a head or a run that `out` holds may be replaced.
    threads: of torch, for a run on a CPU; None for as many as torch takes by itself.
    around_steps: what a process that does nothing else sets meanwhile, as `fast_products` (__main__.py) does.

    Returns the progress at the end.  ValueError, before any text is written, for text, settings or files that can't work.
    """
    began = time.monotonic()
    _check_machine(device, threads)
    config = choose_target(resolve_target(target, "target")).config
    layers = _check(run, config, str(target), aux_layers)
    run = run if run.lr else replace(run, lr=default_rate(config.hidden_size))
    where, rows_file = Path(checkpoint or Path(out) / "checkpoint.pt"), Path(self_text or Path(out) / "self_text.pt")
    folder = prepare_out(out, resume, overwrite, keep=[target], checkpoint=where)
    ready = _ready(run, target, texts, eval_texts, split, device)
    decoder, notes = ready.decoder, ready.notes
    print("\n".join([*notes, _memory(run, decoder.model, layers)]), flush=True)
    set_training_threads(decoder.settings.device, threads)
    begin_run(folder, overwrite, where)
    origin = _origin(decoder.model, [*ready.train, *ready.checked])
    text = write_text(decoder, ready.train, ready.checked, run, rows_file, origin)
    lesson = Lesson(decoder, text, run, layers, where, origin, began)
    with around_steps():  # the target's states too, so that they are the same whether they are kept or not
        progress = lesson.fit(resume, lambda head: _put(head, folder, run, target))
    next_step = f"paused after {progress.spent:.0f} s in all; go on with --resume"
    if progress.ended != PAUSED:
        found = measure(decoder, folder, ready.prompts, run.width)
        write_card(folder, run, lesson.made(str(target), [*notes, *lesson.notes]), progress, found)
        next_step = f"ended by: {progress.ended}\n{command_to_try(target, folder, ready.train)}"
    print(f"{_sizes(folder, where, rows_file)}\n{next_step}", flush=True)
    return progress


def _put(head: DraftHead, folder: Path, run: HeadRun, target: str | Path) -> None:
    put_model(folder, lambda made: save(head, made, run.layout_of_head, target, run.save_dtype))
    for name in CARD_FILES if (folder / CARD_FILES[0]).exists() else ():  # of the weights that these replace
        (folder / name).unlink(missing_ok=True)


class Ready(NamedTuple):
    """What a run has before anything is written.

    train, checked: documents that open the rows to learn from, and those by which the best weights are chosen.
    prompts: of held-out documents, by the kind of their text.  notes: lines about all of these.
    """

    decoder: SpecDecoder
    train: list[Document]
    checked: list[Document]
    prompts: dict[str, list[list[int]]]
    notes: list[str]


def _ready(
    run: HeadRun,
    target: str | Path,
    texts: Sequence[str | Path],
    eval_texts: Sequence[str | Path],
    split: str,
    device: str,
) -> Ready:
    with show_progress("train", "parts") as show:
        show("reading texts", 0, 1)
        corpus = load_corpus(texts, run.held_out, split, eval_texts)
        train, checked = set_aside(corpus.train, run.held_out)
        show("loading the target", 0, 1)
        decoder = _target(run, target, device)
        show("choosing prompts", 0, 1)
        named = {"held-out text": corpus.held} | corpus.others
        prompts = {name: eval_prompts(decoder, held, corpus.train, run) for name, held in named.items() if held}
    counted = ", ".join(f"{len(each)} of {name}" for name, each in prompts.items())
    dtype = str(dtype_of(run, decoder.settings.device)).removeprefix("torch.")
    return Ready(
        decoder, train, checked, prompts,
        [
            *corpus.notes, f"{len(checked)} of those to train on choose the best weights instead",
            f"prompts to measure the finished head with: {counted}", f"peak learning rate {run.lr:g}, products in {dtype}",
        ],
    )  # fmt: skip


def _target(run: HeadRun, target: str | Path, device: str) -> SpecDecoder:
    """The target, which writes the text, and reads it in the dtype of the products."""
    found = torch.device(resolve_device(EngineOptions(device=device).device))
    dtype = str(dtype_of(run, found)).removeprefix("torch.")
    return SpecDecoder.from_pretrained(
        target, device=device, dtype=dtype, max_batch_size=ROWS_AT_ONCE[found.type], max_seq_len=run.width,
        prefix_caching=False,  # which would take the memory that states are kept in
    )  # fmt: skip


def _sizes(folder: Path, *more: Path) -> str:
    files = [path for path in (folder / WEIGHTS, *more) if path.is_file()]
    return ", ".join(f"{path} {path.stat().st_size / 1e6:.1f} MB" for path in files)


def _check_machine(device: str, threads: int | None) -> None:
    """ValueError if the device is not there, or the machine has fewer threads: before any file is read."""
    resolve_device(EngineOptions(device=device).device)
    if threads is not None:
        require_int("threads", threads, 1, usable_cpus())


def _check(run: HeadRun, config: ModelConfig, target: str, aux_layers: Sequence[int] | None) -> tuple[int, ...]:
    """The layers whose outputs are the features, ascending.  ValueError if no head of these settings fits the target."""
    if config.encoder is not None:
        raise ValueError(
            f"target must be a decoder-only model, such as a Llama, got {target}, a {config.family} model: "
            "training reads texts of one model, not what an encoder read besides"
        )
    if refusal := config.features_refusal:
        raise ValueError(f"target: no head can be trained for {target}: {refusal}")
    if run.draft_vocab_size > config.vocab_size:
        raise ValueError(
            f"draft_vocab_size: expected at most {config.vocab_size}, the target's vocabulary, got {run.draft_vocab_size}"
        )
    if run.width > config.max_position:
        most = config.max_position
        raise ValueError(f"width: expected at most {most}, the tokens that the target reads, got {run.width}; nearest: {most}")
    if aux_layers is None and config.num_layers < 7:  # 1, N//2 - 1, N - 4 ascend from here on
        those = ",".join(map(str, range(min(3, max(1, config.num_layers - 1)))))
        raise ValueError(
            f"aux_layers (--aux-layers): expected layer numbers for a target of {config.num_layers} layers, such as {those}, "
            "got none"
        )
    layers = default_aux_layers(config.num_layers, target) if aux_layers is None else tuple(aux_layers)
    if not layers or len(set(layers)) < len(layers) or not all(0 <= layer < config.num_layers for layer in layers):
        raise ValueError(f"aux_layers: expected distinct layer numbers in [0, {config.num_layers - 1}], got {list(layers)}")
    if fault := layout_fault(run.layout_of_head, layers, config.num_layers):
        raise ValueError(fault)
    return tuple(sorted(layers))


def _memory(run: HeadRun, model: Target, layers: tuple[int, ...]) -> str:
    """A line that says how much memory a step takes, about.  layers: whose outputs the head reads."""
    vocab = run.draft_vocab_size or model.config.vocab_size
    spec = spec_of(model.config, layers, vocab, run)
    lent = {"embed_tokens": not spec.own_embeddings, "lm_head": not spec.reads_pairs}
    parts = empty_head(spec).named_parameters()
    numbers = sum(part.numel() for name, part in parts if not lent.get(name.partition(".")[0]))
    target = sum(weight.nbytes for weight in {id(weight): weight for weight in model.parameters()}.values())
    places = run.width - 2 if spec.block is None else run.anchors
    size, steps = model.embed_tokens.weight.element_size(), run.num_steps
    fused = spec.block is None and model.embed_tokens.weight.is_cuda  # of a drafted token logits alone are kept
    logits = run.batch * places * vocab * (size * (steps + 2) if fused else 4 * (3 * steps + 2))  # else softmax, gradient
    sizes = {"the target": target, "the head and its optimizer": 16 * numbers, "logits of a step": logits}
    sizes["the target's states, if they are kept"] = size * run.texts * run.width * model.config.hidden_size * (len(layers) + 1)
    listed = ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in sizes.items())
    return f"a head of {numbers / 1e6:.1f} M parameters; memory, about: {listed}"


def command_to_try(target: str | Path, folder: Path, documents: Sequence[Document]) -> str:
    """A head that has read chats is tried on chats."""
    chat = " --chat" if any(document.messages for document in documents) else ""
    return f"done; try it: specdec bench --target {shlex.quote(str(target))} --draft {shlex.quote(str(folder))}{chat}"


def _origin(model: Target, documents: Sequence[Document]) -> dict[str, str]:
    """Short names of the target and of the text, which tell a run from others."""
    return {
        "target": fingerprint([model.embed_tokens.weight, *model.lm_head.parameters()]),
        "text": text_fingerprint(document.text for document in documents),
    }
