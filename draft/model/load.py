"""Opens a causal model's folder, or GGUF file, as a drafter, and loads it as a target is loaded: strictly, and by ranks.

Whether its tokens are the target's is asked where tokenizers are known (specdec/loading/vocabularies.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from specdec.draft.kind import Facts, OpenDrafter
from specdec.draft.model.facts import facts_of, stored_as
from specdec.draft.model.head import SmallModel
from specdec.draft.model.translation import Translation
from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.mistaken import head_mark, model_mark
from specdec.models.config import ModelConfig, read_json
from specdec.models.gguf.file import is_gguf
from specdec.models.registry import check_chosen, choose_target, empty_target, load_chosen
from specdec.models.target import Target
from specdec.options import EngineOptions


def is_model(place: Path, options: EngineOptions) -> bool:
    """Whether it holds a whole causal model, and no head."""
    if is_gguf(place):
        return True
    if not (place / "config.json").is_file() or head_mark(read_json(place / "config.json")):
        return False
    return bool(model_mark(Checkpoint(place, options.draft_pickle).names()))


class OpenSmallModel(OpenDrafter):
    """A model that is understood and checked.  ValueError says why it can't draft for that target, or as options say."""

    is_apart = True
    called = "small model"
    checkpoint: Checkpoint
    words: Translation | None

    def __init__(self, place: Path, options: EngineOptions, target: ModelConfig) -> None:
        if options.draft_pickle:
            raise ValueError(
                "draft_pickle=True would do nothing with a small model, which is read as a target is; nearest setting that "
                "works: draft_pickle=False"
            )
        chosen = choose_target(place, "native", options.draft_quantize)
        if why := refusal_by_target(target) or refusal_of(chosen.config, target):
            raise ValueError(f"{place} can't draft for this target: {why}")
        if options.beyond_trained == "window" and chosen.config.recurrent is not None:
            raise ValueError(
                f"beyond_trained='window' lets no layer read more tokens than it was trained on, and states of {place} hold "
                "whole texts; nearest setting that works: beyond_trained='draft'"
            )
        if options.beyond_trained == "window":
            chosen = chosen._replace(config=windowed(chosen.config))
        self.place, self.chosen, self.own_text = place, chosen, place
        self.checkpoint, self.target_ids = check_chosen(chosen, place), target.vocab_size
        self.ranks, self.words = options.tensor_parallel_size, None
        super().__init__(SmallModel(empty_target(chosen), target.vocab_size))

    def load(self, target: Target, max_positions: int, device: torch.device, dtype: torch.dtype) -> SmallModel:
        """With its weights, or with this rank's share of them."""
        own = load_chosen(self.chosen, self.place, max_positions, device, dtype, False, target.group, self.checkpoint)
        return SmallModel(own, self.target_ids, self.words)

    def translate(self, words: Translation) -> None:
        if self.chosen.config.reads_ids:
            raise ValueError(
                f"draft: {self.place} has other tokens than the target, and its layers read tokens by their own ids, beside "
                "embeddings; nearest thing that works: a model with the target's tokenizer, or draft='ngram'"
            )
        if self.ranks > 1:
            raise ValueError(
                f"draft: {self.place} has other tokens than the target, which a model on one process drafts, got "
                f"tensor_parallel_size={self.ranks}; nearest thing that works: tensor_parallel_size=1, or a model of its tokens"
            )
        self.words = words
        self.model = SmallModel(empty_target(self.chosen), self.target_ids, words)

    def unkept(self, target: Checkpoint) -> set[str]:
        tables = {"model.embed_tokens.weight", "lm_head.weight"}
        return tables if self.words else {"lm_head.weight"} if self.chosen.config.tie_embeddings else set()

    @property
    def added_values(self) -> int:
        return 0 if self.words is None else (len(self.words.reads) + len(self.words.drafts)) * self.chosen.config.hidden_size

    @property
    def stored_as(self) -> str:
        return stored_as(self.chosen.config)

    def facts(self) -> Facts:
        return facts_of(self.chosen, self.checkpoint, self.target_ids, self.words)


def refusal_by_target(target: ModelConfig) -> str:
    """Why no small model drafts for a target; empty if one can."""
    return f"it reads no text that an encoder reads, as {target.family} has one" if target.encoder is not None else ""


def refusal_of(own: ModelConfig, target: ModelConfig) -> str:
    """Why a model of that config can't draft for a target of that one, tokens apart; empty if it can."""
    nearest = "nearest thing that works: a model whose layers all read keys and values, such as a Llama"
    if own.encoder is not None:
        return f"it has an encoder, and a draft has nothing for it to read; {nearest}"
    if own.max_read is not None and own.indexer != target.indexer:
        return f"an indexer chooses the keys that its queries read; {nearest}"
    return ""


def windowed(config: ModelConfig) -> ModelConfig:
    """The same model, whose layers read no more tokens back than it was trained on.

    ValueError if kinds of layers with unlike heads would then read the same keys: a layer's kind is what tells its heads.
    """
    nearer = {
        kind: replace(kind, window=min(kind.window or config.max_position, config.max_position)) for kind in config.layer_kinds
    }
    if config.unlike_heads and len(set(nearer.values())) < len(nearer):
        raise ValueError(
            f"beyond_trained='window' would give layers with unlike heads one window of {config.max_position}; nearest setting "
            "that works: beyond_trained='draft'"
        )
    unlike = tuple((nearer.get(kind, kind), heads) for kind, heads in config.unlike_heads)
    return replace(config, layer_kinds=tuple(nearer[kind] for kind in config.layer_kinds), unlike_heads=unlike)
