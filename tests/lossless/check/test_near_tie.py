"""Which differences of two outputs are near-ties, by scripted logits; and by how much a logit must rise to be chosen."""

from dataclasses import replace

import pytest
import torch
from toolkit.bench import StubSession
from toolkit.models import Zoo

from specdec import EngineOptions, SamplingParams
from specdec.lossless.choice import GeneratedText, least_raise
from specdec.lossless.near_tie import difference, explain_divergence, first_divergence
from specdec.lossless.reference import Judged, passes_of
from specdec.lossless.verification import Divergence
from specdec.models.linear import Multiplying, use_numerics
from specdec.ops.noise.gumbel import gumbel_noise
from specdec.ops.products.numerics import FAST, INVARIANT

GREEDY = SamplingParams(max_tokens=9)
ERROR = [0.0, 0.05, 0.0, -0.05]  # of a pass in 16 bit; its noise is 0.1, so that the bound is 0.2


@pytest.mark.parametrize(
    ("logits", "dtype", "verdict"),
    [
        ([0, 16.0, 0, 16.19], torch.bfloat16, "near-tie"),
        ([0, 16.0, 0, 16.21], torch.bfloat16, "DIVERGED"),
        ([0, 16.0, 0, 16.19], torch.float16, "near-tie"),
        ([0, 16.0, 16.19, 16.19], torch.bfloat16, "near-tie"),  # three tie, and token 1 is third of them
        ([0, 16.0, 16.5, 16.1], torch.bfloat16, "DIVERGED"),  # close to each other, but not to the best
        ([-1000, 16.0, 0, 16.21], torch.bfloat16, "DIVERGED"),  # a large number elsewhere excuses nothing
        ([0, 16.0, 0, 16.0], torch.float32, "DIVERGED"),  # float32 has no excuse
    ],
)
def test_a_near_tie_is_two_tokens_within_what_rounding_was_seen_to_move(logits, dtype, verdict):
    """Keeps out: any difference in half precision waved through as rounding, and ties of three called errors."""
    session = StubSession(logits=logits, dtype=dtype, error=ERROR)
    part = explain_divergence(session, 0, [1, 2], [3, 3], [1, 3], GREEDY)
    assert (part.verdict, part.index, part.token_baseline, part.token_speculative) == (verdict, 0, 3, 1)
    assert part.margin == pytest.approx(max(logits) - logits[1], abs=1e-4)
    assert part.bound == pytest.approx(0.2, abs=1e-4)


def test_noise_is_how_far_errors_lie_apart_not_how_large_they_are():
    """Keeps out: a bound made large by an error that all tokens share, which changes no choice."""
    session = StubSession(logits=[0, 16.0, 0, 16.5], dtype=torch.bfloat16, error=[e + 40 for e in ERROR])
    part = explain_divergence(session, 0, [1, 2], [3], [1], GREEDY)
    assert (part.verdict, part.bound) == ("DIVERGED", pytest.approx(0.2, abs=1e-4))


def test_in_deterministic_mode_rounding_decides_nothing() -> None:
    """Keeps out: a break of the promise that texts are equal bit for bit, passed as a near-tie."""
    session = StubSession(logits=[0, 16.0, 0, 16.19], dtype=torch.bfloat16, error=ERROR)
    session.settings.options = EngineOptions(deterministic=True)
    assert explain_divergence(session, 0, [1, 2], [3, 3], [1, 3], GREEDY).verdict == "DIVERGED"


def test_over_8_bit_kv_rounding_may_decide_in_float32_too():
    """Keeps out: texts over 8-bit KV in float32 called wrong where a key fell midway between two steps."""
    session = StubSession(logits=[0, 16.0, 0, 16.19], dtype=torch.float32, error=ERROR)
    session.settings.options, session.as_stored = EngineOptions(kv_cache_dtype="int8"), lambda layer, kept: kept
    assert explain_divergence(session, 0, [1, 2], [3], [1], GREEDY).verdict == "near-tie"


def test_a_near_tie_of_sampled_text_is_one_of_perturbed_scores():
    """Keeps out: sampled text judged by its logits, where the second best token may win by far."""
    sampling = SamplingParams(temperature=0.5, seed=3)
    noise_V = gumbel_noise(torch.tensor([3]), torch.tensor([3]), 8)[0]  # the token after [1, 2] and [3] has position 3
    target_V = torch.tensor([0.0, 4.0, 0, 4.01, 0, 0, 0, 0])
    logits = ((target_V - noise_V) * 0.5).tolist()
    session = StubSession(logits=logits, dtype=torch.bfloat16, error=[*ERROR, 0, 0, 0, 0])
    part = explain_divergence(session, 0, [1, 2], [3, 3], [3, 1], sampling)
    assert (part.verdict, part.rank_baseline, part.rank_speculative) == ("near-tie", 1, 2)
    assert part.margin == pytest.approx(0.005, abs=1e-4)  # in logits, which the temperature doubles


def test_an_output_that_ends_early_has_diverged():
    """Keeps out: a lost tail that compares equal because zip stops."""
    assert first_divergence([1, 2], [1, 2, 3]) == 2
    assert first_divergence([1, 2], [1, 2]) is None
    part = explain_divergence(StubSession(), 0, [1], [1, 2], [1, 2, 3], GREEDY)
    assert part == Divergence(0, 2, None, 3)


@pytest.mark.slow_cases
@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.7}, {"top_k": 3, "top_p": 0.9}, {}])
def test_the_least_raise_is_the_least_that_changes_the_choice(options):
    """Keeps out: a token on the cutoff of top-k or top-p called impossible, and a margin that explains nothing.

    Whatever it says is tried: the logits moved by a little more choose the token, by a little less they do not.
    """
    generator = torch.Generator().manual_seed(0)
    for seed in range(4):
        text = GeneratedText([1, 2], [0], SamplingParams(temperature=0.8, seed=seed, **options))
        logits_V = 2 * torch.randn(6, generator=generator)
        scores_V = text.scores(logits_V[None], [0])[0]
        for token in range(6):
            rise = least_raise(text, 0, logits_V, token)
            assert rise is not None and (rise == 0) == (int(scores_V.argmax()) == token)
            direction_V = torch.where(scores_V > scores_V[token], -0.5, 0.0)
            direction_V[token] = 0.5
            for factor, takes in ((1.001, True), (0.999, False))[: 1 if rise == 0 else 2]:
                moved_V = text.scores((logits_V + factor * rise * direction_V)[None], [0])[0]
                assert (int(moved_V.argmax()) == token) is takes, (seed, token, rise)


def test_no_raise_helps_a_token_that_is_banned() -> None:
    """Keeps out: a token that a grammar bans called a near-tie, and a prompt that had to obey the grammar of the output."""
    masks_IX = torch.tensor([[0b0111], [-1]], dtype=torch.int32)
    logits_V = torch.tensor([0.0, 1.0, 2.0, 3.0])
    text, free = (
        GeneratedText([1, 2, 3], [2, 3], SamplingParams(regex="a"), masks_IX=masks_IX),
        GeneratedText([1, 2, 3], [2, 3], GREEDY),
    )
    assert least_raise(text, 0, logits_V, 3) is None and least_raise(text, 1, logits_V, 3) == 0.0
    assert least_raise(text, 0, logits_V, 1) == pytest.approx(1.0, abs=1e-4)
    assert difference(0, [3], [2], [judged(3, None), judged(2, 0.0)], may_round=True).verdict == "DIVERGED"
    places = [-2, -1, 0, 1]
    scores, unmasked = (each.scores(logits_V.expand(4, -1), places) for each in (text, free))
    assert torch.equal(scores[[0, 1, 3]], unmasked[[0, 1, 3]]) and scores[2, 3] == -torch.inf < unmasked[2, 3]


def judged(token: int, margin: float | None) -> Judged:
    return Judged(0, token, 2, 1, margin, bound=0.2)


@torch.no_grad()
def test_a_wide_pass_that_fails_leaves_the_model_as_it_was(zoo: Zoo) -> None:
    """Keeps out: a model that computes in another dtype, or in another order of sums, after a check that broke off."""
    with zoo.decoder("llama", None, None, dtype="bfloat16") as decoder:
        model = decoder.model
        before = {name: (weight.dtype, weight.data_ptr()) for name, weight in model.named_parameters()}
        session = StubSession()
        session.model, session.settings = model, replace(decoder.settings, options=EngineOptions(deterministic=True))
        use_numerics(model, INVARIANT)
        layer = model.layers[1]
        hook = layer.mlp.register_forward_hook(fail)
        with pytest.raises(ZeroDivisionError), passes_of(session).wide(small=100):
            assert all(module.numerics is FAST for module in model.modules() if isinstance(module, Multiplying))
            passes_of(session).hidden([1, 2, 3])
        hook.remove()
        assert {name: (weight.dtype, weight.data_ptr()) for name, weight in model.named_parameters()} == before
        assert all(module.numerics is INVARIANT for module in model.modules() if isinstance(module, Multiplying))


def fail(*_: object) -> None:
    raise ZeroDivisionError
