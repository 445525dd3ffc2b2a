"""Many draws of one token by the runtime's own sampling code, for chi-square tests."""

from typing import Any

from torch import Tensor

from specdec import SamplingParams
from specdec.batch.choose import choose_tokens
from specdec.batch.sampling import RowSampling
from specdec.engine.needs import RowChoice
from specdec.parallel.group import ALONE
from specdec.parallel.vocabulary import Vocabulary

DRAWS, LIMIT = 200_000, 1e-4  # of a case; and the p-value below which counts do not follow a distribution


def draw(logits_RV: Tensor, seed_R: Tensor, position_R: Tensor, **options: Any) -> Tensor:
    """[R] int64: a token from each row of logits.  position_R: of the token itself.  options: of SamplingParams."""
    choice = RowChoice.of(SamplingParams(**options), 0, prompt_ids=())
    rows = RowSampling.of([choice.options], logits_RV.device).expand_rows(len(seed_R))
    rows.seed_R.copy_(seed_R)
    vocabulary = Vocabulary.of(logits_RV.shape[1], ALONE)
    return choose_tokens(logits_RV, rows, position_R - 1, choice.needs, vocabulary).tokens_R
