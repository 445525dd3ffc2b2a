"""The settings of training runs.  This file imports neither torch nor transformers, so `--help` appears at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeVar

from specdec.config import SpecConfig

KINDS = ("eagle3", "p-eagle", "dflash", "dflash2", "dspark")
MARKOV = ("vanilla", "gated", "rnn")
LAYOUTS = ("auto", "safeailab", "speculators")
PRECISIONS = ("auto", "float32", "bfloat16")
CAPTURES = ("auto", "off")
CHECKPOINTS = ("full", "small")
SAVE_DTYPES = ("bfloat16", "fp8")
STEPS = 4000  # of a run that nothing else ends
MAX_NUMBER = 1 << 40  # of any number; seeds of rows are 1,000,003 times the run's, and must fit 64 bits
MAX_CANDIDATES = 256  # that readers take
MAX_PROMPT_TOKENS = 48  # where rows leave room for them
OWNERS = {  # the kinds that have a setting which others have not
    "anchors": ("p-eagle", "dflash", "dflash2", "dspark"), "markov": ("dspark",), "markov_rank": ("dspark",),
    "selector_rank": ("dflash2",), "candidates": ("dflash2",),
    "draft_vocab_size": ("eagle3", "p-eagle", "dflash", "dspark"),
}  # fmt: skip
RATE, RATED, FALL = 4e-3, 128, 0.55  # the peak learning rate up to so many features; wider targets' fall with that power
MEASURED = (SpecConfig(5, 4, 16), SpecConfig(5, 1, 6))  # draft trees that a finished head is measured with

T = TypeVar("T")


def setting(default: T, meaning: str, choices: tuple[T, ...] = (), least: int | None = None) -> T:
    """A field of a run.

    meaning: what `--help` says of its flag.  choices: its values, if there are few.
    least: of a whole number that is checked with all others; None: it is none, or is checked alone.
    """
    return field(default=default, metadata={"meaning": meaning, "choices": choices, "least": least})


def meaning_of(field: Field[Any]) -> str:
    return field.metadata["meaning"]


def default_of(name: str) -> Any:
    """Of a setting of heads' runs."""
    return HeadRun.__dataclass_fields__[name].default


def default_rate(hidden_size: int) -> float:
    """The peak learning rate of a head for a target of that width, to two digits."""
    return float(f"{RATE * min(1.0, (RATED / hidden_size) ** FALL):.1e}")


def _check_numbers(run: HeadRun | TargetRun) -> None:
    """All whole numbers, the optimizer's settings, and the share of held-out text."""
    for each in fields(run):
        if (least := each.metadata["least"]) is not None:
            _check_whole(run, each.name, least)
    least = 0.0 if isinstance(run, HeadRun) else math.ulp(0.0)
    if not least <= run.lr < math.inf:
        raise ValueError(f"lr: expected a number {'above 0' if least else 'of at least 0'}, got {run.lr}")
    if not 0.0 <= run.weight_decay < math.inf:
        raise ValueError(f"weight_decay: expected a number of at least 0, got {run.weight_decay}")
    if not 0.0 < run.held_out < 1.0:
        raise ValueError(f"held_out: expected a share between 0 and 1, got {run.held_out}")


def _check_whole(run: HeadRun | TargetRun, name: str, least: int) -> None:
    value = getattr(run, name)
    if type(value) is not int or value < least:
        near = math.ceil(value) if isinstance(value, float) and least < value < MAX_NUMBER else least
        raise ValueError(f"{name}: expected a whole number of at least {least}, got {value!r}; nearest: {near}")
    if value > MAX_NUMBER:
        raise ValueError(f"{name}: expected a whole number of at most {MAX_NUMBER}, got {value!r}")


def _check_kind(run: HeadRun) -> None:
    """The kind, and the settings that only some kinds have."""
    for each in fields(run):
        if (choices := each.metadata["choices"]) and getattr(run, each.name) not in choices:
            raise ValueError(f"{each.name}: expected one of {', '.join(choices)}, got {getattr(run, each.name)!r}")
    if run.kind != "eagle3" and run.layout == "safeailab":
        raise ValueError(
            f"layout: expected auto or speculators for kind={run.kind}, got {run.layout!r}: safeailab has eagle3 only"
        )
    if run.kind == "eagle3" and run.layers != 1:
        raise ValueError(f"layers: expected 1 for kind=eagle3, got {run.layers}")
    most = max(spec.max_steps for spec in MEASURED)
    if run.kind != "eagle3" and type(run.num_steps) is int and run.num_steps < most:
        raise ValueError(
            f"num_steps: expected at least {most} for kind={run.kind}, which is measured with {most} levels at the end, "
            f"got {run.num_steps}"
        )
    refuse_of_others(run.kind, {name: getattr(run, name) for name in OWNERS if getattr(run, name) != default_of(name)})


def refuse_of_others(kind: str, given: Mapping[str, Any]) -> None:
    """ValueError for a setting that only other kinds have.  given: values that somebody chose, by settings' names."""
    for name, value in given.items():
        if name in OWNERS and kind not in OWNERS[name]:
            raise ValueError(
                f"{name}: expected no value for kind={kind}, got {value!r}; it belongs to {', '.join(OWNERS[name])}"
            )


@dataclass(frozen=True)
class HeadRun:
    """Settings of one training run of a draft head.

    ValueError names a setting that can't work, and the values that can.
    """

    kind: str = setting("eagle3", "what kind of head", KINDS)
    num_steps: int = setting(5, "steps of the training-time test; of the other kinds: tokens drafted in a pass", least=1)
    layers: int = setting(1, "layers of the head; eagle3 has 1", least=1)
    anchors: int = setting(32, "of the kinds that draft in one pass: places in each row from which a step drafts", least=1)
    markov: str = setting("vanilla", "of dspark: the kind of its Markov head", MARKOV)
    markov_rank: int = setting(64, "of dspark: the rank of its Markov head", least=1)
    selector_rank: int = setting(64, "of dflash2: the rank of the tables by which it chooses among candidates", least=1)
    candidates: int = setting(16, "of dflash2: the likeliest tokens of a place, among which it chooses", least=1)
    layout: str = setting("auto", "whose files the head has; auto: safeailab for eagle3, else speculators", LAYOUTS)
    draft_vocab_size: int = setting(0, "tokens that the head can propose; 0: the target's whole vocabulary", least=0)
    intermediate_size: int = setting(0, "width of the head's MLP; 0: the target's", least=0)
    texts: int = setting(8192, "rows of text that the target writes", least=2)  # one is kept for the evaluation loss
    width: int = setting(256, "tokens of a row, its prompt included", least=5 + max(spec.lookahead for spec in MEASURED))
    longest_prompt: int = setting(0, "the most tokens of a row's prompt, at least 4; 0: 48, or fewer where rows are shorter")
    greedy_share: float = setting(0.5, "share of the rows that go on greedily; the others are sampled at temperature 1")
    steps: int = setting(0, f"optimizer steps; 0: {STEPS:,}, or as many as --seconds leaves time for", least=0)
    seconds: int = setting(
        0, "wall seconds from the start of the command to its last step, of all its calls together, to which the learning rate "
        "is fitted; 0: the steps say when the run ends", least=0
    )  # fmt: skip
    call_seconds: int = setting(
        0, "wall seconds after which this call ends with a checkpoint, for --resume; 0: it goes on to the end", least=0
    )  # fmt: skip
    batch: int = setting(32, "rows of a step", least=1)
    lr: float = setting(0.0, "peak learning rate; 0: by the width of the target")
    warmup: int = setting(200, "steps until the learning rate reaches its peak", least=0)
    weight_decay: float = setting(0.01, "AdamW's weight decay")
    decay: float = setting(0.9, "step j of the training-time test, or place j of a block, counts decay**j in the loss")
    precision: str = setting("auto", "of products and of the target; auto: bfloat16 on a GPU, float32 on a CPU", PRECISIONS)
    capture: str = setting("auto", "whether a step is one CUDA graph; auto: on a GPU", CAPTURES)
    keep_states: int = setting(
        -1, "MiB that the target's states of all rows may take; if they take more, steps compute them; -1: half of the GPU's "
        "free memory, 4096 on a CPU", least=-1
    )  # fmt: skip
    held_out: float = setting(0.05, "share of the documents, the last ones, that are kept out of training")
    eval_every: int = setting(0, "steps between two evaluations; 0: an eighth of the run", least=0)
    patience: int = setting(3, "evaluations in a row without a lower held-out loss that end the run; 0: none do", least=0)
    eval_prompts: int = setting(64, "held-out prompts that the finished head is measured on", least=1)
    checkpoint_size: str = setting(
        "full", "of a parameter, full: 12 bytes; small: 4, and --resume goes on almost alike", CHECKPOINTS
    )
    save_dtype: str = setting("bfloat16", "how the finished head's matrices are stored", SAVE_DTYPES)
    seed: int = setting(0, "seed of everything random", least=0)

    def __post_init__(self) -> None:
        _check_kind(self)
        _check_numbers(self)
        if self.steps == 0:
            object.__setattr__(self, "steps", MAX_NUMBER if self.seconds else STEPS)
        most = self.width - 1 - max(spec.lookahead for spec in MEASURED)  # leaves room to measure the head at the end
        if type(self.longest_prompt) is int and self.longest_prompt == 0:  # checkpoints and records hold the number
            object.__setattr__(self, "longest_prompt", min(MAX_PROMPT_TOKENS, most))
        _check_whole(self, "longest_prompt", 4)
        if not 0.0 < self.decay <= 1.0:
            raise ValueError(f"decay: expected 0 < decay <= 1, got {self.decay}")
        if self.longest_prompt > most:
            expected = f"longest_prompt: expected 4 .. {most} for width {self.width}"
            raise ValueError(f"{expected}, got {self.longest_prompt}; nearest: {most}")
        least = max(spec.topk for spec in MEASURED)
        if self.draft_vocab_size and self.draft_vocab_size < least:
            raise ValueError(f"draft_vocab_size: expected 0 (the target's) or at least {least}, got {self.draft_vocab_size}")
        if self.kind == "dflash2" and not least <= self.candidates <= MAX_CANDIDATES:
            nearest = min(max(self.candidates, least), MAX_CANDIDATES)
            raise ValueError(f"candidates: expected {least} .. {MAX_CANDIDATES}, got {self.candidates}; nearest: {nearest}")
        if not 0.0 <= self.greedy_share <= 1.0:
            raise ValueError(f"greedy_share: expected a share between 0 and 1, got {self.greedy_share}")

    @property
    def layout_of_head(self) -> str:
        """The layout that "auto" stands for."""
        return self.layout if self.layout != "auto" else "safeailab" if self.kind == "eagle3" else "speculators"


@dataclass(frozen=True)
class TargetRun:
    """Settings of one training run of a small Llama target.  The defaults make the target that ships with specdec.

    The fields from hidden_size to head_dim are the model's shape, by the names of transformers' LlamaConfig.

    ValueError names a setting that can't work, and the values that can.
    """

    hidden_size: int = setting(96, "width of the model", least=1)
    intermediate_size: int = setting(256, "width of its MLP", least=1)
    num_hidden_layers: int = setting(28, "layers", least=1)
    num_attention_heads: int = setting(3, "query heads", least=1)
    num_key_value_heads: int = setting(1, "key and value heads", least=1)
    head_dim: int = setting(32, "width of a head", least=2)
    vocab_size: int = setting(2048, "tokens of the tokenizer that the run trains")
    context: int = setting(512, "tokens of a row", least=2)
    steps: int = setting(3400, "optimizer steps", least=1)
    batch: int = setting(64, "rows of a step", least=1)
    lr: float = setting(4e-3, "peak learning rate")
    warmup: int = setting(300, "steps until the learning rate reaches its peak", least=0)
    weight_decay: float = setting(0.3, "AdamW's weight decay")
    dropout: float = setting(0.2, "probability of dropping a value that attention or MLP adds to the residual stream")
    extra_share: float = setting(0.5, "share of the extra text in a step's rows at the start of the run")
    held_out: float = setting(0.05, "share of the documents, the last ones, that are kept out of training")
    eval_every: int = setting(200, "steps between two evaluations", least=1)
    seed: int = setting(0, "seed of everything random", least=0)

    def __post_init__(self) -> None:
        _check_numbers(self)
        if self.head_dim % 2:
            raise ValueError(f"head_dim: expected an even number, got {self.head_dim}")
        if over := self.hidden_size % self.num_attention_heads:  # as transformers' LlamaConfig has it
            nearest = max(self.num_attention_heads, self.hidden_size - over)
            expected = f"hidden_size: expected a multiple of num_attention_heads={self.num_attention_heads}"
            raise ValueError(f"{expected}, got {self.hidden_size}; nearest: {nearest}")
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
