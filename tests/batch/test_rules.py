"""Logits after rules for single tokens, at every node of random trees: by brute force over each node's own text, and by
transformers' processors where it has them; on one rank and on several.
"""

import random

import pytest
import torch
from toolkit.parallel.ranks import ThreadGroup, on_ranks, run_of
from toolkit.trees import random_trees
from torch import Tensor
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from specdec import SamplingParams
from specdec.batch.choose import EDITS, edited_logits
from specdec.batch.rules import LogitRows
from specdec.batch.sampling import RowSampling
from specdec.batch.state import BatchState
from specdec.batch.tables import TokenTables
from specdec.batch.tree import DraftTree
from specdec.engine.needs import RowChoice, union
from specdec.limits import MAX_BAD_WORD_TOKENS
from specdec.parallel.group import ALONE
from specdec.parallel.vocabulary import Vocabulary
from specdec.steps import STEPS, Grammar, Needs

V, EOS = 11, 9
OPTIONS = {
    "bias": dict(logit_bias={0: 3.0, 4: -50.0, 10: 1.5}),
    "repetition": dict(repetition_penalty=1.7),
    "below one": dict(repetition_penalty=0.6),
    "presence": dict(presence_penalty=1.1),
    "frequency": dict(frequency_penalty=-0.7),
    "bad words": dict(bad_words=[[3], [1, 2], [0, 0], [5, 6, 7], [2, 1, 0, 3]]),
    "ends": dict(min_tokens=5, stop_token_ids=[2]),
    "nothing": {},
    "all": dict(
        logit_bias={1: 2.0, 6: -3.0}, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3, min_tokens=6,
        bad_words=[[8], [1, 1], [0, 1, 2]],
    ),
}  # fmt: skip


def brute_force(logits_V: Tensor, prompt: list[int], output: list[int], params: SamplingParams) -> Tensor:
    """The logits after a text, by transformers' processors and, for what it has none, by counting."""
    ids_1T, x_1V = torch.tensor([prompt + output]), logits_V[None].clone()
    if params.logit_bias:
        x_1V = SequenceBiasLogitsProcessor({(token,): added for token, added in params.logit_bias.items()})(ids_1T, x_1V)
    x_1V = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids_1T, x_1V)
    for token in range(V):
        x_1V[0, token] -= params.frequency_penalty * output.count(token) + params.presence_penalty * (token in output)
    if params.bad_words:
        x_1V = NoBadWordsLogitsProcessor([list(word) for word in params.bad_words])(ids_1T, x_1V)
    ends = torch.tensor(sorted({EOS, *(params.stop_token_ids or ())}))
    return MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, ends)(ids_1T, x_1V)[0]


class Batch:
    """Rows with an option each, their prompts and outputs, and random trees after them."""

    def __init__(self, seed: int, is_tree: bool) -> None:
        rng = random.Random(seed)
        self.params = [SamplingParams(**options) for options in OPTIONS.values()]
        B = len(self.params)
        self.prompts = [[rng.randrange(V) for _ in range(rng.choice([1, 2, 9, 40]))] for _ in range(B)]
        self.outputs = [[rng.randrange(V) for _ in range(rng.choice([1, 2, 4, 20]))] for _ in range(B)]
        self.tree = random_trees(B, 9, 4, V, rng) if is_tree else DraftTree.chain(torch.zeros(B, 1, dtype=torch.int64))
        self.tree.tokens_BN[:, 0] = torch.tensor([output[-1] for output in self.outputs])
        self.logits_RV = 4 * torch.randn(B * self.tree.num_nodes, V, generator=torch.Generator().manual_seed(seed))
        last_B1 = torch.tensor([len(p) + len(o) - 1 for p, o in zip(self.prompts, self.outputs, strict=True)])[:, None]
        self.positions_R = (last_B1 + self.tree.depths_BN).flatten()
        rows = zip(self.params, self.prompts, strict=True)
        self.choices = [RowChoice.of(params, 0, prompt, params.bad_words or (), [EOS]) for params, prompt in rows]
        self.needs = union(choice.needs for choice in self.choices)

    def edited(self, group: ThreadGroup) -> Tensor:
        """What one rank computes of its run, after recording the outputs in pieces of several sizes."""
        vocabulary = Vocabulary.of(V, group)
        tables = TokenTables.neutral(len(self.params), vocabulary.own, "cpu")
        for row, choice in enumerate(self.choices):
            if choice.rules is not None:
                tables.enter(row, choice.rules, vocabulary.first)
        piece, longest = 3, max(map(len, self.outputs))
        padded_BT = torch.tensor([[*output, *[7] * (longest + piece - len(output))] for output in self.outputs])
        for at in range(0, longest, piece):
            counts_B = torch.tensor([min(piece, max(0, len(output) - at)) for output in self.outputs])
            tables.record(padded_BT[:, at : at + piece], counts_B, vocabulary.first)
        sampling = RowSampling.of([choice.options for choice in self.choices], "cpu")._replace(tables=tables)
        logits_RW = run_of(vocabulary, self.logits_RV)
        return edited_logits(logits_RW, LogitRows(sampling, self.positions_R, vocabulary, self.tree), self.needs)

    def wanted(self) -> Tensor:
        rows = []
        for row, node_logits in enumerate(self.logits_RV.view(len(self.params), -1, V)):
            for node, logits_V in enumerate(node_logits):
                path, at = [], node
                while at:
                    path.insert(0, int(self.tree.tokens_BN[row, at]))
                    at = int(self.tree.parents_BN[row, at])
                rows.append(brute_force(logits_V, self.prompts[row], self.outputs[row] + path, self.params[row]))
        return torch.stack(rows)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("is_tree", [True, False], ids=["tree", "plain"])
def test_every_node_has_the_logits_of_its_own_text(seed: int, is_tree: bool) -> None:
    """Keeps out: counts without the path, or of other branches; a bad word that begins before the root; the root counted twice;
    an option that reaches another row; a token of another rank's run."""
    batch = Batch(seed, is_tree)
    want = batch.wanted()
    torch.testing.assert_close(batch.edited(ALONE), want)  # type: ignore[arg-type]
    for size in (2, 6, 8):  # 8 ranks: the last one has no token
        assert torch.equal(torch.cat(on_ranks(size, batch.edited), dim=1), batch.edited(ALONE))  # type: ignore[arg-type]
    assert not torch.equal(batch.logits_RV == want, torch.ones_like(want, dtype=torch.bool))


@pytest.mark.parametrize("in_prompt", range(MAX_BAD_WORD_TOKENS))
def test_a_bad_word_may_be_as_long_as_it_may(in_prompt: int) -> None:
    """Keeps out: a word of the most tokens whose first ones are the prompt's, and forgotten as the row enters or later."""
    word = [token % 7 for token in range(MAX_BAD_WORD_TOKENS)]
    prompt, output = [8, *word[:in_prompt]], word[in_prompt:-1]
    choice = RowChoice.of(SamplingParams(bad_words=[word]), 0, prompt, [word])
    assert choice.rules is not None
    tables = TokenTables.neutral(1, V, "cpu")
    tables.enter(0, choice.rules, 0)
    for token in output:
        tables.record(torch.tensor([[token]]), torch.tensor([1]), 0)
    sampling = RowSampling.of([choice.options], "cpu")._replace(tables=tables)
    before_1 = torch.tensor([len(prompt) + len(output) - 1])
    (edited_V,) = edited_logits(torch.zeros(1, V), LogitRows(sampling, before_1, Vocabulary.of(V, ALONE)), choice.needs)
    assert [token for token in range(V) if edited_V[token] == -torch.inf] == [word[-1]]


def test_a_moved_row_takes_its_rules_along() -> None:
    """Keeps out: a row whose counts stay behind when another row leaves, and a new row that inherits rules."""
    state = BatchState.empty(3, 2, page_size=1, device="cpu").with_tables(V)
    assert state.tables is not None
    for number, tensor in enumerate(state.tables.tensors()):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) % (5 + number))
    before = [tensor.clone() for tensor in state.tables.tensors()]
    state.move_rows(torch.tensor([2]), torch.tensor([0]))
    for old, new in zip(before, state.tables.tensors(), strict=True):
        assert torch.equal(new[0], old[2]) and torch.equal(new[1], old[1])
    entered = RowSampling.of([RowChoice.of(SamplingParams(), 0, [1]).options], "cpu")
    state.enter_rows(torch.tensor([0]), torch.zeros(1, 1, 1), entered, torch.ones(1))
    for neutral, new in zip(TokenTables.neutral(1, V, "cpu").tensors(), state.tables.tensors(), strict=True):
        assert torch.equal(new[0], neutral[0]) and not torch.equal(new[1], neutral[0])


def test_what_ends_a_text_ends_that_of_a_grammar() -> None:
    """Keeps out: a stop id that a grammar bans where its text is complete, so that the text never ends there."""
    for ignore_eos, ends in ((False, (2, EOS)), (True, (2,))):
        params = SamplingParams(min_tokens=3, stop_token_ids=[2], ignore_eos=ignore_eos)
        assert (rules := RowChoice.of(params, 0, [1], (), [EOS]).rules) is not None and rules.ends == ends
    choice = RowChoice.of(SamplingParams(regex="a", stop_token_ids=[2]), 0, [1], (), [EOS])
    assert choice.grammar == Grammar("regex", "a", (2, EOS)) and choice.needs == Needs.of("grammar")


def test_a_step_s_place_is_known() -> None:
    """Keeps out: a declared step that no pass runs, one that runs and no option declares, a drafter's graph without noise that
    is replayed for rows with noise, tables that are not made for a step that reads them."""
    # Of choose_tokens itself, of drafts, and of accepted paths.
    others = {"sampled", "filtered", "min_p", "processed", "prediction", "sources", "waits"}
    assert {*STEPS} == {*EDITS, *others} and not EDITS.keys() & others
    assert Needs.of(*STEPS).drafts.steps >= {"sampled", "filtered", "min_p"}
    tables = {step for step in STEPS if Needs.of(step).rules}
    assert tables == {"bias", "penalties", "bad_words", "ends"}
    assert {step for step in STEPS if Needs.of(step).history} == {"penalties", "bad_words"}


def test_needs_compose_and_stay_few() -> None:
    """Keeps out: a captured graph for each of hundreds of combinations; a step that runs although no row needs it."""
    from specdec.engine.needs import MAX_NEEDS, BatchNeeds

    batches, seen = BatchNeeds(), set()
    assert batches.of([Needs()] * 3) == Needs()
    assert batches.of([Needs(), Needs.of("sampled"), Needs.of("bias")]) == Needs.of("sampled", "bias")
    for bits in range(2 ** (len(STEPS) + 1)):
        wanted = Needs.of(*(step for i, step in enumerate(STEPS) if bits >> i & 1), logprobs=bits >> len(STEPS))
        got = batches.of([wanted])
        assert got.steps >= wanted.steps and got.logprobs >= wanted.logprobs
        seen.add(got)
    assert len(seen) < MAX_NEEDS + len(STEPS)
    assert batches.of([Needs()]) == Needs()
