"""Chooses the target's tokens from its logits: one pass, of which a batch runs the steps that it needs.

For each row of logits the token chosen is the argmax of a score: of the logits themselves where the row is greedy, else of the
filtered log-probabilities plus noise (Gumbel-max, see ops/noise/gumbel.py).  Before that, the steps in EDITS change the logits.
This module knows no model.

Shapes: R rows of logits, W a rank's run of the vocabulary, V the vocabulary, E tokens of an output, X words of a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.batch.grammars.masks import BitMasks, masked_logits
from specdec.batch.rules import LogitRows, biased, penalised, without_bad_words, without_early_ends
from specdec.batch.sampling import RowSampling
from specdec.batch.sigma import near_the_best
from specdec.batch.tables import TokenTables
from specdec.batch.transfer import to_device
from specdec.batch.tree import DraftTree
from specdec.ops.noise.cutoff import Cutoff, cutoffs, min_p_cutoffs
from specdec.ops.noise.sample import gumbel_scores, sampled_tokens
from specdec.parallel.group import ALONE
from specdec.parallel.vocabulary import Vocabulary
from specdec.steps import Grammar, Needs, RowOptions, TokenRules


def within_grammar(logits_RW: Tensor, rows: LogitRows) -> Tensor:
    """Bans tokens that a sequence's grammar does not allow."""
    assert rows.sampling.masks is not None, "a pass over rows with a grammar has masks"
    return masked_logits(logits_RW, rows.sampling.masks, rows.vocabulary.first)


# The steps (see Needs) that change logits, in the order in which they run.  Each makes float32 logits, [R, W].
EDITS: dict[str, Callable[[Tensor, LogitRows], Tensor]] = {
    "bias": biased,
    "penalties": penalised,
    "bad_words": without_bad_words,
    "ends": without_early_ends,
    "grammar": within_grammar,
    "top_n_sigma": near_the_best,
}


def edited_logits(logits_RW: Tensor, rows: LogitRows, needs: Needs) -> Tensor:
    """[R, W]: the logits after the steps that are needed of EDITS."""
    for step, edit in EDITS.items():
        if step in needs.steps:
            logits_RW = edit(logits_RW, rows)
    return logits_RW


class Chosen(NamedTuple):
    """The target's tokens.

    tokens_R: int64, the token after the one at each row's absolute position; -1 where the logits are not finite.
    weighed_RW: the logits whose log-probabilities are asked for; None: none are.
    """

    tokens_R: Tensor
    weighed_RW: Tensor | None


def choose_tokens(
    logits_RW: Tensor,
    sampling: RowSampling,
    positions_R: Tensor,
    needs: Needs,
    vocabulary: Vocabulary,
    tree: DraftTree | None = None,
) -> Chosen:
    """Runs the steps that are needed.

    logits_RW: of this rank's run of the vocabulary.  The other arguments: see LogitRows.
    """
    raw_RW = logits_RW
    logits_RW = edited_logits(logits_RW, LogitRows(sampling, positions_R, vocabulary, tree), needs)
    cutoff = cutoff_of(logits_RW, sampling, needs, vocabulary)
    if needs.sampled and vocabulary.group.size == 1:
        tokens_R = sampled_tokens(logits_RW, sampling.temperature_R, sampling.seed_R, positions_R + 1, cutoff)
    elif needs.sampled:
        tokens_R = vocabulary.greedy(token_scores(logits_RW, sampling, positions_R, cutoff, vocabulary.first))
        tokens_R = tokens_R.where(vocabulary.largest(logits_RW).isfinite(), -1)
    else:
        tokens_R = vocabulary.greedy(logits_RW, finite=True)
    if not needs.logprobs:
        return Chosen(tokens_R, None)
    if "processed" not in needs.steps:
        return Chosen(tokens_R, raw_RW)
    rows = sampling.expand_rows(logits_RW.shape[0] // sampling.rows)
    if needs.sampled:
        is_greedy_R1 = (rows.temperature_R == 0)[:, None]
        logits_RW = torch.where(is_greedy_R1, logits_RW, kept_logits(logits_RW, rows, cutoff, vocabulary.first))
    return Chosen(tokens_R, torch.where(rows.column("processed")[:, None] > 0, logits_RW, raw_RW))


def token_scores(
    logits_RW: Tensor, sampling: RowSampling, positions_R: Tensor, cutoff: Cutoff | None, first: int = 0
) -> Tensor:
    """[R, W] float32: the scores of which the chosen token has the highest, where rows may be sampled.

    logits_RW: after the rules for single tokens, of the ids from `first` on.  cutoff: what filters keep; None: all.  The other
    arguments: see `choose_tokens`.
    """
    rows = sampling.expand_rows(logits_RW.shape[0] // sampling.rows)
    return gumbel_scores(logits_RW.float(), rows.temperature_R, rows.seed_R, positions_R + 1, cutoff, first)


def scores_at(
    logits_RV: Tensor,
    choice: tuple[RowOptions, TokenRules | None, Needs, Grammar | None],
    prompt_tokens: int,
    output_ids: Sequence[int],
    places: Sequence[int],
    masks_RX: Tensor | None = None,
) -> Tensor:
    """[R, V] float32: the scores of one row's tokens at these places of its output, as rounds compute them.

    logits_RV: the target's, after the text before each place.  prompt_tokens: how many tokens the prompt has.
    masks_RX: int32, what the row's grammar allows at these places; None: the row has none.
    """
    (options, rules, needs, _), device = choice, logits_RV.device
    sampling, vocabulary = RowSampling.of([options], device), Vocabulary.of(logits_RV.shape[1], ALONE)
    before_R = torch.tensor(places, dtype=torch.int64, device=device) + prompt_tokens - 1
    if not needs.steps.isdisjoint(EDITS):
        edited = []
        for number, place in enumerate(places):
            at = slice(number, number + 1)
            tables = None if rules is None else _tables_after(rules, output_ids[: max(place, 0)], logits_RV)
            masks = None if masks_RX is None else BitMasks(masks_RX[None, at].to(device), torch.zeros_like(before_R[:1]).int())
            rows = LogitRows(sampling._replace(tables=tables, masks=masks), before_R[at], vocabulary)
            edited.append(edited_logits(logits_RV[at], rows, needs))
        logits_RV = torch.cat(edited)
    if not needs.sampled:
        return logits_RV.float()
    return token_scores(logits_RV, sampling, before_R, cutoff_of(logits_RV, sampling, needs, vocabulary))


def _tables_after(rules: TokenRules, output_ids: Sequence[int], logits_RV: Tensor) -> TokenTables:
    """The tables of one row after some of its output, where these logits are."""
    tables = TokenTables.neutral(1, logits_RV.shape[1], logits_RV.device)
    tables.enter(0, rules, 0)
    if output_ids:
        output_1E = to_device([list(output_ids)], logits_RV.device)
        tables.record(output_1E, torch.full_like(output_1E[:, 0], len(output_ids)), 0)
    return tables


def kept_logits(logits_RW: Tensor, rows: RowSampling, cutoff: Cutoff | None, first: int = 0) -> Tensor:
    """[R, W] float32: the logits divided by the temperature, -inf where a filter drops the token.

    rows: one for each row of logits; a greedy row is divided by 1, and its filters are not meant.  first: the first id.
    """
    logits_RW = logits_RW.float()  # as the cutoff has them: 64 bits of a token at it would lie on either side
    scaled_RW = logits_RW / rows.filters.safe_temperature_B[:, None]
    if cutoff is None:
        return scaled_RW
    return scaled_RW.where(cutoff.keeps(logits_RW, scaled_RW, first), -torch.inf)


def cutoff_of(logits_RW: Tensor, sampling: RowSampling, needs: Needs, vocabulary: Vocabulary) -> Cutoff | None:
    """What the filters keep of each row of whole logits; None: all.  sampling: of each sequence, or of each row."""
    if "filtered" in needs.steps:
        return cutoffs(vocabulary.whole(logits_RW), sampling.filters)
    if "min_p" in needs.steps:
        return min_p_cutoffs(vocabulary.largest(logits_RW), sampling.filters, vocabulary.size)
    return None
