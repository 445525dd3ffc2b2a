"""Which token a text takes by its target's logits, and how far the logits would have to be off for it to take another one.

The choice itself is the runtime's own code, so a sampling option that the runtime learns is judged as the runtime computes it.

Shapes: R of the I places of an output, V vocabulary, X words of a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.batch.choose import scores_at
from specdec.config import SamplingParams
from specdec.engine.needs import RowChoice

FINEST = 2.0**-24  # of the largest logit: how exactly the least raise is found


class GeneratedText(NamedTuple):
    """What a request wrote.

    sampling: as it ran, with a seed if it samples.  choice: how its row chose tokens; None: as `sampling` says, which then has
    no bad words, and no minimum before the model's own end.  masks_IX: what its grammar allows at each place of the output.
    """

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    sampling: SamplingParams
    choice: RowChoice | None = None
    masks_IX: Tensor | None = None

    def scores(self, logits_RV: Tensor, places: Sequence[int]) -> Tensor:
        """[R, V]: the text's token at each of these places of its output is the one with the highest score.

        logits_RV: of the target, after what comes before each place.
        """
        sampling = self.sampling
        assert sampling.temperature == 0 or sampling.seed is not None
        assert self.choice or not sampling.bad_words, "the ids of bad words are known to whoever has the tokenizer"
        choice = self.choice or RowChoice.of(sampling, sampling.seed or 0, self.prompt_ids)
        masks_RX = None
        if self.masks_IX is not None:
            every = (len(places), self.masks_IX.shape[1])
            masks_RX = torch.full(every, -1, dtype=torch.int32, device="cpu")  # the prompt may be anything
            masks_RX[[place >= 0 for place in places]] = self.masks_IX[[place for place in places if place >= 0]]
        return scores_at(logits_RV, choice, len(self.prompt_ids), self.token_ids, places, masks_RX)


def least_raise(text: GeneratedText, place: int, logits_V: Tensor, token: int) -> float | None:
    """By how much this token's logit must rise against those of better tokens, so that the text takes it at that place.

    Half of it is added to the token's own logit, the other half is taken from each token that scores better.  Two passes whose
    logits are off by at most half of it each way could so choose differently, also where the rise lets a token into top-k or
    top-p, or drives another one out.  Greedily it is how far the token's logit lies below the best.  None: nothing helps.
    """
    (scores_V,) = text.scores(logits_V[None], [place])
    if int(scores_V.argmax()) == token:
        return 0.0
    direction_V = -0.5 * (scores_V > scores_V[token]).to(logits_V)
    direction_V[token] = 0.5

    def takes(rise: float) -> bool:
        return int(text.scores((logits_V + rise * direction_V)[None], [place])[0].argmax()) == token

    size = max(1.0, logits_V[logits_V.isfinite()].abs().max().item())
    low, high, most = 0.0, FINEST * size, 1e3 * size * max(1.0, text.sampling.temperature)
    while not takes(high):
        low, high = high, 2 * high
        if high > most:
            return None
    while high - low > FINEST * size:
        middle = (low + high) / 2
        low, high = (low, middle) if takes(middle) else (middle, high)
    return high
