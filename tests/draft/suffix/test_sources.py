"""Corpora and earlier answers in an engine: texts stay the target's, drafts come of them, and never of another one's scope."""

from pathlib import Path
from typing import Any

import pytest
from toolkit.driver import Driver
from toolkit.heads.block_zoo import HEADS
from toolkit.models import Zoo, ragged_prompts
from toolkit.parallel.decoders import with_ranks

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.draft.find import Joined, find_drafter
from specdec.draft.suffix.source import TableFinder
from specdec.options import EngineOptions

BLOCK_HEADS = sorted(HEADS)  # whose names the zoo knows once they are imported
GIVEN: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_seq_len": 128, "smoke": False, "max_batch_size": 3, "corpus_memory": "1MiB",
}  # fmt: skip


def joined(zoo: Zoo, *sources: str, head: str = "eagle3", shape: Any = (3, 3, 9), **settings: Any) -> SpecDecoder:
    draft = ["ngram" if head == "ngram" else str(zoo.head("llama", head)), *sources]
    return SpecDecoder.from_pretrained(zoo.target("llama"), draft, SpecConfig(*shape), **{**GIVEN, **settings})


def finder_of(decoder: SpecDecoder, name: str) -> TableFinder:
    drafter = Driver(decoder).drafter
    (found,) = (f for s, f in zip(drafter.sources, drafter.finders, strict=True) if s.name == name)
    assert isinstance(found, TableFinder)
    return found


CASES: list[tuple[tuple[str, ...], str, Any, dict[str, Any]]] = [
    (("corpus",), "eagle3", (3, 3, 9), {"page_size": 1}),
    (("suffix", "answers"), "eagle3", (3, 1, 4), {"page_size": 4, "prefix_caching": True, "prefill_chunk": 5}),
    (("corpus", "answers"), "eagle1", (2, 2, 7, 6), {"page_size": 4}),
    (("answers", "corpus", "suffix"), "dflash-pruned", (3, 3, 10), {"page_size": 4}),
    (("corpus",), "ngram", (3, 1, 4), {"page_size": 4, "prefix_caching": True}),
    (("corpus", "answers"), "ngram", (4, 3, 14), {"page_size": 4, "prefill_chunk": 5}),
    (("answers",), "ngram", ("auto", 2, 8), {"page_size": 1}),
]


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(("sources", "head", "shape", "settings"), CASES, ids=str)
def test_text_is_the_target_s(zoo: Zoo, sources: tuple[str, ...], head: str, shape: Any, settings: dict[str, Any]) -> None:
    """Keeps out: siblings of one token, places of another row's scope, paths that go on after a text's end, a table that is
    changed within a round.  A corpus holds the very texts, texts that part from them, and one token over and over."""
    decoder = joined(zoo, *sources, head=head, shape=shape, **settings)
    driver, prompts = Driver(decoder), ragged_prompts(40, 6)
    want = [zoo.greedy("llama", prompt, 24) for prompt in prompts]
    if "corpus" in sources:
        texts = [prompt + out for prompt, out in zip(prompts, want, strict=True)]
        Driver(decoder).bring_corpus(
            [*texts, *(text[::-1] for text in texts), [text[0] for text in texts for _ in range(40)], [5] * 3000]
        )
    sampled = SamplingParams(max_tokens=12, temperature=1.1, seed=3)
    for _ in range(2):  # the second time earlier answers are found
        outputs = decoder.generate(prompts, SamplingParams(max_tokens=24))
        assert [out.token_ids for out in outputs] == want
        for out in outputs:
            out.stats.check_identity(len(out.token_ids))
        fast, plain = (decoder.generate(prompts[:2], sampled, speculate=on) for on in (True, False))
        assert [out.token_ids for out in fast] == [out.token_ids for out in plain]
        if "answers" in sources:
            Driver(decoder).settle_tables()
    driver.assert_nothing_leaked()


def test_a_corpus_is_accepted(zoo: Zoo) -> None:
    """Keeps out: places that are one off, a corpus that is loaded and never read."""
    prompts = ragged_prompts(40, 4)
    want = [zoo.greedy("llama", prompt, 30) for prompt in prompts]
    decoder = joined(zoo, "corpus", shape=(2, 2, 12, 11))
    before = decoder.generate(prompts, SamplingParams(max_tokens=30))
    Driver(decoder).bring_corpus([prompt + out for prompt, out in zip(prompts, want, strict=True)])
    for _ in range(3):  # once it is known what a corpus is worth
        after = decoder.generate(prompts, SamplingParams(max_tokens=30))
    assert [out.token_ids for out in after] == want
    rounds = [sum(out.stats.rounds for out in outs) for outs in (before, after)]
    assert rounds[1] < 0.6 * rounds[0]


def test_second_answers_come_of_the_first(zoo: Zoo) -> None:
    """Keeps out: answers that no table gets, a first token that no context shows."""
    prompts, sampling = ragged_prompts(40, 4), SamplingParams(max_tokens=30)
    decoder = joined(zoo, "answers", shape=(2, 2, 12, 11))
    rounds = []
    for _ in range(4):
        outputs = decoder.generate(prompts, sampling)
        rounds.append(sum(out.stats.rounds for out in outputs))
        Driver(decoder).settle_tables()
    assert rounds[-1] < 0.6 * rounds[0]


def test_n_grams_have_sources_beside_them(zoo: Zoo) -> None:
    """Keeps out: a corpus that n-grams never see, trees of more nodes than anybody can fill."""
    prompts = ragged_prompts(40, 4)
    want = [zoo.greedy("llama", prompt, 30) for prompt in prompts]
    decoder = joined(zoo, "corpus", head="ngram", shape=(4, 2, 9))
    assert decoder.head is not None and decoder.head.sources == ("suffix", "corpus", "prediction")
    before = decoder.generate(prompts, SamplingParams(max_tokens=30))
    Driver(decoder).bring_corpus([prompt + out for prompt, out in zip(prompts, want, strict=True)])
    after = decoder.generate(prompts, SamplingParams(max_tokens=30))
    assert [out.token_ids for out in after] == want and any("corpus" in source for out in after for source in out.sources)
    assert sum(out.stats.rounds for out in after) < 0.7 * sum(out.stats.rounds for out in before)
    with pytest.raises(
        ValueError, match=r"trees of suffix and corpus and prediction alone have at most 5 nodes, .*num_draft_tokens=5"
    ):
        joined(zoo, "corpus", head="ngram", shape=(4, 1, 9, 8))


def test_no_text_reaches_another_scope(zoo: Zoo) -> None:
    """Keeps out: a caller's text among another one's proposals, in whatever row either of them runs, also after rows moved."""
    prompts, sampling = ragged_prompts(40, 6), SamplingParams(max_tokens=30)
    decoder = joined(zoo, "answers", shape=(2, 2, 12, 11))
    finder = finder_of(decoder, "answers")
    tables, seen = decoder._tables, list[tuple[list[int], list[int]]]()
    fill = finder.fill

    def noted(state: Any, depth: int, out: Any) -> None:
        fill(state, depth, out)
        keys = finder.rows.keys_R[: state.rows].tolist()
        seen.extend(zip(keys, out.lengths_BP.amax(1).tolist(), strict=True))  # type: ignore[arg-type]

    finder.fill = noted  # type: ignore[method-assign]
    for salt in ("a", "b", None):
        decoder.generate(prompts, sampling, cache_salt=salt)
        Driver(decoder).settle_tables()
        own = tables.scope_of(salt)
        assert all(key in (0, own) for key, _ in seen)
        assert all(length == 0 for key, length in seen if not key)
        first = seen[: len(prompts)]
        assert not any(length for _, length in first), "this caller has no earlier answer"
        seen.clear()
        decoder.generate(prompts[:1], sampling, cache_salt=salt)
        assert any(length for _, length in seen)
        seen.clear()
    assert len({tables.scope_of(salt) for salt in ("a", "b", None, "")}) == 4
    assert finder.rows.keys_R.tolist() == [0] * 4, "rows forget their scopes"


def test_a_table_that_lacks_a_part_is_never_read(zoo: Zoo) -> None:
    """Keeps out: the rest of a table whose part could not be brought: in its place stands an older table, of other scopes."""
    decoder = joined(zoo, "answers")
    driver, table = Driver(decoder), finder_of(decoder, "answers").table
    with pytest.raises(MemoryError, match="this part"):
        driver.bring_answers({7: range(40)}, most=10, failing=2)
    assert not driver.coming_parts and not table.keys_2S.any() and not table.half_1.item()
    driver.bring_answers({8: range(40)}, most=10)  # another one comes whole
    assert table.keys_2S[table.half_1.item(), 0] == 8


def test_answers_that_nobody_may_be_proposed(zoo: Zoo) -> None:
    """Keeps out: kept texts of requests that were given up, or where no source reads them."""
    decoder = joined(zoo, "corpus")
    assert decoder._tables.scope_of("a") == 0
    decoder.generate(ragged_prompts(40, 2), SamplingParams(max_tokens=4))
    assert decoder._tables.keeper._thread is None
    with pytest.raises(ValueError, match="cache_salt must not be empty"):
        decoder.generate([[1]], cache_salt="")
    with pytest.raises(TypeError, match="cache_salt must be a string, got 5"):
        decoder.generate([[1]], cache_salt=5)  # type: ignore[arg-type]


def test_ranks_verify_the_same_trees(zoo: Zoo) -> None:
    """Keeps out: tables that one rank has and another has not yet."""
    prompts, spec, sampling = ragged_prompts(40, 4)[1:], SpecConfig(3, 3, 9), SamplingParams(max_tokens=20)
    draft = [str(zoo.head("llama", "eagle3")), "corpus", "answers"]
    texts = [prompt + zoo.greedy("llama", prompt, 20) for prompt in prompts]

    def use(decoder: SpecDecoder) -> list[tuple[list[int], list[int]]]:
        Driver(decoder).bring_corpus(texts)
        found = []
        for _ in range(2):
            outputs = decoder.generate(prompts, sampling)
            Driver(decoder).settle_tables()
            found += [(out.token_ids, out.stats.accepted_per_round) for out in outputs]
        return found

    settings: dict[str, Any] = {"page_size": 4, "max_batch_size": 2, "dtype": "float32", "corpus_memory": "1MiB"}
    shared = with_ranks(zoo.target("llama"), draft, spec, 2, use, **settings)
    assert shared == use(joined(zoo, "corpus", "answers", **settings))


def test_sources_at_the_door(zoo: Zoo, tmp_path: Path) -> None:
    """Keeps out: options that do nothing, a corpus that is read beside no drafter."""
    path = tmp_path / "notes.txt"
    path.write_text("some notes")
    options = EngineOptions(corpus=str(path))
    assert find_drafter("mtp", options) == Joined("mtp", ("suffix", "corpus"))
    assert find_drafter(["mtp", "answers"], options) == Joined("mtp", ("suffix", "corpus", "answers"))
    assert find_drafter("ngram", options) == Joined("ngram", ("corpus",))
    for draft in (None, "suffix"):
        with pytest.raises(ValueError, match="joins the trees of a drafter, got draft=.*; nearest .* corpus=None"):
            find_drafter(draft, options)
    with pytest.raises(ValueError, match="corpus must be a file of text or a .jsonl file, got .*none"):
        find_drafter("mtp", EngineOptions(corpus=tmp_path / "other"))
    with pytest.raises(ValueError, match="corpus_memory=1048576 would do nothing .* nearest .* corpus_memory='256MiB'"):
        find_drafter(["mtp", "suffix"], EngineOptions(corpus_memory="1MiB"))
    for size in ("1KiB", "70GiB", "much"):
        with pytest.raises(ValueError, match="corpus_memory must be .* nearest setting that works: corpus_memory='"):
            EngineOptions(corpus_memory=size)
    with pytest.raises(TypeError, match="corpus must be the name of a file, got 5"):
        EngineOptions(corpus=5)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["round", "step", False], ids=str)
@pytest.mark.parametrize("shape", [(3, 1, 9, 8), (3, 4, 20)], ids=str)
def test_captured_rounds(zoo: Zoo, shape: Any, graphs: Any) -> None:
    """Keeps out: tables that a replay does not see after they were swapped, and keys of rows that have moved."""
    settings: dict[str, Any] = {"device": "cuda", "cuda_graphs": graphs, "prefix_caching": True}
    decoder, on_cpu = (joined(zoo, "corpus", "answers", shape=shape, **given) for given in (settings, {}))
    prompts, sampling = ragged_prompts(40, 6), SamplingParams(max_tokens=24)
    want = [zoo.greedy("llama", prompt, 24) for prompt in prompts]
    lengths = []
    for _ in range(3):
        found = [each.generate(prompts, sampling) for each in (decoder, on_cpu)]
        assert [out.token_ids for outs in found for out in outs] == 2 * want
        lengths.append([sum(out.stats.rounds for out in outs) for outs in found])
        for each in (decoder, on_cpu):
            Driver(each).settle_tables()
    Driver(decoder).bring_corpus([prompt + out for prompt, out in zip(prompts, want, strict=True)])
    assert [out.token_ids for out in decoder.generate(prompts, sampling)] == want
    assert lengths[-1][0] < 0.8 * lengths[0][0] and abs(lengths[-1][0] - lengths[-1][1]) <= 0.25 * lengths[-1][1]


def test_parts_of_a_table_come_between_rounds(zoo: Zoo) -> None:
    """Keeps out: a round that waits for a whole table, and a table half of which is read."""
    decoder = joined(zoo, "corpus")
    driver, left = Driver(decoder), list[int]()
    request = driver.submit([1, 2, 3], SamplingParams(max_tokens=12))
    driver.bring_corpus([range(30)], most=8)
    while not request.is_done:
        left.append(driver.coming_parts)
        driver.step()
    assert left[:6] == [5, 4, 3, 2, 1, 0]
    assert int(finder_of(decoder, "corpus").table.bounds_2S2.amax()) == 30
    driver.assert_nothing_leaked()
