"""Trains the small Llama target that ships in specdec/pair/target, or one like it on the user's text.

This file knows the model's shape, its tokenizer and what a finished folder holds.  `text` knows where documents begin, and
`loop` runs the optimizer.  This file knows nothing of drafting, verifying or the runtime; the finished folder is an ordinary
Hugging Face model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from errno import EIO
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdec.files.whole import write_text_whole
from specdec.loading.resolve import resolve_device
from specdec.loading.threads import set_training_threads, using_threads
from specdec.models.transformers_backend.make import alone
from specdec.options import EngineOptions
from specdec.screen.progress import show_progress
from specdec.train.checkpoint import Progress, TrainingCheckpoint
from specdec.train.folder import begin_run, fingerprint, prepare_out, put_model
from specdec.train.loop import fit, make_optimizer, schedule_of
from specdec.train.settings import TargetRun
from specdec.train.step import StepClock, TrainStep
from specdec.train.text.documents import SEPARATOR, Document, read_documents
from specdec.train.text.heldout import load_corpus, openings
from specdec.train.text.rows import TokenRows, mixed_batches

SHAPE = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size",
)  # fmt: skip


def train_tokenizer(documents: Sequence[str], vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with exactly vocab_size tokens.

    `<|endoftext|>` has id 0; it ends documents, and every encoded text begins with it.  context: the model's, in tokens.
    ValueError if the documents hold too little text for so many tokens.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[SEPARATOR], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(documents, trainer)
    if core.get_vocab_size() != vocab_size:
        most = core.get_vocab_size()
        raise ValueError(
            f"vocab_size: expected at most {most} on this little text, got {vocab_size}; nearest: {most}, or more text"
        )
    core.post_processor = processors.TemplateProcessing(
        single=f"{SEPARATOR} $A", pair=f"{SEPARATOR} $A {SEPARATOR} $B", special_tokens=[(SEPARATOR, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=SEPARATOR, eos_token=SEPARATOR, pad_token=SEPARATOR,
        model_max_length=context, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def build_model(run: TargetRun) -> LlamaForCausalLM:
    """A model with random weights, in float32, from the process's generator.

    The weights of projections into the residual stream start smaller by sqrt(2 * layers) (GPT-2's rule), since so deep a model
    is unstable at the start otherwise.
    """
    shape = {name: getattr(run, name) for name in SHAPE}
    config = LlamaConfig(
        **shape, max_position_embeddings=run.context, rms_norm_eps=1e-5, tie_word_embeddings=True, bos_token_id=0,
        eos_token_id=0, pad_token_id=None, initializer_range=0.02 * math.sqrt(768 / run.hidden_size),
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, attn_implementation="sdpa",
    )  # fmt: skip
    with alone():
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                projection.weight.mul_(1 / math.sqrt(2 * run.num_hidden_layers))
    return model


def add_dropout(model: LlamaForCausalLM, p: float) -> None:
    """Adds dropout with probability p to what attention and MLP add to the residual stream, in training only.

    The Llama of transformers has no such dropout.  It is a forward hook here, so the checkpoint stays that of a plain Llama.
    """
    if not p:
        return

    def drop(module: torch.nn.Module, _inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        return F.dropout(output, p, module.training)

    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.down_proj.register_forward_hook(drop)


def loss_of(model: LlamaForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of a token given the tokens before it in its row, in nats.  rows: [batch, width] token ids."""
    bf16 = torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.is_cuda)
    with bf16:
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, rows: torch.Tensor, batch: int) -> float:
    """The mean of `loss_of` over all held-out rows, `batch` of them at a time, without dropout."""
    model.eval()
    with torch.compiler.set_stance("force_eager"):  # compiled layers would be compiled again for each new shape
        total = sum(loss_of(model, part) * len(part) for part in rows.split(batch))
    model.train()
    return float(total) / len(rows)


def save_target(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Writes the finished model folder, with weights in bfloat16.  The model that is trained keeps its float32 weights."""
    weights = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in model.state_dict().items()}
    with alone():
        copy = LlamaForCausalLM(model.config).to(torch.bfloat16)
    copy.load_state_dict(weights)
    copy.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, do_sample=False)
    try:
        copy.save_pretrained(out)
    except SafetensorError as error:  # which is no OSError, whatever the disk said
        raise OSError(EIO, str(error)) from error
    tokenizer.save_pretrained(out)


class _Data(NamedTuple):
    """What a run reads: main rows, extra rows or None, held-out rows [R, context], and openings of held-out documents."""

    tokenizer: PreTrainedTokenizerFast
    main: TokenRows
    side: TokenRows | None
    held_rows: torch.Tensor
    prompts: list[str]


def _load(
    run: TargetRun, texts: Sequence[str | Path], extra: Sequence[str | Path], split: str, device: str, prompts: int
) -> _Data:
    corpus = load_corpus(texts, run.held_out, split)
    more = [read_documents(path, split) for path in extra]
    print("\n".join([*corpus.notes, *(f"extra: {note}" for _, note in more)]), flush=True)
    train, held, side = (_plain(part) for part in (corpus.train, corpus.held, [d for part, _ in more for d in part]))
    tokenizer = train_tokenizer(train, run.vocab_size, run.context)

    def encode(text: str) -> list[int]:
        return tokenizer.backend_tokenizer.encode(text).ids  # calling the wrapper instead would warn of every long document

    # The separator that opens a document also ends the one before it.
    main = TokenRows(train, encode, run.context, device)
    if main.rows < run.batch:
        raise ValueError(f"text: expected at least one batch, {run.batch} rows of {run.context} tokens, got {main.rows}")
    held_rows = TokenRows(held, encode, run.context, device).in_order()
    extra_rows = TokenRows(side, encode, run.context, device) if side and run.extra_share else None
    begins = openings(corpus.held, prompts, corpus.train) if prompts else []
    return _Data(tokenizer, main, extra_rows, held_rows, begins)


def _plain(documents: Sequence[Document]) -> list[str]:
    if any(document.messages is not None for document in documents):
        raise ValueError("text: expected plain text, since a new target has no chat template; got chats")
    return [document.text for document in documents]


@using_threads(None)
def train_target(
    run: TargetRun,
    texts: Sequence[str | Path],
    out: str | Path,
    extra: Sequence[str | Path] = (),
    checkpoint: str | Path | None = None,
    resume: bool = False,
    device: str = "cpu",
    compile_layers: bool = False,
    prompts: int = 0,
    threads: int | None = None,
    split: str = "auto",
    overwrite: bool = False,
) -> Progress:
    """Trains a target and leaves the weights with the lowest held-out loss in the folder `out`.

    texts: files as text/documents.py describes them.  split: how text without separators falls into documents.
    overwrite: whether a model or a run that `out` holds may be replaced.
    extra: files of further text, which only the early part of the run reads.
    checkpoint: the file that `resume` goes on from; None stands for checkpoint.pt in `out`.
    compile_layers: whether torch.compile compiles the decoder layers.
    threads: of torch, for a run on a CPU; None for as many as torch takes by itself.
    prompts: how many openings of held-out documents are written to prompts.jsonl in `out`.

    Returns the progress at the end.  ValueError for text, settings or files that can't work.
    """
    device = str(resolve_device(EngineOptions(device=device).device))
    set_training_threads(torch.device(device), threads)
    out = prepare_out(out, resume, overwrite)
    with show_progress("train", "parts") as show:
        show("reading texts", 0, 1)
        tokenizer, main, side, held_rows, heldout_openings = _load(run, texts, extra, split, device, prompts)
    begin_run(out, overwrite)
    if heldout_openings:
        lines = [json.dumps({"prompt": line}, ensure_ascii=False) for line in heldout_openings]
        write_text_whole(out / "prompts.jsonl", "\n".join(lines) + "\n")
    model = build_model(run).to(device)
    add_dropout(model, run.dropout)
    if compile_layers:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    batches = mixed_batches(main, side, run.batch, run.steps, run.extra_share, run.seed)
    schedule = schedule_of(run)
    made_of = {**vars(run), "text": fingerprint([main.tokens])}
    optimizer = make_optimizer(model, schedule)
    state = TrainingCheckpoint(Path(checkpoint or out / "checkpoint.pt"), model, optimizer, made_of)
    step = TrainStep(model, optimizer, lambda inputs: loss_of(model, inputs[0]), StepClock(torch.device(device)))
    print(f"{sum(p.numel() for p in model.parameters())} parameters; tokens: {len(main.tokens)} to train on, "
          f"{len(side.tokens) if side else 0} extra, {held_rows.numel()} held out", flush=True)  # fmt: skip

    return fit(
        schedule, state, state.load() if resume else Progress(),
        make_step=lambda number, lr: step([batches(number)], lr),
        evaluate=lambda: held_out_loss(model, held_rows, run.batch),
        on_best=lambda _: put_model(out, lambda made: save_target(model, tokenizer, made)),
    )  # fmt: skip
