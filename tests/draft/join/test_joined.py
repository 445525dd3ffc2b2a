"""A drafter and the text's own matches in an engine: the text stays the target's, and both sources are accepted."""

from typing import Any

import pytest
import torch
from toolkit.driver import Driver
from toolkit.heads.block_zoo import HEADS
from toolkit.models import Zoo, ragged_prompts
from toolkit.parallel.decoders import with_ranks

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.batch.state import BatchState
from specdec.batch.tree import DraftTree
from specdec.cli.entry import build_parser
from specdec.draft.drafter import Drafter
from specdec.draft.find import Joined, find_drafter
from specdec.draft.join.drafter import JoinedModel
from specdec.options import EngineOptions
from specdec.steps import Needs

BLOCK_HEADS = sorted(HEADS)  # whose names the zoo knows once they are imported
CASES = [  # target, head, shape, settings
    ("llama", "eagle3", (3, 3, 9), {"page_size": 1}),
    ("llama", "eagle3", (3, 1, 4), {"page_size": 4, "prefix_caching": True, "prefill_chunk": 5}),
    ("llama", "eagle3", (3, 1, 9, 8), {"page_size": 4}),
    ("llama", "eagle1", (2, 2, 7, 6), {"page_size": 1, "prefix_caching": True}),
    ("mistral", "eagle3", (3, 3, 12), {"page_size": 4}),  # every layer has a window: the text lies in a ring of pages
    ("llama", "dflash-pruned", (3, 3, 10), {"page_size": 4}),
    ("qwen3", "p-eagle-window", (3, 1, 4), {"page_size": 4}),
    ("qwen2", "dspark-rnn", (3, 2, 8), {"page_size": 4, "prefix_caching": True}),
]


def joined(zoo: Zoo, target: str, head: str, shape: Any, **settings: Any) -> SpecDecoder:
    draft = [str(zoo.head(target, head)), "suffix"]
    given = {"device": "cpu", "dtype": "float32", "max_seq_len": 128, "smoke": False, "max_batch_size": 3}
    return SpecDecoder.from_pretrained(zoo.target(target), draft, SpecConfig(*shape), **{**given, **settings})


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(("target", "head", "shape", "settings"), CASES, ids=str)
def test_text_is_the_target_s(zoo: Zoo, target: str, head: str, shape: Any, settings: dict[str, Any]) -> None:
    """Keeps out: siblings of one token, an extend shorter than the accepted path, entries of another row's text."""
    decoder = joined(zoo, target, head, shape, **settings)
    driver, prompts = Driver(decoder), ragged_prompts(40, 6)
    for _ in range(2):  # the second time cached pages are found
        outputs = decoder.generate(prompts, SamplingParams(max_tokens=24))
        assert [out.token_ids for out in outputs] == [zoo.greedy(target, prompt, 24) for prompt in prompts]
        for out in outputs:
            out.stats.check_identity(len(out.token_ids))
    sampled = SamplingParams(max_tokens=12, temperature=1.1, seed=3)
    fast, plain = (decoder.generate(prompts[:2], sampled, speculate=on) for on in (True, False))
    assert [out.token_ids for out in fast] == [out.token_ids for out in plain]
    driver.assert_nothing_leaked()


class Echo(Drafter):
    """A drafter that is always wrong: its chains repeat one token that the text never has."""

    def draft(self, state: BatchState, spec: SpecConfig, needs: Needs) -> DraftTree:
        return DraftTree.chain(torch.cat((state.bonus_B[:, None], state.bonus_B.new_full((state.rows, spec.max_steps), 39)), 1))

    def extend(self, *args: Any) -> None: ...
    def prefill(self, *args: Any) -> None: ...
    def keep(self, *args: Any) -> None: ...
    def catch_up(self, *args: Any) -> None: ...


def test_matches_take_over_from_a_drafter_that_is_wrong(zoo: Zoo) -> None:
    """Keeps out: matches that are shifted or never verified, and a drafter that is trusted for ever."""
    prompts, sampling = ragged_prompts(40, 4), SamplingParams(max_tokens=60)
    alone = zoo.decoder("llama", "ngram", SpecConfig(4, 1, 5), max_batch_size=3)
    want = alone.generate(prompts, sampling)
    decoder = joined(zoo, "llama", "eagle3", (2, 1, 9, 8))
    driver = Driver(decoder)
    driver.drafter.drafter = Echo()
    outputs = decoder.generate(prompts, sampling)
    assert [out.token_ids for out in outputs] == [out.token_ids for out in want]
    accepted, by_matches = (sum(out.stats.accepted for out in outs) for outs in (outputs, want))
    assert accepted >= by_matches > 8 and max(max(out.origins) for out in outputs) > 2


def test_counts_stay_as_they_were_where_a_round_is_tried(zoo: Zoo) -> None:
    """Keeps out: what is learnt twice, as a capture's warm-ups would."""
    decoder = joined(zoo, "llama", "eagle3", (3, 3, 9))
    driver = Driver(decoder)
    counts = driver.drafter.survival.counts_CLKG2
    assert any(each.data_ptr() == counts.data_ptr() for each in driver.drafter.changed(driver._workers.state))
    decoder.generate(ragged_prompts(40, 3), SamplingParams(max_tokens=20))
    assert int(counts.sum()) > 0


def test_the_shape_of_several_sources() -> None:
    """Keeps out: depths that the nodes can't fill, and a chain whose nodes the drafter's own shape does not allow."""
    spec = SpecConfig(5, 1, 16, 15)
    assert not spec.is_chain and spec.levels == 15 and spec.of_drafter == SpecConfig(5, 1, 6) and spec.label == "5,1,16,15"
    assert SpecConfig(5, 4, 16).joined == SpecConfig(5, 4, 16, 15)
    assert SpecConfig(3, 2, 30, 29).of_drafter == SpecConfig(3, 2, 11)
    for given, message in (
        ((5, 4, 16, 16), r"max_depth must be in \[5, 15\], got 16; nearest .* max_depth=15"),
        ((5, 4, 16, 4), r"max_depth must be in \[5, 15\], got 4; .* max_depth=5"),
        ((5, 1, 5, 4), r"at least num_steps \+ 1 = 6 when topk=1 .* got 5; .*num_draft_tokens=6"),
        ((3, 2, 30, 20), r"at most 21 with max_depth=20.* got 30; .* num_draft_tokens=21"),
    ):
        with pytest.raises(ValueError, match=message):
            SpecConfig(*given)


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (["suffix"], r"got draft=\['suffix'\]; nearest .* draft='ngram', which is 'suffix' alone"),
        ("suffix", "nearest setting that works: draft='ngram'"),
        (["ngram", "suffix"], "nearest setting that works: draft='ngram'"),
        (["a", "b"], r"several sources are one drafter and some of .*, got draft=\['a', 'b'\]; .* draft=\['a', 'suffix'\]"),
        (["mtp", "suffix", "suffix"], r"nearest setting that works: draft=\['mtp', 'suffix'\]"),
        ([], "several sources are one drafter and some of 'suffix'"),
    ],
    ids=str,
)
def test_sources_that_are_refused(draft: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_drafter(draft, EngineOptions())


def test_sources_at_the_door(zoo: Zoo) -> None:
    """Keeps out: a depth that does nothing, a repeated flag that is dropped."""
    assert find_drafter(["suffix", "mtp"], EngineOptions()) == Joined("mtp")
    with pytest.raises(TypeError, match="each source of draft must be a name or a folder, got 5"):
        find_drafter([5, "suffix"], EngineOptions())  # type: ignore[list-item]
    for unhashable in ([{}], [["mtp"], "corpus"]):  # which no table of names can be asked for
        with pytest.raises(TypeError, match="each source of draft must be a name or a folder, got "):
            find_drafter(unhashable, EngineOptions())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="draft must be a folder or a hub id, a str or a Path; got "):
        find_drafter({"mtp"}, EngineOptions())  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"max_depth=8; nearest settings that work: max_depth=None, or draft=\[DRAFT, 'suffix'\]"
    ):
        zoo.decoder("llama", "eagle3", SpecConfig(3, 3, 9, 8))
    with pytest.raises(ValueError, match=r"got max_depth=4; nearest settings that work: max_depth=None"):
        zoo.decoder("llama", "eagle3", SpecConfig("auto", 3, 9, 4))
    args = build_parser().parse_args(["generate", "--draft", "mtp", "--draft", "suffix", "--spec", "5,4,16,12", "x"])
    assert args.draft == ["mtp", "suffix"] and args.spec == SpecConfig(5, 4, 16, 12)
    decoder = joined(zoo, "llama", "eagle3", (3, 3, 9))
    assert isinstance(decoder.head, JoinedModel) and "joined by matches in the text" in decoder.head.description
    assert decoder.settings.spec == SpecConfig(3, 3, 9, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["round", "step", False], ids=str)
@pytest.mark.parametrize("shape", [(3, 1, 4), (3, 4, 20)], ids=str)
@pytest.mark.parametrize("head", ["eagle3", "dflash-pruned"])
def test_captured_rounds(zoo: Zoo, head: str, shape: tuple[int, int, int], graphs: Any) -> None:
    """Keeps out: paths that a replay repeats with the lengths of its capture, and counts that warm-ups leave."""
    settings: dict[str, Any] = {"device": "cuda", "cuda_graphs": graphs, "prefix_caching": True}
    decoder = joined(zoo, "llama", head, shape, **settings)
    prompts = ragged_prompts(40, 6)
    for _ in range(2):
        outputs = decoder.generate(prompts, SamplingParams(max_tokens=24))
        assert [out.token_ids for out in outputs] == [zoo.greedy("llama", prompt, 24) for prompt in prompts]
    (again,) = decoder.generate([prompts[0]], SamplingParams(max_tokens=90))
    on_cpu = joined(zoo, "llama", head, shape, prefix_caching=True)
    want = on_cpu.generate([prompts[0]], SamplingParams(max_tokens=90))[0]
    assert again.token_ids == want.token_ids
    assert again.stats.accept_length > 0.8 * want.stats.accept_length


def test_ranks_verify_the_same_trees(zoo: Zoo) -> None:
    """Keeps out: rates that depend on the order in which rows are added up, so that ranks read unlike trees."""
    prompts, spec, draft = ragged_prompts(40, 4)[1:], SpecConfig(3, 3, 9), [str(zoo.head("llama", "eagle3")), "suffix"]

    def use(decoder: SpecDecoder) -> list[tuple[list[int], list[int]]]:
        outputs = decoder.generate(prompts, SamplingParams(max_tokens=20))
        return [(out.token_ids, out.stats.accepted_per_round) for out in outputs]

    settings: dict[str, Any] = {"page_size": 4, "max_batch_size": 2, "dtype": "float32"}
    shared = with_ranks(zoo.target("llama"), draft, spec, 2, use, **settings)
    assert shared == use(joined(zoo, "llama", "eagle3", (3, 3, 9), **settings))
