"""The frame in which a target of any family is loaded: opened, held against its config, and filled layer by layer.

A family says what is its own (`Family`).  Every tensor of the folder is used, or is an error; every rank fills its share.
This file knows how checkpoints of all families call embeddings, layers, norms and the head, and no kind of layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specdec.models.causal_lm import CausalLM, MakeLayer
from specdec.models.checkpoints.checkpoint import Checkpoint, config_path
from specdec.models.checkpoints.loader import OUR_NAMES, Names, Parts, build, copy_, fill_layer, fill_linear, fill_norm, named
from specdec.models.checkpoints.mistaken import refuse_head_tensors
from specdec.models.checkpoints.mtp_names import mtp_prefixes, refuse_uncounted
from specdec.models.checkpoints.unsaid_quantisation import refuse_unsaid_quantisation
from specdec.models.config import ModelConfig
from specdec.models.keys.wrapper_table import WRAPPERS
from specdec.models.keys.wrappers import refuse_wrapped
from specdec.models.schemes.config import AT_LOAD
from specdec.models.sharding import share_of
from specdec.parallel.shard import WHOLE, Shard


class Family(NamedTuple):
    """What targets of a family have of their own.  Configs are those of `parse`.

    parse: from a config.json's object and the file's name, for errors.
    layer: makes a decoder layer of a config (a rank's share of it) and a number.
    expect: holds the config's sizes of layers against the checkpoint's headers.  The number of layers was held before.
    parts: how the kinds of attention and MLP in its layers are filled; their norms are filled by name.
    unsaid: of keys that a config may leave out, what that means, in words.
    model: the model around the layers.  fill_more: fills what such a model has besides.
    norms: of norms that checkpoints call otherwise than `fill_layer` says, their names; the model's own last one is "norm".
    """

    parse: Callable[[dict[str, Any], str], ModelConfig]
    layer: MakeLayer
    expect: Callable[[Checkpoint, Any], None]
    parts: Parts
    unsaid: Mapping[str, str] = {}
    norms: Names = OUR_NAMES
    model: type[CausalLM] = CausalLM
    fill_more: Callable[[Any, Checkpoint], None] = lambda model, checkpoint: None


def load_family(
    family: Family,
    checkpoint: Checkpoint,
    config: ModelConfig,
    max_positions: int,
    device: torch.device,
    dtype: torch.dtype,
    shard: Shard = WHOLE,
) -> CausalLM:
    """A target with its weights.  ValueError names what only numbers show to be wrong.

    checkpoint: the target's tensors, after `check_tensors`.  config: the whole model's.  shard: this rank's share of it.
    """
    own, late = share_of(config, shard), config.quantization is not None
    model = build(lambda: family.model(own, max_positions, family.layer), device, dtype, late)
    fill_target(model, checkpoint, family)
    checkpoint.finish()
    return model


def open_target(folder: Path, config: ModelConfig) -> Checkpoint:
    """The folder's tensors, stored as the config says.  ValueError if it ignores quantised weights, or they are a head's."""
    by_expert, wrapper = config.experts is not None, WRAPPERS.get(config.wrapper)
    checkpoint = Checkpoint(folder, True, config.quantization, by_expert, wrapper, config.family)
    refuse_head_tensors(checkpoint.names(), folder)
    if config.quantization is None or config.quantization.method == AT_LOAD:
        refuse_unsaid_quantisation(checkpoint)
    return checkpoint


def check_tensors(checkpoint: Checkpoint, family: Family, config: ModelConfig) -> None:
    """ValueError for all that headers show to be wrong: a tensor that is missing, left over, or of another shape or dtype.

    A few sizes are compared first, so that no absurd one makes a module.  Then the target is filled as it will be, but without
    numbers, in no memory.  config: the whole model's.
    """
    headers, names, where = checkpoint.headers(), checkpoint.names(), str(config_path(checkpoint.folder))
    refuse_wrapped(names, config.family, where)
    refuse_uncounted(names, config, where)
    headers.expect_layers("model.layers", config.num_layers)
    headers.expect("model.embed_tokens.weight", (config.vocab_size, config.hidden_size), "vocab_size and hidden_size")
    family.expect(headers, config)
    fill_target(empty(family, config), headers, family)
    headers.finish()


def empty(family: Family, config: ModelConfig) -> CausalLM:
    """A target without weights, on torch's meta device: what can be asked of it before anything is loaded."""
    return build(lambda: family.model(config, 1, family.layer), torch.device("meta"), torch.float32)


def fill_target(model: CausalLM, checkpoint: Checkpoint, family: Family) -> None:
    """All of a target, but for MTP layers, which a drafter may load."""
    parts, norms = family.parts, family.norms
    family.fill_more(model, checkpoint)
    for index, layer in enumerate(model.layers):
        fill_layer(layer, checkpoint, f"model.layers.{index}", parts, norms)
    copy_(model.embed_tokens.weight, checkpoint, "model.embed_tokens.weight")
    fill_norm(model.norm, checkpoint, named(checkpoint, "model", "norm", norms))
    if not model.config.tie_embeddings:
        fill_linear(model.lm_head, checkpoint, "lm_head")
    elif "lm_head.weight" in checkpoint:
        head = checkpoint.take("lm_head.weight", tuple(model.embed_tokens.weight.shape))
        if checkpoint.has_data and not torch.equal(head, checkpoint.take("model.embed_tokens.weight")):
            raise ValueError(
                f"{checkpoint.folder}: config.json ties lm_head to the embeddings, but the checkpoint's own differs from them; "
                "expected tie_word_embeddings false"
            )
    checkpoint.ignore_endings("rotary_emb.inv_freq")  # old exports wrote this buffer; it follows from the config
    checkpoint.leave(mtp_prefixes(model.config))
