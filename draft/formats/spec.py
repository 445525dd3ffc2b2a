"""The one form into which every published head is read, whatever its layout.

Readers (`formats/`) make a `HeadSpec`; modules, the loader and `specdec inspect` know nothing else of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specdec.models.config import ModelConfig

FeatureNorm = Literal["none", "each", "joint"]


@dataclass(frozen=True)
class HeadSpec:
    """A head's own sizes (`model`: widths, layers, heads, rope, windows, dtype) and how it connects to its target.

    kind: "eagle3" or "eagle1".
    aux_layers: ascending 0-based target layers whose outputs are the head's features; empty: the target's final hidden state
        is.
    target_hidden_size: width of one feature.
    draft_vocab_size: rows of the head's language-model head.
    fc_bias: whether `fc` has a bias; EAGLE-1/2 only.  All fields below are EAGLE-3's, but for `own_embeddings`, `draft_ids` and
        `format`.
    feature_norm: whether a norm stands before `fc`: over each layer's output ("each") or over all of them side by side
        ("joint").
    norm_before_residual: whether the first layer's residual is the normed feature.
    recycles_normed: whether the next step's feature is the output after the final norm; else it is the output before it.
    norms_logits: whether the language-model head reads the output after the final norm.
    own_embeddings, own_lm_head: whether the checkpoint brings them; else they are the target's.
    draft_ids: the target's id of each draft id, ascending; None: both use one vocabulary.
    format: the layout from which the head was read.
    """

    model: ModelConfig
    kind: str  # "eagle3" | "eagle1"
    aux_layers: tuple[int, ...]
    target_hidden_size: int
    draft_vocab_size: int
    fc_bias: bool = False
    feature_norm: FeatureNorm = "none"
    norm_before_residual: bool = False
    recycles_normed: bool = False
    norms_logits: bool = True
    own_embeddings: bool = False
    own_lm_head: bool = True
    draft_ids: tuple[int, ...] | None = None
    format: str = ""

    @property
    def feature_size(self) -> int:
        """F: the width of one token's features as the target returns them."""
        return max(1, len(self.aux_layers)) * self.target_hidden_size

    @property
    def description(self) -> str:
        """One line for whoever loads the head."""
        reads = f"layers {', '.join(map(str, self.aux_layers))}" if self.aux_layers else "the final hidden state"
        windows = {kind.window for kind in self.model.layer_kinds if kind.window}
        window = f", window of {max(windows)}" if windows else ""
        return (
            f"{self.kind.replace('eagle', 'EAGLE-')} head in the layout {self.format or 'of no file'}: reads {reads} of the "
            f"target, {self.draft_vocab_size} of {self.model.vocab_size} tokens, trained on up to {self.trained_length}{window}"
        )

    @property
    def trained_length(self) -> int:
        """The most tokens of a text that the head was trained on, as its config says."""
        return self.model.max_position
