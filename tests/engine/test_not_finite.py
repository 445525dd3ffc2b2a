"""Logits that are not finite: their request fails with an error that says so, and the others go on.

Keeps out: a target with NaN weights that writes token 0 for ever, is "equal" to itself, and benches as a success.
"""

import pytest
import torch
from toolkit.driver import Driver
from toolkit.models import Zoo
from torch import Tensor

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.batch.tree import DraftTree
from specdec.ops.topk import greedy_tokens
from specdec.verify.accept import accept_path

SAMPLED = {"temperature": 0.7, "seed": 1}


def never_drafted(decoder: SpecDecoder, texts: list[list[int]]) -> int:
    """A token that is neither in the texts nor in the drafter's vocabulary.

    A token of that vocabulary may be drafted.  On the torch backend, which multiplies masked values by 0, its keys would then
    spoil the other nodes of its tree.
    """
    offsets_V = decoder.head.d2t_V  # type: ignore[union-attr]
    assert offsets_V is not None
    drafted = set((torch.arange(len(offsets_V)) + offsets_V).tolist())
    return next(token for token in range(decoder.model.config.vocab_size) if token not in drafted.union(*texts))


@pytest.mark.slow_cases
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.7, "seed": 1}, {"temperature": 0.7, "seed": 1, "top_k": 5}], ids=str
)
@pytest.mark.parametrize("speculate", [True, False])
def test_only_the_request_it_belongs_to_fails(zoo: Zoo, speculate: bool, sampling: dict, value: float) -> None:
    """A prompt with the poisoned token fails at its first token; its neighbours write what they write without it."""
    decoder = zoo.decoder("llama", "eagle3", SpecConfig(3, 4, 12), page_size=4, max_batch_size=4, max_seq_len=96)
    params = SamplingParams(max_tokens=12, **sampling)
    good = [[3, 4, 5], [7, 8]]
    want = [out.token_ids for out in decoder.generate(good, params, speculate=speculate)]
    poison = never_drafted(decoder, [*good, *want, [2]])
    embedding = decoder.model.embed_tokens.weight  # type: ignore[union-attr,operator]
    kept = embedding[poison].clone()
    embedding.data[poison] = value
    try:
        driver = Driver(decoder)
        requests = [driver.submit(prompt, params, speculate) for prompt in [good[0], [2, poison], good[1]]]
        driver.run_until_idle()
        driver.assert_nothing_leaked()
        assert [request.result().token_ids for request in (requests[0], requests[2])] == want
        with pytest.raises(RuntimeError, match="logits are not finite .* at position 2"):
            requests[1].result()
    finally:
        embedding.data[poison] = kept


def test_a_round_that_meets_it_fails_too(zoo: Zoo) -> None:
    """The head of the model is poisoned while a stream runs: the error names the position, and the pages come back."""
    decoder = zoo.decoder("llama", "eagle3", SpecConfig(3, 4, 12), page_size=4, max_batch_size=4, max_seq_len=96)
    stream = decoder.stream([3, 4], SamplingParams(max_tokens=40))
    got = len(next(stream).token_ids)
    weight = decoder.model.norm.weight  # type: ignore[union-attr]
    kept = weight.clone()
    weight.data.fill_(torch.nan)
    try:
        with pytest.raises(RuntimeError, match="not finite") as info:
            for chunk in stream:
                got += len(chunk.token_ids)
        assert f"position {2 + got}" in str(info.value)
    finally:
        weight.data.copy_(kept)
    Driver(decoder).assert_nothing_leaked()
    (after,) = decoder.generate([3, 4], SamplingParams(max_tokens=9))
    assert after.token_ids == zoo.greedy("llama", [3, 4], 24)[:9]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_tokens_say_where_there_is_none(dtype: torch.dtype) -> None:
    """-1 for a NaN, for +inf and for nothing but -inf; a finite best among -inf counts."""
    rows = torch.randn(6, 50, dtype=dtype)
    rows[1, 7], rows[2, 9], rows[3], rows[4, :49] = torch.nan, torch.inf, -torch.inf, -torch.inf
    got = greedy_tokens(rows, finite=True)
    assert got.tolist() == [int(rows[0].argmax()), -1, -1, -1, 49, int(rows[5].argmax())]
    assert greedy_tokens(rows)[:1].tolist() == got[:1].tolist() and int(greedy_tokens(rows).min()) >= 0


def test_no_draft_token_is_accepted_after_it() -> None:
    """Keeps out: a walk that goes on from a node without a token, and a -1 that reaches an embedding."""

    def walk(targets: list[int]) -> tuple[list[int], Tensor, Tensor]:
        tree = DraftTree.chain(torch.tensor([[5, 6, 7, 8]]))
        done = accept_path(tree, torch.tensor([targets]), torch.ones(1, dtype=torch.int32))
        return done.emitted.numbers_BX[0].tolist(), done.tokens_BE[0], done.accepted_B

    emitted, tokens, accepted = walk([6, -1, 8, 9])
    assert int(accepted) == 1 and emitted[:3] == [1, 6, -1] and int(tokens.min()) >= 0
    emitted, _, accepted = walk([-1, 7, 8, 9])
    assert int(accepted) == 0 and emitted[:2] == [0, -1]
