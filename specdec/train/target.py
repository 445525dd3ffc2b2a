"""Trains the small Llama-family target that ships in specdec/pair/target, or one like it on the user's text.

Knows the model's shape, its tokenizer, the training loop and what a finished folder holds. Does not know where
stories begin (`text` does), nor anything of drafting, verifying or the runtime: `transformers` reads the result.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdec.train.loop import Checkpoint, Progress, Schedule, fit, make_optimizer
from specdec.train.text import (
    SEPARATOR,
    TokenRows,
    load_documents,
    mixed_batches,
    openings,
    read_text,
    split_documents,
)


@dataclass(frozen=True)
class TargetRun:
    """One training run: shape, text shares and schedule. Defaults make the shipped model."""

    hidden_size: int = 96
    intermediate_size: int = 256
    num_hidden_layers: int = 28
    num_attention_heads: int = 3
    num_key_value_heads: int = 1
    head_dim: int = 32
    vocab_size: int = 2048
    context: int = 512
    steps: int = 3400
    batch: int = 64
    lr: float = 4e-3
    warmup: int = 300
    weight_decay: float = 0.3
    dropout: float = 0.2
    extra_share: float = 0.5  # rows of a batch from the extra text at the start
    held_out: float = 0.05
    eval_every: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_hidden_layers", "context", "steps", "batch", "eval_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads: expected a divisor of num_attention_heads={self.num_attention_heads}, "
                f"got {self.num_key_value_heads}"
            )
        if self.vocab_size < 257:
            raise ValueError(f"vocab_size: expected at least 257 (256 bytes and {SEPARATOR}), got {self.vocab_size}")
        for name in ("dropout", "extra_share"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name}: expected 0 <= {name} < 1, got {getattr(self, name)}")


def train_tokenizer(documents: Sequence[str], vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE; `<|endoftext|>` is id 0, ends documents and opens every encoded text."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[SEPARATOR], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(documents, trainer)
    if core.get_vocab_size() != vocab_size:
        raise ValueError(f"vocab_size: expected at most {core.get_vocab_size()} on this little text, got {vocab_size}")
    core.post_processor = processors.TemplateProcessing(
        single=f"{SEPARATOR} $A", pair=f"{SEPARATOR} $A {SEPARATOR} $B", special_tokens=[(SEPARATOR, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=SEPARATOR, eos_token=SEPARATOR, pad_token=SEPARATOR,
        model_max_length=context, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def build_model(run: TargetRun) -> LlamaForCausalLM:
    """A fresh model; projections into the residual stream start smaller, or a net this deep starts out unstable."""
    shape = {name: value for name, value in asdict(run).items() if name in LlamaConfig().to_dict()}
    config = LlamaConfig(
        **shape, max_position_embeddings=run.context, rms_norm_eps=1e-5, tie_word_embeddings=True, bos_token_id=0,
        eos_token_id=0, pad_token_id=None, initializer_range=0.02 * math.sqrt(768 / run.hidden_size),
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(run.seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                projection.weight.mul_(1 / math.sqrt(2 * run.num_hidden_layers))
    return model


def add_dropout(model: LlamaForCausalLM, p: float) -> None:
    """Residual dropout, which the Llama of transformers lacks; a hook, so the checkpoint stays plain Llama."""

    def drop(module: torch.nn.Module, _inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        return F.dropout(output, p, module.training)

    for layer in model.model.layers if p else ():
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.down_proj.register_forward_hook(drop)


def loss_of(model: LlamaForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats of each token given those before it in its row."""
    bf16 = torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.is_cuda)
    with bf16:
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, rows: torch.Tensor, batch: int) -> float:
    """`loss_of` over all held-out rows, dropout off."""
    model.eval()
    with torch.compiler.set_stance("force_eager"):  # a compiled layer would be compiled once more for each new shape
        total = sum(loss_of(model, part) * len(part) for part in rows.split(batch))
    model.train()
    return float(total) / len(rows)


def save_target(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """The finished folder, weights in bf16; the model itself stays as it is."""
    weights = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in model.state_dict().items()}
    copy = LlamaForCausalLM(model.config).to(torch.bfloat16)
    copy.load_state_dict(weights)
    copy.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, do_sample=False)
    copy.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _rows(run: TargetRun, texts: Sequence[str | Path], extra: Sequence[str | Path], device: str, prompts: int) -> tuple:
    train, held = load_documents(texts, run.held_out)
    tokenizer = train_tokenizer(train, run.vocab_size, run.context)

    def encode(text: str) -> list[int]:
        return tokenizer.backend_tokenizer.encode(text).ids  # the wrapper would warn of each long document

    # Adjacent documents share one separator: it ends the first and opens the second.
    main = TokenRows(train, encode, run.context, device)
    if main.rows < run.batch:
        raise ValueError(f"text: expected at least one batch, {run.batch} rows of {run.context} tokens, got {main.rows}")
    held_rows = TokenRows(held, encode, run.context, device).in_order()
    more = [part for path in extra for part in split_documents(read_text(path))]
    side = TokenRows(more, encode, run.context, device) if more and run.extra_share else None
    return tokenizer, main, side, held_rows, openings(held, prompts, train) if prompts else []


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
) -> Progress:
    """Trains a target on `texts` and leaves the best one, by held-out loss, in the folder `out`."""
    out = Path(out)
    tokenizer, main, side, held_rows, heads = _rows(run, texts, extra, device, prompts)
    out.mkdir(parents=True, exist_ok=True)
    if heads:
        lines = [json.dumps({"prompt": line}, ensure_ascii=False) for line in heads]
        (out / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    model = build_model(run).to(device)
    add_dropout(model, run.dropout)
    if compile_layers:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    batches = mixed_batches(main, side, run.batch, run.steps, run.extra_share, run.seed)
    schedule = Schedule(run.steps, run.lr, run.warmup, run.weight_decay, run.eval_every)
    state = Checkpoint(Path(checkpoint or out / "checkpoint.pt"), model, make_optimizer(model, schedule))
    print(f"{sum(p.numel() for p in model.parameters())} parameters; tokens: {len(main.tokens)} to train on, "
          f"{len(side.tokens) if side else 0} extra, {held_rows.numel()} held out", flush=True)  # fmt: skip

    return fit(
        schedule, state, state.load() if resume else Progress(),
        loss_at=lambda step: loss_of(model, batches(step)),
        evaluate=lambda: held_out_loss(model, held_rows, run.batch),
        on_best=lambda _: save_target(model, tokenizer, out),
    )  # fmt: skip
