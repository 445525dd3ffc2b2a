"""Requests that ask for a tree's shape: a round has the largest that any of its rows asks for, and the text is the target's."""

import itertools
from typing import Any

import pytest
from toolkit.driver import Driver
from toolkit.models import Zoo, ragged_prompts

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.engine.speculation import Speculation
from specdec.generation import Emitted
from specdec.limits import MAX_PAUSE
from specdec.steps import CatchUp, Needs, RunRound, Step, Try
from specdec.trees.shape import largest

CHAIN, TREE, WIDE = SpecConfig(4, 1, 5), SpecConfig(3, 2, 7), SpecConfig(3, 4, 12)
SETTINGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "page_size": 4, "max_batch_size": 3, "max_seq_len": 128, "smoke": False,
}  # fmt: skip


def asked_size(shape: SpecConfig) -> tuple[int, int]:
    return shape.num_draft_tokens, shape.levels


@pytest.mark.parametrize("is_auto", [False, True])
def test_a_round_has_the_largest_shape_that_is_asked_for(is_auto: bool) -> None:
    """Every combination of three wishes and none.  Keeps out: a shape that depends on the order of rows, one that nobody asked
    for, what rows without a wish would have taken and did not get, a pause that is not ended before a draft."""
    shapes = (TREE, CHAIN, WIDE)
    for wishes in itertools.chain.from_iterable(itertools.combinations([None, *shapes], count) for count in (1, 2, 3, 4)):
        for order in itertools.permutations(wishes):
            speculation = Speculation(shapes, is_auto=is_auto)
            controller: Any = speculation.controller
            for own in (None, CHAIN) if is_auto else (TREE,):
                if is_auto:
                    controller.choose = lambda *given, own=own: own
                    speculation.pause = 3
                before, step = speculation.next_round(4, Needs(), False, 1.0, asked=order)
                sizes = [shape for shape in (*order, own if None in order else None) if shape is not None]
                assert step.spec == (max(sizes, key=asked_size) if sizes else None)
                assert step.kind == ("speculative" if sizes else "paused")
                assert [type(each) for each in before] == [CatchUp] * bool(is_auto and sizes)
                assert speculation.pause == (0 if sizes else 4) * is_auto
    assert largest([SpecConfig(7, 1), SpecConfig(5, 2, 8)]) == SpecConfig(7, 1), "of as many nodes the deeper one"


def test_a_shape_is_made_ready_before_it_runs() -> None:
    """Where graphs are captured.  Keeps out: a captured round that nobody tried, and one that is tried each time."""
    speculation = Speculation(SpecConfig("auto", 4, 16).shapes, 0.2, is_auto=True)
    wide = SpecConfig(7, 4, 16)
    for turn in range(3):
        before, step = speculation.next_round(2, Needs(), False, 1.0, asked=(wide,))
        tried = [each.step.spec for each in before if isinstance(each, Try) and isinstance(each.step, RunRound)]
        assert step.spec == wide and tried == [wide] * (turn == 0)
        speculation.observe(step, 0.01, [Emitted([0] * 2, (1, 7)), Emitted([0] * 3, (2, 7))])
    before, step = speculation.next_round(2, Needs(), False, 1.0, asked=(None, wide))
    assert step.spec == wide and any(isinstance(each, Try) for each in before), "others want their own measured"
    for _ in range(MAX_PAUSE + 2):
        _, step = speculation.next_round(2, Needs(), False, 1.0)
    assert speculation.reasons()


def watched(decoder: SpecDecoder) -> list[Step]:
    seen: list[Step] = []
    Driver(decoder).watch(seen.append)
    return seen


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(
    ("draft", "spec", "shapes"),
    [
        (["eagle3"], TREE, [CHAIN, WIDE]),
        (["eagle3", "suffix"], CHAIN, [(3, 2, 7), (2, 2, 6, 4)]),
        (["ngram"], TREE, "4,1 3,4,12"),
        (["eagle1"], SpecConfig("auto", 4, 12), None),
    ],
    ids=str,
)
@pytest.mark.parametrize("depth", [0, 1])
def test_text_is_the_target_s(zoo: Zoo, draft: list[str], spec: SpecConfig, shapes: Any, depth: int) -> None:
    """Batches of unlike wishes, greedy and sampled.  Keeps out: too little look-ahead for a shape that only requests ask for, a
    draft's memory of another shape, wishes that change the text."""
    named = [draft[0] if draft[0] == "ngram" else str(zoo.head("llama", draft[0])), *draft[1:]]
    decoder = SpecDecoder.from_pretrained(
        zoo.target("llama"), named[0] if len(named) == 1 else named, spec, shapes=shapes, **SETTINGS
    )
    driver, seen, prompts = Driver(decoder), watched(decoder), ragged_prompts(40, 6)
    driver.set_depth(depth)
    known = list(Driver(decoder).speculation.shapes)
    wishes = [None, known[-1].of_drafter, known[1], None, known[0], known[-1]]
    params = [SamplingParams(max_tokens=n, shape=wish) for n, wish in zip((20, 9, 24, 5, 24, 12), wishes, strict=True)]
    outputs = decoder.generate(prompts, params)
    want = [zoo.greedy("llama", prompt, 24)[: p.max_tokens] for prompt, p in zip(prompts, params, strict=True)]
    assert [out.token_ids for out in outputs] == want
    rounds = [step.spec for step in seen if isinstance(step, RunRound) and step.spec]
    assert {*rounds} >= {known[-1]} and {*rounds} <= {*known}
    for wish in (known[0], known[1]):  # alone, each gets its own
        seen.clear()
        decoder.generate(prompts[:2], SamplingParams(max_tokens=8, shape=wish.numbers))
        assert {step.spec for step in seen if isinstance(step, RunRound)} == {wish}
    sampled = [SamplingParams(max_tokens=10, temperature=1.1, seed=3, shape=wish) for wish in wishes[:3]]
    plain = decoder.generate(prompts[:3], SamplingParams(max_tokens=10, temperature=1.1, seed=3), speculate=False)
    assert [out.token_ids for out in decoder.generate(prompts[:3], sampled)] == [out.token_ids for out in plain]
    driver.assert_nothing_leaked()


def test_rows_that_do_not_speculate_have_no_wish(zoo: Zoo) -> None:
    """Keeps out: a shape asked for by a row whose text has become too long for the drafter."""
    head = str(zoo.head("llama", "eagle3"))
    decoder = SpecDecoder.from_pretrained(zoo.target("llama"), head, TREE, shapes=[WIDE], **SETTINGS)
    Driver(decoder).speculation.max_draft_length = 12
    seen = watched(decoder)
    outputs = decoder.generate([[5, 9], [7]], [SamplingParams(max_tokens=20, shape=WIDE), SamplingParams(max_tokens=20)])
    assert [out.token_ids for out in outputs] == [zoo.greedy("llama", prompt, 20) for prompt in ([5, 9], [7])]
    specs = [step.spec for step in seen if isinstance(step, RunRound)]
    assert WIDE in specs and specs[-1] is None


@pytest.mark.parametrize(
    ("shape", "error", "message"),
    [
        (
            "auto",
            TypeError,
            r"shape must be a SpecConfig, or a list of its numbers such as \[5, 4, 16\], got 'auto' of type str",
        ),
        (7, TypeError, "shape must be a SpecConfig"),
        ([5], ValueError, r"got \[5\]; nearest setting that works: \[5, 4, 16\]"),
        ([5, 4, 16, 12, 1], ValueError, "nearest setting that works"),
        ([0, 4, 16], ValueError, "num_steps must be"),
        (SpecConfig("auto", 4, 16), ValueError, "shape must be one shape, got SpecConfig.* nearest setting that works"),
        (["auto", 4], ValueError, "shape must be one shape"),
        ([5, "4"], TypeError, "topk must be an int"),
        ([5, 1, 9], ValueError, "nearest setting that works: num_draft_tokens=6"),
    ],
    ids=str,
)
def test_shapes_that_are_none(shape: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SamplingParams(shape=shape)


def test_wrong_wishes_at_the_door(zoo: Zoo) -> None:
    """Keeps out: a wish that is ignored, a graph captured for a shape for which there is no look-ahead."""
    pair = zoo.target("llama"), str(zoo.head("llama", "eagle3"))
    decoder = SpecDecoder.from_pretrained(*pair, TREE, shapes="4,1", **SETTINGS)
    assert decoder.settings.options.shapes == (CHAIN,) and decoder.settings.lookahead >= CHAIN.lookahead
    for sampling, speculate, message in (
        ({"shape": WIDE}, True, r"shape must be .*, got \[3, 4, 12\]; nearest settings that work: \[3, 2, 7\] or \[4, 1, 5\]"),
        ({"shape": CHAIN}, False, "shape would do nothing with speculate=False"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            decoder.generate([[1, 2]], SamplingParams(max_tokens=8, **sampling), speculate=speculate)
    with pytest.raises(
        ValueError, match="shape would do nothing with speculate=False; nearest setting that works: speculate=True"
    ):
        SamplingParams(shape=CHAIN, speculate=False)
    plain = SpecDecoder.from_pretrained(pair[0], **SETTINGS)
    with pytest.raises(ValueError, match="this decoder drafts nothing; nearest setting that works: no shape"):
        plain.generate([[1, 2]], SamplingParams(max_tokens=8, shape=CHAIN))
    for draft, spec, shapes, message in (
        (
            pair[1],
            TREE,
            [TREE],
            r"besides|others than the decoder's own, SpecConfig\(3,2,7\).* got shapes='3,2,7'; .* leave 3,2,7",
        ),
        (pair[1], SpecConfig("auto", 2), [TREE], "got num_steps='auto'; nearest setting that works: leave shapes out"),
        (None, None, [TREE], "shapes are of draft trees, and there is no drafter; nearest setting that works: shapes=None"),
        (
            pair[1],
            TREE,
            "4,x",
            "shapes must be shapes with spaces between, got '4,x'; nearest setting that works: '3,1 5,8,32'",
        ),
        (pair[1], TREE, [], "shapes must hold a shape or more"),
        (pair[1], TREE, [CHAIN, CHAIN], "shapes must hold a shape or more, each once"),
        (pair[1], TREE, ["auto"], r"shapes\[0\] must be a SpecConfig"),
        (pair[1], TREE, [(3, 64)], "topk"),
        (pair[1], TREE, 5, "shapes must be a list of shapes, got 5"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            SpecDecoder.from_pretrained(pair[0], draft, spec, shapes=shapes, **SETTINGS)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("draft", [["eagle3"], ["eagle3", "suffix"], ["ngram"]], ids=str)
@pytest.mark.parametrize("spec", [TREE, SpecConfig("auto", 4, 12)], ids=str)
def test_captured_rounds(zoo: Zoo, draft: list[str], spec: SpecConfig) -> None:
    """Keeps out: a graph of one shape replayed for another, a wish in "auto" whose graph is captured while rows run."""
    named = [draft[0] if draft[0] == "ngram" else str(zoo.head("llama", draft[0])), *draft[1:]]
    settings = SETTINGS | {"device": "cuda", "shapes": None if spec.is_auto else [CHAIN, WIDE]}
    decoder = SpecDecoder.from_pretrained(zoo.target("llama"), named[0] if len(named) == 1 else named, spec, **settings)
    prompts, seen = ragged_prompts(40, 6), watched(decoder)
    known = Driver(decoder).speculation.shapes
    for turn in range(3):
        wishes = [None if (row + turn) % 3 == 0 else known[(row * 5 + turn) % len(known)] for row in range(len(prompts))]
        outputs = decoder.generate(prompts, [SamplingParams(max_tokens=24, shape=wish) for wish in wishes])
        assert [out.token_ids for out in outputs] == [zoo.greedy("llama", prompt, 24) for prompt in prompts]
    assert len({step.spec for step in seen if isinstance(step, RunRound) and step.spec}) > 1
