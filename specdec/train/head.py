"""Trains a draft head for a target, and measures the finished head with the runtime itself.

The target writes the text that the head learns from.  A head is EAGLE-3's (arXiv 2503.01840), or one that drafts in one pass:
P-EAGLE (arXiv 2602.01469), DFlash (arXiv 2602.06036) or DSpark.  This file knows settings, files and the order of the steps;
`selftext` writes the text, `heads/` makes and saves heads, `unroll` and `block_loss` compute losses, `step` and `loop` run the
optimizer, and `card/` measures the head and says what it is worth.
"""

from __future__ import annotations

import platform
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from specdec.checks import require_int
from specdec.decoder import SpecDecoder
from specdec.draft.block.head import BlockHead
from specdec.draft.eagle.head import Eagle3Head
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
from specdec.train.block_loss import Anchors, block_loss, choose_anchors
from specdec.train.card.card import WEIGHTS, Made, write_card
from specdec.train.card.measure import measure
from specdec.train.checkpoint import Progress, TrainingCheckpoint
from specdec.train.folder import begin_run, fingerprint, prepare_out, text_fingerprint
from specdec.train.heads.files import layout_fault, save
from specdec.train.heads.fresh import new_head, spec_of
from specdec.train.loop import PAUSED, fit, make_optimizer, schedule_of
from specdec.train.selftext import SelfText, coverage, eval_prompts, frequent_ids, write_text
from specdec.train.settings import HeadRun, default_rate
from specdec.train.states import StateStore, TargetStates
from specdec.train.step import StepClock, TrainStep, products
from specdec.train.text.documents import Document
from specdec.train.text.heldout import load_corpus, set_aside
from specdec.train.unroll import accept_length, head_loss

ROWS_AT_ONCE = {"cuda": 512, "cpu": 256}  # texts that the target writes at once
CPU_STATES = 4096  # MiB


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
    self_text: the file of the rows that the target writes, which runs of several kinds may share; None: self_text.pt in `out`.
    checkpoint: the file that `resume` goes on from; None: checkpoint.pt in `out`.
    split: how text without separators falls into documents.
    out: gets config.json and model.safetensors of the weights with the lowest evaluation loss, and when the run has ended a
    card (README.md) and training.json with the settings and results.
    aux_layers: 0-based numbers of the target layers whose outputs are the head's features; None: those of EAGLE-3's authors.
    overwrite: whether a head or a run that `out` holds may be replaced.
    threads: of torch, for a run on a CPU; None for as many as torch takes by itself.
    around_steps: what a process that does nothing else sets meanwhile, as `fast_products` (__main__.py) does.

    Returns the progress at the end.  ValueError for text, settings or files that can't work; it comes before any text is
    written.
    """
    began = time.monotonic()
    _check_machine(device, threads)
    config = choose_target(resolve_target(target, "target")).config
    layers = _check(run, config, str(target), aux_layers)
    run = run if run.lr else replace(run, lr=default_rate(run.kind, config.hidden_size))
    where = Path(checkpoint) if checkpoint is not None else Path(out) / "checkpoint.pt"
    folder = prepare_out(out, resume, overwrite, keep=[target], checkpoint=where)
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
    notes = [*corpus.notes, f"{len(checked)} of those to train on choose the best weights instead",
             f"prompts to measure the finished head with: {counted}",
             f"peak learning rate {run.lr:g}, products in {_precision(run, decoder)}".replace("torch.", "")]  # fmt: skip
    print("\n".join([*notes, _memory(run, decoder.model, layers)]), flush=True)
    set_training_threads(decoder.settings.device, threads)
    begin_run(folder, overwrite, where)
    origin, rows_file = _origin(decoder.model, corpus.train), Path(self_text or folder / "self_text.pt")
    written = {name: getattr(run, name) for name in ("texts", "width", "longest_prompt", "greedy_share", "held_out", "seed")}
    text = write_text(decoder, train, checked, run, rows_file, written | origin)
    lesson = Lesson(decoder, text, run, layers, where, origin, began)
    with around_steps():  # the target's states too, so that they are the same whether they are kept or not
        progress = lesson.fit(resume, lambda head: save(head, folder, run.layout_of_head, target, run.save_dtype))
    if progress.ended == PAUSED:
        print(
            f"paused after {progress.spent:.0f} s in all; go on with --resume; {_sizes(folder, where, rows_file)}", flush=True
        )
        return progress
    found = measure(decoder, folder, prompts, run.width)
    write_card(folder, run, lesson.made(str(target), [*notes, *lesson.notes]), progress, found)
    print(f"{_sizes(folder, where, rows_file)}\ndone; try it: {_command(target, folder)}", flush=True)
    return progress


class Lesson:
    """A fresh head, what it learns from, and the steps that train it.

    origin: which target and text the run is of.  began: when the command did, by time.monotonic.
    notes: lines about the draft vocabulary.
    """

    def __init__(
        self,
        decoder: SpecDecoder,
        text: SelfText,
        run: HeadRun,
        layers: tuple[int, ...],
        checkpoint: Path,
        origin: dict[str, str],
        began: float,
    ) -> None:
        model, self.device, self.run, self.began = decoder.model, decoder.settings.device, run, began
        vocab = model.config.vocab_size
        self.text, self.model, self.layers = text, model, layers
        ids_V = frequent_ids(
            torch.where(text.written(), text.rows_NT, -1)[: -text.checked], run.draft_vocab_size or vocab, vocab
        )
        self.notes = [coverage(text, len(ids_V), vocab)]
        print(self.notes[0], flush=True)
        self.precision = _precision(run, decoder)
        self.head, self.draft_ids_V = new_head(model, layers, ids_V, run), ids_V.to(self.device)
        self.schedule = schedule_of(run)
        self.optimizer = make_optimizer(self.head, self.schedule)
        made_of = {**vars(run), **origin, "aux_layers": layers}
        self.checkpoint = TrainingCheckpoint(checkpoint, self.head, self.optimizer, made_of, run.checkpoint_size == "small")

    def fit(self, resume: bool, save_head: Callable[[DraftHead], object]) -> Progress:
        run, progress = self.run, self.checkpoint.load() if resume and self.checkpoint.path.is_file() else Progress()
        with show_progress("train", "texts") as show:
            free = torch.cuda.mem_get_info(self.device)[0] // 2 if self.device.type == "cuda" else CPU_STATES << 20
            keep = free if run.keep_states < 0 else run.keep_states << 20
            states = StateStore(self.model, self.text.to(self.device), self.layers, keep, show)
        loss_of = _loss_of(self.model, self.head, self.draft_ids_V, run)
        clock, capture = StepClock(self.device), run.capture == "auto" and self.device.type == "cuda"
        step = TrainStep(self.head, self.optimizer, lambda inputs: loss_of(inputs)[0], clock, self.precision, capture)
        inputs_of, evaluate = objective(states, loss_of, self.text, run, self.precision)

        def make_step(number: int, lr: float) -> tuple[Tensor, Tensor]:
            clock.begin()
            done = step(inputs_of(number, clock.mark), lr)
            if line := clock.line():
                print(line, flush=True)
            return done

        spent = time.monotonic() - self.began
        left = run.seconds - progress.spent - spent
        if run.seconds and left <= 0:
            raise ValueError(
                f"seconds: expected more than the {progress.spent + spent:.0f} that loading and the text took, got "
                f"{run.seconds}; the text is kept: go on with --resume and more --seconds"
            )
        schedule = replace(
            self.schedule, seconds=progress.seconds + left if run.seconds else 0.0, call_seconds=float(run.call_seconds)
        )
        return fit(schedule, self.checkpoint, progress, make_step, evaluate, lambda _: save_head(self.head), before=spent)

    def made(self, target: str, notes: list[str]) -> Made:
        numbers = sum(weight.numel() for weight in self.head.parameters() if weight.requires_grad)
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else platform.processor() or "a CPU"
        return Made(target, name, notes, numbers, int(self.text.written()[: -self.text.checked].sum()))


def _target(run: HeadRun, target: str | Path, device: str) -> SpecDecoder:
    """The target, which writes the text, and reads it in the dtype of the products."""
    found = torch.device(resolve_device(EngineOptions(device=device).device))
    dtype = str(_dtype(run, found)).removeprefix("torch.")
    at_once = ROWS_AT_ONCE[found.type]
    return SpecDecoder.from_pretrained(target, device=device, dtype=dtype, max_batch_size=at_once, max_seq_len=run.width)


def _dtype(run: HeadRun, device: torch.device) -> torch.dtype:
    if run.precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if run.precision == "bfloat16" else torch.float32


def _precision(run: HeadRun, decoder: SpecDecoder) -> torch.dtype:
    return _dtype(run, decoder.settings.device)


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
    size = model.embed_tokens.weight.element_size()
    sizes["the target's states, if they are kept"] = size * run.texts * run.width * model.config.hidden_size * (len(layers) + 1)
    listed = ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in sizes.items())
    return f"a head of {numbers / 1e6:.1f} M parameters; memory, about: {listed}"


def _command(target: str | Path, folder: Path) -> str:
    return f"specdec bench --target {shlex.quote(str(target))} --draft {shlex.quote(str(folder))}"


def _origin(model: Target, documents: Sequence[Document]) -> dict[str, str]:
    """Short names of the target and of the text, which tell a run from others."""
    return {
        "target": fingerprint([model.embed_tokens.weight, *model.lm_head.parameters()]),
        "text": text_fingerprint(document.text for document in documents),
    }


Loss = Callable[[Sequence[Tensor]], tuple[Tensor, Tensor]]  # of a step's inputs: the loss, and counts of drafts (`unroll`)


def teacher_rows(model: Target, draft_ids_V: Tensor) -> Tensor:
    """[V, H]: by which final hidden states become the target's logits of these tokens, multipliers of logits included."""
    weight_VH, scale = model.lm_head.rows(draft_ids_V), model.config.logits_scale
    return weight_VH if scale == 1 else weight_VH * scale


def _loss_of(model: Target, head: DraftHead, draft_ids_V: Tensor, run: HeadRun) -> Loss:
    """Of the tensors of TargetStates, and of Anchors for heads that draft in one pass."""
    weight_VH = teacher_rows(model, draft_ids_V)
    if isinstance(head, BlockHead):
        return lambda inputs: block_loss(
            head, TargetStates(*inputs[:4]), weight_VH, draft_ids_V, run.num_steps, run.decay, Anchors(*inputs[4:])
        )
    assert isinstance(head, Eagle3Head)
    return lambda inputs: head_loss(head, TargetStates(*inputs), weight_VH, draft_ids_V, run.num_steps, run.decay)


def objective(
    states: StateStore, loss_of: Loss, text: SelfText, run: HeadRun, precision: torch.dtype = torch.float32
) -> tuple[Callable[[int, Callable[[str], object]], tuple[Tensor, ...]], Callable[[], float]]:
    """Two functions: the inputs of a 0-based step, and the mean loss over the last rows, which are kept out of training.

    text: on the CPU.  The rows of a step follow from its number alone, so a resumed run reads on where it stopped; each epoch
    has all rows once, in an order of its own.  The second argument of the first function is told which part of a step is done.
    """
    train, is_block = len(text.rows_NT) - text.checked, run.kind != "eagle3"
    goals_NT = text.goals()

    def picked(picks_B: Tensor, generator: torch.Generator, mark: Callable[[str], object]) -> tuple[Tensor, ...]:
        places = choose_anchors(goals_NT[picks_B], run.anchors, generator) if is_block else ()
        at_B, *more = (_sent(each, states.device) for each in (picks_B, *places))
        mark("rows")
        seen = states.of(at_B)
        mark("target's states")
        assert seen.begins_B is not None
        return seen.rows_BT, seen.hidden_BTH, seen.features_BTF, seen.begins_B, *more

    def inputs_of(step: int, mark: Callable[[str], object] = lambda _: None) -> tuple[Tensor, ...]:
        generator = torch.Generator("cpu").manual_seed(run.seed * 1_000_003 + step)
        return picked(rows_of_step(step, run.batch, train, run.seed), generator, mark)

    def evaluate() -> float:
        generator = torch.Generator("cpu").manual_seed(run.seed)  # the same places at each evaluation
        picks = torch.arange(train, len(text.rows_NT), dtype=torch.int64, device="cpu")
        losses, counts = [], []
        for part in picks.split(run.batch):
            with products(states.device, precision):  # with gradients, so that what runs is what steps run
                loss, counted = loss_of(picked(part, generator, lambda _: None))
            losses.append(loss.detach() * len(part))
            counts.append(counted)
        length, shares = accept_length(torch.stack(counts).sum(0).cpu())
        by_depth = " ".join(f"{share:.3f}" for share in shares)
        print(
            f"greedy chains of {run.num_steps} on text kept out: {length:.3f} tokens a round, by depth {by_depth}", flush=True
        )
        return float(torch.stack(losses).sum()) / len(picks)

    return inputs_of, evaluate


def rows_of_step(step: int, batch: int, rows: int, seed: int) -> Tensor:
    """[batch] int64 on the CPU: numbers of the rows of a 0-based step, of an endless sequence of epochs."""
    picked: list[Tensor] = []
    at, left = step * batch, batch
    while left:
        epoch, first = divmod(at, rows)
        generator = torch.Generator("cpu").manual_seed(seed * 100_003 + epoch)
        part = torch.randperm(rows, generator=generator, dtype=torch.int64, device="cpu")[first : first + left]
        picked.append(part)
        at, left = at + len(part), left - len(part)
    return torch.cat(picked)


def _sent(x: Tensor, device: torch.device) -> Tensor:
    """On the device; a GPU is not waited for."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x
