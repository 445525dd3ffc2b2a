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

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.attention.caches.quant_cache import as_stored
from specdec.loading.resolve import EngineSettings
from specdec.lossless.choice import GeneratedText, least_raise
from specdec.lossless.passes import DensePasses, Poll, never
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


def read_text(
    passes: DensePasses, text: GeneratedText, asked: Iterable[tuple[int, int]] = (), piece: int = PIECE
) -> ReferenceCheck:
    """Compares each token of the output with the reference: see TextCheck."""
    return TextCheck(passes, text, asked, piece).run()


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


def share_of_passes(workers: Workers, settings: EngineSettings, poll: Poll = never) -> DensePasses:
    """A rank's share of a decoder's passes.  settings: of any of its ranks.  poll: see DensePasses."""
    verifier, device = workers.verifier, workers.state.lens_B.device
    return DensePasses(verifier.model, replace(settings, device=device), as_stored(verifier.cache), poll)


class TextCheck:
    """Compares each token of an output with the reference.

    asked: places of the output, and other tokens to judge there.  piece: how many places' logits are held at once.
    Where a poll of the passes raises MadeWay, `run` ends; the next call goes on there, with all that has been compared.

    before: the ids whose logits choose the text's tokens, from the prompt's first one on.
    """

    def __init__(
        self, passes: DensePasses, text: GeneratedText, asked: Iterable[tuple[int, int]] = (), piece: int = PIECE
    ) -> None:
        assert text.token_ids, "an output without tokens says nothing"
        self.passes, self.text, self._piece = passes, text, piece
        self._asked = list(asked)
        self._before = [*text.prompt_ids, *text.token_ids][:-1]
        self._skipped = max(0, len(text.prompt_ids) - 1 - PROMPT_PLACES)
        self._prompt_places = len(text.prompt_ids) - 1 - self._skipped
        self._ids_R = torch.tensor(
            [*self._before, text.token_ids[-1]][self._skipped + 1 :], dtype=torch.int64, device=passes.device
        )
        self._passes_done = 0
        self._hidden_RH: Tensor | None = None  # of the pass whose logits are being read
        self._read = 0  # its places whose logits have been read
        self._wide = _WideLogits([], [], [])
        self._open: deque[tuple[int, int, Tensor]] = deque()  # places, tokens to judge there, and logits
        self._off: list[int] = []  # places of the output where the wide pass takes another token than the text
        self._judged: dict[tuple[int, int], Judged] = {}  # by place and token
        self._noise: list[Tensor] = []  # of the pass under way, by piece
        self._noise_R: Tensor | None = None  # the largest of all passes
        self._median = 0.0  # of the first one

    @torch.inference_mode()
    def run(self) -> ReferenceCheck:
        passes = self.passes
        if self._passes_done == 0:
            with passes.wide():
                self._read_pass(passes.hidden, self._choose)
        if self._passes_done == 1:
            self._measure(passes.hidden)
        most = PASSES_CHOOSING if passes.choosing else PASSES_STEPS if passes.steps else 0
        while (number := self._passes_done - 2) < most and not all(map(_is_settled, self._judged.values())):
            self._measure(partial(passes.hidden_nearby, number=number))
        bound_I = self._bound_I()
        gap_I = torch.cat(self._wide.gaps)[self._prompt_places :]
        off = [self._judged[place, self.text.token_ids[place]] for place in self._off]
        asked = [self._judged[each] for each in self._asked]
        return ReferenceCheck(off, asked, bound_I.median().item(), int((gap_I <= bound_I).sum()))

    def _read_pass(self, hidden: Callable[[Sequence[int]], Tensor], read: Callable[[int, Tensor], None]) -> None:
        """One pass, or what is left of it: read(first place, logits) for each piece of it."""
        if self._hidden_RH is None:
            self._hidden_RH = hidden(self._before)[self._skipped :]
        while True:
            while self._open:
                self.passes.poll()
                self._judge(*self._open[0])
                self._open.popleft()
            if self._read >= len(self._hidden_RH):
                break
            read(self._read, self.passes.logits(self._hidden_RH[self._read : self._read + self._piece]))
            self._read += self._piece
        self._hidden_RH, self._read = None, 0
        self._passes_done += 1

    def _choose(self, start: int, logits_RV: Tensor) -> None:
        """Takes what is needed of the wide pass's logits after these places, of which `start` is the first."""
        ids_R = self._ids_R[start : start + self._piece]
        places = range(start - self._prompt_places, start - self._prompt_places + len(logits_RV))  # counted in the output
        scores_RV = self.text.scores(logits_RV, places)
        best_R2 = scores_RV.topk(2)
        leading_RC = torch.cat((scores_RV.topk(min(LEADING, scores_RV.shape[1])).indices, ids_R[:, None]), dim=1)
        gaps_R = (best_R2.values[:, 0] - best_R2.values[:, 1]) * (self.text.sampling.temperature or 1.0)
        self._wide.leading.append(leading_RC)
        self._wide.logits.append(logits_RV.gather(1, leading_RC))
        self._wide.gaps.append(gaps_R)
        off = [places[row] for row in (best_R2.indices[:, 0] != ids_R).nonzero()[:, 0].tolist() if places[row] >= 0]
        self._off += off
        own = ((place, self.text.token_ids[place]) for place in off)
        asked = (each for each in self._asked if each[0] in places)
        self._open += ((place, token, logits_RV[place - places[0]]) for place, token in dict.fromkeys((*own, *asked)))

    def _measure(self, hidden: Callable[[Sequence[int]], Tensor]) -> None:
        """Takes the noise of one more pass in the model's own dtype into account."""
        self._read_pass(hidden, self._compare)
        noise_R, self._noise = torch.cat(self._noise), []
        if self._noise_R is None:
            self._noise_R, self._median = noise_R, noise_R.median().item()
        self._noise_R = torch.maximum(self._noise_R, noise_R)
        bound_I = self._bound_I()
        self._judged = {key: replace(each, bound=bound_I[each.index].item()) for key, each in self._judged.items()}

    def _compare(self, start: int, logits_RV: Tensor) -> None:
        number = start // self._piece
        wide_RC = self._wide.logits[number]
        error_RC = logits_RV.gather(1, self._wide.leading[number]).to(wide_RC.dtype) - wide_RC
        self._noise.append((error_RC.amax(1) - error_RC.amin(1)).float())

    def _bound_I(self) -> Tensor:
        assert self._noise_R is not None
        return FACTOR * self._noise_R.clamp(min=self._median)[self._prompt_places :]

    def _judge(self, place: int, token: int, logits_V: Tensor) -> None:
        """By the wide logits.  The bound follows."""
        scores_V = self.text.scores(logits_V[None], [place])[0]
        rank = int((scores_V > scores_V[token]).sum()) + 1
        margin = least_raise(self.text, place, logits_V, token)
        self._judged[place, token] = Judged(place, token, int(scores_V.argmax()), rank, margin, 0.0)


class _WideLogits(NamedTuple):
    """What is kept of the wide pass's logits, by piece.

    leading: ids of the tokens that are compared, [R, C].  logits: theirs.  gaps: how far the second-best token's score lies
    below the best, in logits.
    """

    leading: list[Tensor]
    logits: list[Tensor]
    gaps: list[Tensor]


def _is_settled(judged: Judged) -> bool:
    return judged.is_explained or judged.margin is None
