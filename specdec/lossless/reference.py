"""A text against its target: which of its tokens a pass in a wider dtype would not take, and whether rounding explains them.

Every pass of a 16-bit model rounds on its own, so passes that are right may choose different tokens where the best ones lie
close together.  How close is measured, on the same text and without speculation: one dense pass runs in a wider dtype, another
one in the model's own, and at each place the two sets of logits differ, by an amount that is not the same for all tokens.  How
far these amounts lie apart among the leading tokens is the noise of that place.  Rounding explains a token if its logit lies no
further below the best than FACTOR times the noise of its place, or the text's median noise where that is larger.

FACTOR comes from benchmarks/texts/near_ties.py, which measures how far below the best the tokens of right texts lie, in units
of this noise: about 1 at most where nothing of the next paragraph plays a part.

Over 8-bit KV both passes round keys and values as the cache does.  A value near the middle between two steps may be rounded to
either of them.  A router that chooses experts, or an indexer that chooses keys, may likewise hang on the last bit of one score.
The noise is larger there, but one pass may show nothing of it at just the place that another pass shows it.  So if a token of
such a decoder is not explained, more passes run, with the embedding an ulp off, and the largest noise counts.

Shapes: R places in the text (the prompt's last ones, then all of the output), I places of the output, C leading tokens, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.attention.caches.quant_cache import as_stored
from specdec.loading.resolve import EngineSettings
from specdec.lossless.choice import GeneratedText, least_raise
from specdec.lossless.passes import DensePasses, Poll
from specdec.ops.cuda_graph import on_device
from specdec.ops.launch import launching
from specdec.runner.workers import Workers
from specdec.session import Session

FACTOR = 2.0
LEADING = 16  # tokens whose logits are compared at a place
PROMPT_PLACES = 64  # at most; an output may be too short to tell the usual noise
PIECE = 256  # places whose logits are held at once
PASSES_CHOOSING, PASSES_STEPS = 32, 4  # more passes at most (see DensePasses): the more there are, the more they may excuse


@dataclass(frozen=True)
class Judged:
    """A token at one place of an output.

    best: the token that the reference takes there.  rank: of the token by its score; 1 is best.
    margin: how far the token's logit is from being taken (see least_raise); None: no logit would help.
    bound: the largest margin that rounding explains there.
    """

    index: int
    token: int
    best: int
    rank: int
    margin: float | None
    bound: float

    @property
    def is_explained(self) -> bool:
        return self.margin is not None and self.margin <= self.bound


@dataclass(frozen=True)
class ReferenceCheck:
    """One text against the reference.

    off: those of the output's tokens that the reference does not take, in order.  asked: tokens that were asked for besides.
    bound: the median over the output's places.  unsure: at so many places the two best tokens are closer than the bound.
    """

    off: list[Judged]
    asked: list[Judged]
    bound: float
    unsure: int


@torch.inference_mode()
def read_text(
    passes: DensePasses, text: GeneratedText, asked: Iterable[tuple[int, int]] = (), piece: int = PIECE
) -> ReferenceCheck:
    """Compares each token of the output with the reference.

    asked: places of the output, and other tokens to judge there.  piece: how many places' logits are held at once.
    """
    extra = list(asked)
    look = _Look(passes, text, {place for place, _ in extra}, piece)
    judged = [look.judge(place, token) for place, token in [*((p, text.token_ids[p]) for p in look.off), *extra]]
    for number in range(PASSES_CHOOSING if passes.choosing else PASSES_STEPS if passes.steps else 0):
        if all(each.is_explained or each.margin is None for each in judged):
            break
        look.measure(passes.hidden_nearby(look.before, number))
        judged = [replace(each, bound=look.bound_I[each.index].item()) for each in judged]
    own = len(look.off)
    return ReferenceCheck(judged[:own], judged[own:], look.bound_I.median().item(), int((look.gap_I <= look.bound_I).sum()))


def passes_of(session: Session) -> DensePasses:
    """Those of the session's decoder."""
    return DensePasses(session.model, session.settings, session.as_stored)


def read_together(session: Session, text: GeneratedText, asked: Iterable[tuple[int, int]] = ()) -> ReferenceCheck:
    """As `read_text`, by all ranks that hold the session's target: each computes its share of every pass."""
    device = session.settings.device
    if session.settings.options.tensor_parallel_size == 1:
        with launching(device), on_device(device):
            return read_text(passes_of(session), text, asked)
    return session.on_all_ranks(_read_share, session.settings, text, list(asked))


def _read_share(
    workers: Workers, settings: EngineSettings, text: GeneratedText, asked: list[tuple[int, int]]
) -> ReferenceCheck:
    return read_text(share_of_passes(workers, settings), text, asked)


def share_of_passes(workers: Workers, settings: EngineSettings, poll: Poll | None = None) -> DensePasses:
    """A rank's share of a decoder's passes.  settings: of any of its ranks.  poll: see DensePasses."""
    verifier, device = workers.verifier, workers.state.lens_B.device
    return DensePasses(verifier.model, replace(settings, device=device), as_stored(verifier.cache), poll)


class _Look:
    """One text's wide pass, and the noise at each of its places as far as it has been measured.

    before: the ids whose logits choose the text's tokens, from the prompt's first one on.
    off: the places of the output where the wide pass takes another token than the text.
    gap_I: how far the second-best token's score lies below the best, in logits.  bound_I: see Judged.
    """

    def __init__(self, passes: DensePasses, text: GeneratedText, places: set[int], piece: int) -> None:
        assert text.token_ids, "an output without tokens says nothing"
        self.passes, self.text, self._piece = passes, text, piece
        self.before = [*text.prompt_ids, *text.token_ids][:-1]
        self._skipped = max(0, len(text.prompt_ids) - 1 - PROMPT_PLACES)
        self._prompt_places = len(text.prompt_ids) - 1 - self._skipped
        self.off: list[int] = []
        self._logits: dict[int, Tensor] = {}  # of the places that are judged
        with passes.wide():
            self._read_wide(passes.hidden(self.before)[self._skipped :], places)
        self._noise_R = torch.zeros(len(self._leading_RC), dtype=torch.float32, device=passes.device)
        self._median: float | None = None
        self.measure(passes.hidden(self.before))

    def _read_wide(self, hidden_RH: Tensor, places: set[int]) -> None:
        """Chooses tokens by the logits after each place, and keeps what is needed of these logits."""
        ids_R = torch.tensor(
            [*self.before, self.text.token_ids[-1]][self._skipped + 1 :], dtype=torch.int64, device=hidden_RH.device
        )
        leading, values, gaps = [], [], []
        for start in range(0, len(hidden_RH), self._piece):
            logits_RV, ids = self.passes.logits(hidden_RH[start : start + self._piece]), ids_R[start : start + self._piece]
            first = start - self._prompt_places  # the piece's first place, counted in the output
            scores_RV = self.text.scores(logits_RV, range(first, first + len(logits_RV)))
            best_R2 = scores_RV.topk(2)
            leading.append(torch.cat((scores_RV.topk(min(LEADING, scores_RV.shape[1])).indices, ids[:, None]), dim=1))
            values.append(logits_RV.gather(1, leading[-1]))
            gaps.append((best_R2.values[:, 0] - best_R2.values[:, 1]) * (self.text.sampling.temperature or 1.0))
            off = [first + row for row in (best_R2.indices[:, 0] != ids).nonzero()[:, 0].tolist() if first + row >= 0]
            self.off += off
            for place in {*off, *(place for place in places if first <= place < first + len(logits_RV))}:
                self._logits[place] = logits_RV[place - first].clone()
        self._leading_RC, self._logits_RC = torch.cat(leading), torch.cat(values)
        self.gap_I = torch.cat(gaps)[self._prompt_places :]

    def measure(self, hidden_TH: Tensor) -> None:
        """Takes the noise of one more pass in the model's own dtype into account."""
        hidden_RH, noise = hidden_TH[self._skipped :], []
        for start in range(0, len(hidden_RH), self._piece):
            leading_RC = self._leading_RC[start : start + self._piece]
            logits_RC = self.passes.logits(hidden_RH[start : start + self._piece]).gather(1, leading_RC)
            error_RC = logits_RC.to(self._logits_RC.dtype) - self._logits_RC[start : start + self._piece]
            noise.append((error_RC.amax(1) - error_RC.amin(1)).float())
        noise_R = torch.cat(noise)
        if self._median is None:
            self._median = noise_R.median().item()
        self._noise_R = torch.maximum(self._noise_R, noise_R)
        self.bound_I = FACTOR * self._noise_R.clamp(min=self._median)[self._prompt_places :]

    def judge(self, place: int, token: int) -> Judged:
        logits_V = self._logits[place]
        scores_V = self.text.scores(logits_V[None], [place])[0]
        rank = int((scores_V > scores_V[token]).sum()) + 1
        margin = least_raise(self.text, place, logits_V, token)
        return Judged(place, token, int(scores_V.argmax()), rank, margin, self.bound_I[place].item())
