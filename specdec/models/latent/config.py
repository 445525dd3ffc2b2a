"""The sizes of a model with multi-head latent attention (MLA).  Knows no config.json and no weights."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.models.config import ModelConfig
from specdec.models.yarn import YarnRope

LATENT_EPS = 1e-6  # DeepSeek's code fixes it for the norms inside of attention, whatever rms_norm_eps is


@dataclass(frozen=True)
class LatentConfig(ModelConfig):
    """head_dim is that of the rotated part.  q_rank: of the queries' own latent, None: they have none.

    nope_dim: of a head's queries and keys that is not rotated.  interleaved: rotated pairs lie side by side in the
    checkpoint.  latent_eps: of the norms inside of attention; rms_norm_eps is for the other norms.
    """

    q_rank: int | None = None
    nope_dim: int = 0
    value_dim: int = 0
    interleaved: bool = True
    latent_eps: float = LATENT_EPS

    @property
    def scale(self) -> float:
        """Of the softmax."""
        scale: float = (self.nope_dim + self.head_dim) ** -0.5
        return scale * self.rope.scale_factor if isinstance(self.rope, YarnRope) else scale

    @property
    def attention_widths(self) -> tuple[int, ...]:
        return (self.num_heads * self.value_dim,)

    def row_lengths(self, ranks: int) -> tuple[int, ...]:
        whole, *shared = super().row_lengths(ranks)
        return (whole, *([] if self.q_rank is None else [self.q_rank]), *shared)
