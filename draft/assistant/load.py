"""Opens an assistant's folder and loads it, strictly: every tensor is checked by its header before memory is taken.

What an assistant has no place for is refused here by name.  It borrows the target's embeddings; its output layer is its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from specdec.draft.assistant.config import MODEL_TYPE, AssistantConfig, layers_read, parse_assistant
from specdec.draft.assistant.facts import facts_of
from specdec.draft.assistant.head import Assistant
from specdec.draft.kind import Facts, OpenDrafter
from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.loader import build, fill_layer, fill_linear, fill_norm
from specdec.models.config import ModelConfig, read_json
from specdec.models.gemma4.config import GemmaConfig
from specdec.models.gemma4.loader import PARTS
from specdec.models.sharding import join, share_of
from specdec.models.target import Target
from specdec.options import EngineOptions

TABLE = "model.embed_tokens.weight"
REPEATED = "lm_head.weight"  # which some files repeat
ORDER = "masked_embedding.token_ordering"


def is_assistant(place: Path) -> bool:
    """Whether a folder's config.json says so."""
    config = place / "config.json"
    return config.is_file() and read_json(config).get("model_type") == MODEL_TYPE


class OpenAssistant(OpenDrafter):
    """An assistant that is understood and checked.  ValueError says why it can't draft for that target, or as options say."""

    is_apart = True
    checkpoint: Checkpoint

    def __init__(self, place: Path, options: EngineOptions, target: ModelConfig) -> None:
        where = str(place / "config.json")
        self.config = parse_assistant(read_json(place / "config.json"), where)
        self.read = layers_read(self.config, target, where)
        for problem in refusals(self.config, options):
            raise ValueError(f"draft: {place} is an assistant, {problem}")
        self.checkpoint = Checkpoint(place)
        model, headers = empty_assistant(self.config, self.read), self.checkpoint.headers()
        self._expect(headers)
        fill(model, headers)
        headers.finish()
        super().__init__(model)

    def _expect(self, headers: Checkpoint) -> None:
        """Sizes that follow from keys, before others are compared."""
        model, size = self.config.model, self.config.target_size
        headers.expect_layers("model.layers", model.num_layers)
        headers.expect(TABLE, (model.vocab_size, model.hidden_size), "text_config's vocab_size and hidden_size")
        said = "backbone_hidden_size and text_config's hidden_size"
        headers.expect("pre_projection.weight", (model.hidden_size, 2 * size), said)
        headers.expect("post_projection.weight", (size, model.hidden_size), said)

    def load(self, target: Target, max_positions: int, device: torch.device, dtype: torch.dtype) -> Assistant:
        """With its weights, or with this rank's share of them."""
        model = share_of(self.config.model, target.config.shard, "draft head")
        assert isinstance(model, GemmaConfig)
        own = replace(self.config, model=model)
        head = build(lambda: Assistant(own, self.read, max_positions), device, dtype)
        fill(head, self.checkpoint)
        self.checkpoint.finish()
        head.borrow(target)
        join(head, target.group)
        return head

    def unkept(self, target: Checkpoint) -> set[str]:
        return {REPEATED}

    def facts(self) -> Facts:
        return facts_of(self.config, self.read, self.checkpoint)


def refusals(config: AssistantConfig, options: EngineOptions) -> Iterator[str]:
    """What of the options an assistant can't do, with the nearest setting that works."""
    defaults = EngineOptions()
    for name, why in {
        "draft_pickle": "which is read from safetensors alone",
        "draft_quantize": "which is not stored in 8 or 4 bits here",
        "decode_context_parallel_size": "whose layers read all of a text's keys, which ranks would share",
    }.items():
        if (asked := getattr(options, name)) != (usual := getattr(defaults, name)):
            yield f"{why}, got {name}={asked!r}; nearest setting that works: {name}={usual!r}"
    if options.beyond_trained == "window":
        yield (
            "whose windows are the target's, got beyond_trained='window'; nearest setting that works: beyond_trained='draft'"
        )
    if config.centroids is not None and (ranks := options.tensor_parallel_size) > 1:
        yield (
            f"whose output layer reads tokens from all of the vocabulary, got tensor_parallel_size={ranks}; nearest setting "
            "that works: tensor_parallel_size=1"
        )


def empty_assistant(config: AssistantConfig, read: tuple[int, ...]) -> Assistant:
    """One without weights, on torch's meta device."""
    return build(lambda: Assistant(config, read, 1), torch.device("meta"), torch.float32)


def fill(head: Assistant, checkpoint: Checkpoint) -> None:
    """All of an assistant but what it borrows.  ValueError for a table that is stored twice and unlike."""
    fill_linear(head.pre_projection, checkpoint, "pre_projection")
    fill_linear(head.post_projection, checkpoint, "post_projection")
    for index, layer in enumerate(head.layers):
        fill_layer(layer, checkpoint, f"model.layers.{index}", PARTS)
    fill_norm(head.norm, checkpoint, "model.norm")
    fill_linear(head.lm_head, checkpoint, TABLE.removesuffix(".weight"))
    if REPEATED in checkpoint:
        repeated = checkpoint.take(REPEATED, (head.vocabulary.size, head.config.model.hidden_size))
        if checkpoint.has_data and not torch.equal(repeated, checkpoint.take(TABLE)):
            raise checkpoint.refuse(REPEATED, f"must repeat {TABLE!r}, but differs from it")
    if (own := head.centroids) is not None:
        fill_linear(own.centroids, checkpoint, "masked_embedding.centroids")
        order_V = checkpoint.take_integers(ORDER, (head.vocabulary.size,))
        if checkpoint.has_data:
            if not torch.equal(order_V.long().sort().values, torch.arange(len(order_V), dtype=torch.int64, device="cpu")):
                raise checkpoint.refuse(ORDER, "must name every token once")
            own.tokens_Cn.copy_(order_V.view(own.tokens_Cn.shape))
