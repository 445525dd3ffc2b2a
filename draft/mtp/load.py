"""Loads a target's MTP layers from the target's own folder, strictly.

Every tensor below the layers' prefixes is checked by its header before memory is taken, and used or refused by name; what the
layers repeat of the target must be the target's, number for number.  Matrices in 8 or 4 bits are read as the target's are, and
stay so; the join alone is dequantised.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from specdec.draft.kind import Facts, OpenDrafter
from specdec.draft.mtp.facts import facts_of
from specdec.draft.mtp.fill import empty_mtp, fill
from specdec.draft.mtp.head import MtpHead
from specdec.draft.mtp.layouts import read_mtp
from specdec.draft.mtp.spec import MtpSpec
from specdec.draft.mtp.tensors import check_tensors, copies, how_stored, stored_tensors
from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.loader import build
from specdec.models.config import ModelConfig
from specdec.models.keys.wrapper_table import WRAPPERS
from specdec.models.schemes.formats import RoundToNearest
from specdec.models.schemes.rules import Quantization, Rule
from specdec.models.sharding import join, share_of
from specdec.models.target import Target


class OpenMtp(OpenDrafter):
    """A target's folder whose MTP layers are understood and checked.  ValueError names what is missing, unknown, or not
    computed here.
    """

    checkpoint: Checkpoint

    def __init__(self, folder: Path, target: ModelConfig) -> None:
        self.spec = spec = read_mtp(folder, target)
        self.checkpoint = Checkpoint(
            folder, quantization=own_scheme(target.quantization, spec), by_expert=spec.model.experts is not None,
            wrapper=WRAPPERS.get(target.wrapper),
        )  # fmt: skip
        check_tensors(self.checkpoint, spec)
        super().__init__(empty_mtp(spec))

    def load(self, target: Target, max_positions: int, device: torch.device, dtype: torch.dtype) -> MtpHead:
        """The layers with their weights, or with the rank's share of them."""
        checkpoint, spec = self.checkpoint, self.spec
        own = replace(spec, model=share_of(spec.model, target.config.shard, "draft head"))
        head = build(lambda: MtpHead(own, max_positions), device, dtype, late=checkpoint.quantization is not None)
        fill(head, checkpoint)
        for name, of_target in copies(spec).items():
            if name in checkpoint:
                _expect_copy(checkpoint, name, of_target, target.config)
        checkpoint.leave_all_but(spec.prefixes)
        checkpoint.ignore_endings("rotary_emb.inv_freq")
        checkpoint.finish()
        head.borrow(target)
        join(head, target.group)
        return head

    def unkept(self, target: Checkpoint) -> set[str]:
        return set(self.checkpoint.names()) - set(stored_tensors(self.checkpoint, self.spec))

    @property
    def stored_as(self) -> str:
        return how_stored(self.checkpoint, self.spec)

    def facts(self) -> Facts:
        return facts_of(self.checkpoint, self.spec)


def own_scheme(of_target: Quantization | None, spec: MtpSpec) -> Quantization | None:
    """How the layers' matrices are stored: quantised as the target's where tensors say so, else unquantised.

    Published checkpoints differ: DeepSeek's have the layers quantised as the target is, but for the join; tools that quantise a
    target may pass its MTP layers over, and name them nowhere.  What is rounded as the target is loaded, the layers are not.
    """
    if of_target is None or any(isinstance(format, RoundToNearest) for _, format in of_target.formats):
        return None
    own = tuple(Rule("wildcard", prefix.removesuffix(".")) for prefix in spec.prefixes)
    return replace(of_target, optional=(*of_target.optional, *own))


def _expect_copy(checkpoint: Checkpoint, name: str, of_target: str, target: ModelConfig) -> None:
    """ValueError if a tensor that repeats one of the target's differs from it."""
    of_target = "model.embed_tokens.weight" if target.tie_embeddings else of_target
    if not torch.equal(checkpoint.take(name), checkpoint.take(of_target)):
        raise ValueError(
            f"{checkpoint.file(name)}: tensor {name!r} must repeat the target's {of_target!r}, whose embedding and "
            "language-model head MTP layers share, but differs from it"
        )
