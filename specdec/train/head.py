"""Trains a draft head for a target, and measures the finished head with the runtime itself.

The target writes the text that the head learns from.  A head is EAGLE-3's (arXiv 2503.01840), or one that drafts in one pass:
P-EAGLE (arXiv 2602.01469), DFlash (arXiv 2602.06036) or DSpark.  This file knows settings, files and the order of the steps;
`selftext` writes the text, `heads/` makes and saves heads, `unroll` and `block_loss` compute losses, and `loop` runs the
optimizer.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.checks import require_int
from specdec.config import SamplingParams
from specdec.decoder import SpecDecoder
from specdec.draft.block.head import BlockHead
from specdec.draft.eagle.head import Eagle3Head
from specdec.draft.formats.body import default_aux_layers
from specdec.draft.formats.empty import empty_head
from specdec.draft.head import DraftHead
from specdec.generation import Stats
from specdec.loading.resolve import resolve_device
from specdec.loading.threads import set_training_threads, using_threads
from specdec.models.checkpoints.checkpoint import resolve_target
from specdec.models.config import ModelConfig
from specdec.models.registry import choose_target
from specdec.models.target import Target
from specdec.options import EngineOptions, usable_cpus
from specdec.screen.progress import show_progress
from specdec.train.block_loss import block_loss
from specdec.train.folder import begin_run, check_same, fingerprint, prepare_out, text_fingerprint
from specdec.train.heads.files import layout_fault, save
from specdec.train.heads.fresh import new_head, spec_of
from specdec.train.loop import Progress, TrainingCheckpoint, fit, make_optimizer, schedule_of
from specdec.train.selftext import eval_prompts, frequent_ids, train_prompts, write_rows
from specdec.train.settings import MEASURED, HeadRun
from specdec.train.states import StateStore, TargetStates
from specdec.train.text.documents import Document
from specdec.train.text.heldout import load_corpus
from specdec.train.unroll import head_loss


@using_threads(None)
def train_head(
    run: HeadRun,
    target: str | Path,
    texts: Sequence[str | Path],
    out: str | Path,
    *,
    eval_texts: Sequence[str | Path] = (),
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
    eval_texts: files of held-out documents; without them the last documents of each of the texts are held out.
    split: how text without separators falls into documents.
    out: gets config.json and model.safetensors of the weights with the lowest evaluation loss, training.json with the settings
    and results, and the two files that `resume` reads: checkpoint.pt and self_text.pt.
    aux_layers: 0-based numbers of the target layers whose outputs are the head's features; None: those of EAGLE-3's authors.
    overwrite: whether a head or a run that `out` holds may be replaced.
    threads: of torch, for a run on a CPU; None for as many as torch takes by itself.
    around_steps: what a process that does nothing else sets meanwhile, as `fast_products` (__main__.py) does.

    Returns the progress at the end.  ValueError for text, settings or files that can't work; it comes before any text is
    written.
    """
    _check_machine(device, threads)
    layers = _check(run, choose_target(resolve_target(target, "target")).config, str(target), aux_layers)
    folder = prepare_out(out, resume, overwrite, keep=[target])
    with show_progress("train", "parts") as show:
        show("reading texts", 0, 1)
        corpus = load_corpus(texts, run.held_out, split, eval_texts)
        show("loading the target", 0, 1)
        decoder = SpecDecoder.from_pretrained(target, device=device, dtype="float32", max_batch_size=256, max_seq_len=run.width)
        show("choosing prompts", 0, 1)
        prompts, model = eval_prompts(decoder, corpus.held, corpus.train, run), decoder.model
    notes = [*corpus.notes, f"{len(prompts)} prompts to measure the finished head with", _memory(run, model, layers)]
    print("\n".join(notes), flush=True)
    set_training_threads(decoder.settings.device, threads)
    begin_run(folder, overwrite)
    made_of = _origin(model, corpus.train)
    rows = _rows(decoder, corpus.train, run, made_of, folder / "self_text.pt", resume).to(decoder.settings.device)
    draft_ids_V = frequent_ids(rows.cpu(), run.draft_vocab_size or model.config.vocab_size, model.config.vocab_size)
    head = new_head(model, layers, draft_ids_V, run)
    schedule, begun = schedule_of(run), {**vars(run), **made_of, "aux_layers": layers}
    checkpoint = TrainingCheckpoint(folder / "checkpoint.pt", head, make_optimizer(head, schedule), begun)
    progress = checkpoint.load() if resume and checkpoint.path.is_file() else Progress()
    with around_steps():  # the target's states too, so that they are the same whether they are kept or not
        states, layout = _states(model, rows, layers, run), run.layout_of_head
        loss_at, evaluate = objective(states, _loss_of(model, head, draft_ids_V.to(rows.device), run), rows, run)
        progress = fit(schedule, checkpoint, progress, loss_at, evaluate, lambda _: save(head, folder, layout, target))
    _report(decoder, folder, prompts, run, progress)
    print(f"done; try it: {_command(target, folder)}", flush=True)
    return progress


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
            f"aux_layers: expected layer numbers for a target of {config.num_layers} layers, such as {those}, got none"
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
    logits = 4 * run.batch * places * vocab * (3 * run.num_steps + 2)  # of each step: logits, their softmax, a gradient
    sizes = {"the target": target, "the head and its optimizer": 16 * numbers, "logits of a step": logits}
    states = 4 * run.texts * run.width * model.config.hidden_size * (len(layers) + 1)
    if states <= run.keep_states << 20:
        sizes["the target's states"] = states
    listed = ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in sizes.items())
    return f"a head of {numbers / 1e6:.1f} M parameters; memory, about: {listed}"


def _command(target: str | Path, folder: Path) -> str:
    return f"specdec bench --target {shlex.quote(str(target))} --draft {shlex.quote(str(folder))}"


def _origin(model: Target, documents: Sequence[Document]) -> dict[str, Any]:
    """Short names of the target and of the text, which tell a run from others."""
    return {
        "target": fingerprint([model.embed_tokens.weight, *model.lm_head.parameters()]),
        "text": text_fingerprint(document.text for document in documents),
    }


def _rows(
    decoder: SpecDecoder, documents: list[Document], run: HeadRun, origin: dict[str, str], path: Path, resume: bool
) -> Tensor:
    """The rows [texts, width] that the target writes.  They are saved as they come, so a resumed run writes only the rest.

    origin: which target and which text they are made of.
    """
    made_of = {name: getattr(run, name) for name in ("texts", "width", "longest_prompt", "greedy_share", "seed")} | origin
    rows = torch.full((run.texts, run.width), -1, dtype=torch.int64, device="cpu")
    if resume and path.is_file():
        saved = torch.load(path, weights_only=True)
        check_same(path, saved["made_of"], made_of)
        rows = saved["rows"]
    prompts = train_prompts(decoder, documents, run.texts, run)
    write_rows(decoder, prompts, rows, run.greedy_share, run.seed, lambda: torch.save({"made_of": made_of, "rows": rows}, path))
    return rows


Loss = Callable[
    [TargetStates, torch.Generator], tuple[Tensor, Tensor]
]  # of some rows: the loss, and how often the head is right


def teacher_rows(model: Target, draft_ids_V: Tensor) -> Tensor:
    """[V, H]: by which final hidden states become the target's logits of these tokens, multipliers of logits included."""
    weight_VH, scale = model.lm_head.rows(draft_ids_V), model.config.logits_scale
    return weight_VH if scale == 1 else weight_VH * scale


def _loss_of(model: Target, head: DraftHead, draft_ids_V: Tensor, run: HeadRun) -> Loss:
    weight_VH = teacher_rows(model, draft_ids_V)
    if isinstance(head, BlockHead):
        anchors = run.anchors
        return lambda seen, picks: block_loss(head, seen, weight_VH, draft_ids_V, run.num_steps, run.decay, anchors, picks)
    assert isinstance(head, Eagle3Head)
    return lambda seen, _: head_loss(head, seen, weight_VH, draft_ids_V, run.num_steps, run.decay)


def _states(model: Target, rows: Tensor, layers: tuple[int, ...], run: HeadRun) -> StateStore:
    with show_progress("train", "texts") as show:
        return StateStore(model, rows, layers, run.keep_states << 20, show)


def objective(
    states: StateStore, loss_of: Loss, rows: Tensor, run: HeadRun
) -> tuple[Callable[[int], Tensor], Callable[[], float]]:
    """Two functions: the training loss of a step, and the mean loss over the last rows, which are kept out of training."""
    train = len(rows) - min(256, max(1, len(rows) // 20))

    def loss_at(step: int) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(run.seed * 1_000_003 + step)
        picks = torch.randint(train, (run.batch,), generator=generator, dtype=torch.int64, device="cpu").to(rows.device)
        return loss_of(states.of(picks), generator)[0]

    @torch.no_grad()
    def evaluate() -> float:
        generator = torch.Generator("cpu").manual_seed(run.seed)  # the same places at each evaluation
        picks = torch.arange(train, len(rows), dtype=torch.int64, device=rows.device)
        parts = [loss_of(states.of(part), generator) for part in picks.split(run.batch)]
        accuracy = torch.stack([part[1] for part in parts]).mean(0)
        print("first choice right, by step: " + " ".join(f"{share:.3f}" for share in accuracy.tolist()), flush=True)
        return float(torch.stack([part[0] for part in parts]).mean())

    return loss_at, evaluate


def _report(decoder: SpecDecoder, folder: Path, prompts: list[list[int]], run: HeadRun, progress: Progress) -> None:
    """Measures the saved head with the runtime on held-out prompts; prints and saves the accept lengths."""
    from specdec.draft.load import load_head

    settings = decoder.settings
    head = load_head(folder, decoder.model, run.width, settings.device, settings.dtype)
    found = {}
    for spec in MEASURED:
        lookahead = spec.lookahead
        measured = replace(settings.with_options(max_batch_size=32), spec=spec, max_seq_len=run.width - lookahead)
        pair = SpecDecoder(decoder.model, head, measured, decoder.tokenizer)
        sampling = [SamplingParams(max_tokens=run.width - len(prompt) - lookahead) for prompt in prompts]
        stats = Stats.total([output.stats for output in pair.generate(prompts, sampling, progress=True)])
        name = f"S={spec.num_steps} k={spec.topk} nd={spec.num_draft_tokens}"
        if not stats.rounds:
            print(f"held-out accept length at {name}: not measured, as rows of --width {run.width} leave no round", flush=True)
            continue
        by_depth = " ".join(f"{share:.3f}" for share in stats.acceptance_by_depth)
        print(f"held-out accept length at {name}: {stats.accept_length:.3f} (by depth {by_depth})", flush=True)
        found[name] = {"accept_length": stats.accept_length, "acceptance_by_depth": stats.acceptance_by_depth}
    record = {
        "run": vars(run),
        "eval_prompts": len(prompts),
        "best_step": progress.best_step,
        "held_out_loss": progress.best_loss,
        "accept": found,
    }
    (folder / "training.json").write_text(json.dumps(record, indent=1) + "\n")
