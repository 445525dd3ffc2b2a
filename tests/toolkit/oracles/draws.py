"""Many draws of one token by the runtime's own sampling code, for chi-square tests."""

import torch
from torch import Tensor

from specdec.batch.sampling import RowSampling, sample_rows

DRAWS, LIMIT = 200_000, 1e-4  # of a case; and the p-value below which counts do not follow a distribution


def draw(
    logits_RV: Tensor, seed_R: Tensor, position_R: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> Tensor:
    """[R] int64: a token from each row of logits, by the options' names in SamplingParams.  position_R: of the token itself."""
    count, device = len(seed_R), logits_RV.device
    row = RowSampling(
        torch.full((count,), temperature, device=device),
        torch.full((count,), top_k, device=device),
        torch.full((count,), top_p, device=device),
        seed_R,
    )
    return sample_rows(logits_RV, row, position_R, filtered=top_k > 0 or top_p < 1)
