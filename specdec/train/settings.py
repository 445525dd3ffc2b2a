"""The settings of training runs.  This file imports neither torch nor transformers, so `--help` appears at once."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.config import SpecConfig

MEASURED = (SpecConfig(5, 4, 16), SpecConfig(5, 1, 6))  # draft trees that a finished head is measured with


@dataclass(frozen=True)
class HeadRun:
    """Settings of one training run of an EAGLE-3 head.

    num_steps: steps of the training-time test.
    draft_vocab_size: tokens that the head can propose; 0 stands for the target's whole vocabulary.
    intermediate_size: width of the head's MLP; 0 stands for the target's.
    texts: rows of text that the target writes.  width: tokens of a row, its prompt included.
    longest_prompt: tokens; prompts have 4 to longest_prompt of them.
    greedy_share: share of the rows that continue greedily; the others are sampled at temperature 1.
    steps, batch: optimizer steps, and rows of each.
    lr: peak learning rate.  warmup: steps until the rate reaches its peak.  weight_decay: AdamW's.
    decay: step j of the training-time test counts decay**j in the loss.
    held_out: share of the documents that are kept out of training.
    eval_every: steps between two evaluations.  eval_prompts: held-out prompts that the finished head is measured on.

    ValueError names a setting that can't work, and the values that can.
    """

    num_steps: int = 5
    draft_vocab_size: int = 0
    intermediate_size: int = 0
    texts: int = 8192
    width: int = 256
    longest_prompt: int = 48
    greedy_share: float = 0.5
    steps: int = 4000
    batch: int = 32
    lr: float = 1e-3
    warmup: int = 200
    weight_decay: float = 0.01
    decay: float = 0.9
    held_out: float = 0.05
    eval_every: int = 500
    eval_prompts: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_steps", "texts", "steps", "batch", "eval_every", "eval_prompts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        most = self.width - 1 - max(spec.lookahead for spec in MEASURED)  # leaves room to measure the head at the end
        if not 4 <= self.longest_prompt <= most:
            raise ValueError(f"longest_prompt: expected 4 .. {most} for width {self.width}, got {self.longest_prompt}")
        least = max(spec.topk for spec in MEASURED)
        if self.draft_vocab_size and self.draft_vocab_size < least:
            raise ValueError(f"draft_vocab_size: expected 0 (the target's) or at least {least}, got {self.draft_vocab_size}")
        if not 0.0 <= self.greedy_share <= 1.0:
            raise ValueError(f"greedy_share: expected a share between 0 and 1, got {self.greedy_share}")


@dataclass(frozen=True)
class TargetRun:
    """Settings of one training run of a small Llama target.  The defaults make the target that ships with specdec.

    hidden_size to head_dim: the model's shape, by the names of transformers' LlamaConfig.
    vocab_size: tokens of the byte-level BPE tokenizer that the run trains.  context: tokens of a row.
    steps, batch: optimizer steps, and rows of each.
    lr: peak learning rate.  warmup: steps until the rate reaches its peak.  weight_decay: AdamW's.
    dropout: probability of dropping a value that attention or MLP adds to the residual stream.
    extra_share: share of a batch's rows that come from the extra text at the start of the run.
    held_out: share of each file's documents that are kept out of training.  eval_every: steps between two evaluations.

    ValueError names a setting that can't work, and the values that can.
    """

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
    extra_share: float = 0.5
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
            raise ValueError(f"vocab_size: expected at least 257 (256 bytes and the separator), got {self.vocab_size}")
        for name in ("dropout", "extra_share"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name}: expected 0 <= {name} < 1, got {getattr(self, name)}")
