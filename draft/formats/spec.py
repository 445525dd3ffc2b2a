"""The one form into which every published head is read, whatever its layout.

Readers (`formats/`) make a `HeadSpec`; modules, the loader and `specdec inspect` know nothing else of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from specdec.models.config import ModelConfig

FeatureNorm = Literal["none", "each", "joint"]
MarkovKind = Literal["none", "vanilla", "gated", "rnn"]
Confidence = Literal["none", "hidden", "markov"]


class HeadKind(NamedTuple):
    """A kind of heads with files.

    title: for people.  reads_pairs: whether it reads pairs of a token and a feature (draft/head.py); else the features of
        the text are the context of its blocks.
    where: its class.
    layers: how many of the target's layers a head reads whose files name none; None: as many as it has layers itself; 0: heads
        of the kind read the target's final hidden state.
    """

    title: str
    reads_pairs: bool
    where: str
    layers: int | None = None


KINDS = {
    "eagle1": HeadKind("EAGLE-1", True, "specdec.draft.eagle.head:Eagle1Head", 0),
    "eagle3": HeadKind("EAGLE-3", True, "specdec.draft.eagle.head:Eagle3Head", 3),
    "p-eagle": HeadKind("P-EAGLE", True, "specdec.draft.block.peagle:PEagleHead", 3),
    "dflash": HeadKind("DFlash", False, "specdec.draft.block.dflash:DFlashHead"),
    "dflash2": HeadKind("DFlash2", False, "specdec.draft.block.dflash2.head:DFlash2Head"),
    "dspark": HeadKind("DSpark", False, "specdec.draft.block.dflash:DSparkHead"),
}


class SlotConvolution(NamedTuple):
    """DFlash2's convolutions over the rows of a block.  taps: how many rows one reads: its own, and those before it.

    group: how many neighbouring columns share the part of a kernel that depends on the row.
    """

    taps: int
    group: int


class Selection(NamedTuple):
    """DFlash2's choice among a row's likeliest tokens.  candidates: how many.  rank: of the tables that score pairs."""

    candidates: int
    rank: int


@dataclass(frozen=True)
class BlockSpec:
    """How a head drafts several tokens in one pass, over a block of rows: the last known token, then tokens yet unknown.

    size: the rows of the block that the head was trained with; 0: its files don't say.
    mask_id: the token whose embedding stands for a token that is not known.
    causal: for each layer, whether a row of the block reads no rows of the block after it.
    skips_anchor: whether the first row drafts nothing and each other row drafts the token of its own place; else every row
        drafts the token after its place.
    anchored_windows: whether all rows of a block read back to the same token, as many tokens as the window has less the rows of
        the block before the block's first row; else each row's window ends at the row.
    markov, markov_rank: the head that corrects a row's logits by the token drafted before it, and its rank.
    confidence: what the estimate that a drafted token is accepted reads: the row alone ("hidden"), or the embedding of the
        token before it too ("markov").
    embedding_scale: what the rows of the target's embeddings are multiplied with.
    logit_scale, softcap: logits are multiplied with the former; with a softcap c they are c * tanh(logit / c) then.
    convolution, selection: of DFlash2 heads; without the former their layers are DFlash's.
    """

    size: int
    mask_id: int
    causal: tuple[bool, ...]
    skips_anchor: bool = False
    anchored_windows: bool = False
    markov: MarkovKind = "none"
    markov_rank: int = 0
    confidence: Confidence = "none"
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    convolution: SlotConvolution | None = None
    selection: Selection | None = None

    @property
    def max_steps(self) -> int | None:
        """The most tokens that a pass drafts; None: any number."""
        return self.size - self.skips_anchor if self.size else None


@dataclass(frozen=True)
class HeadSpec:
    """A head's own sizes (`model`: widths, layers, heads, rope, windows, dtype) and how it connects to its target.

    kind: one of KINDS.
    aux_layers: ascending 0-based target layers whose outputs are the head's features; empty: the target's final hidden state
        is.
    target_hidden_size: width of one feature.
    draft_vocab_size: rows of the head's language-model head.
    fc_bias: whether `fc` has a bias; EAGLE-1/2 only.  The four fields below are those of EAGLE-3 and P-EAGLE.
    feature_norm: whether a norm stands before `fc`: over each layer's output ("each") or over all of them side by side
        ("joint").
    norm_before_residual: whether the first layer's residual is the normed feature.
    recycles_normed: whether the next step's feature is the output after the final norm; else it is the output before it.
    norms_logits: whether the language-model head reads the output after the final norm.
    own_embeddings, own_lm_head: whether the checkpoint brings them; else they are the target's.
    draft_ids: the target's id of each draft id, ascending; None: both use one vocabulary.
    format: the layout from which the head was read.
    block: of a head that drafts in one pass; None: it takes a step for each token.
    """

    model: ModelConfig
    kind: str
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
    block: BlockSpec | None = None

    @property
    def feature_size(self) -> int:
        """F: the width of one token's features as the target returns them.  Which layers' they are need not be known."""
        unnamed = KINDS[self.kind].layers
        unnamed = self.model.num_layers if unnamed is None else max(1, unnamed)
        return (len(self.aux_layers) or unnamed) * self.target_hidden_size

    @property
    def reads_final_state(self) -> bool:
        """Whether its features are the target's final hidden states, by its kind."""
        return KINDS[self.kind].layers == 0

    @property
    def reads_pairs(self) -> bool:
        return KINDS[self.kind].reads_pairs

    @property
    def description(self) -> str:
        """One line for whoever loads the head."""
        reads = f"layers {', '.join(map(str, self.aux_layers))}" if self.aux_layers else "the final hidden state"
        windows = {kind.window for kind in self.model.layer_kinds if kind.window}
        window = f", window of {max(windows)}" if windows else ""
        if self.block is not None:
            window += f", blocks of {self.block.size or 'any number of'} rows"
        return (
            f"{KINDS[self.kind].title} head in the layout {self.format or 'of no file'}: reads {reads} of the "
            f"target, {self.draft_vocab_size} of {self.model.vocab_size} tokens, trained on up to {self.trained_length}{window}"
        )

    @property
    def trained_length(self) -> int:
        """The most tokens of a text that the head was trained on, as its config says."""
        return self.model.max_position
