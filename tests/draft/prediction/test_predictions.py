"""Predictions of requests in an engine: texts stay the target's, and what was predicted is accepted."""

import random
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import toolkit.heads.block_zoo  # noqa: F401 (the zoo has its heads by name)
import torch
from toolkit.driver import Driver
from toolkit.models import Zoo, ragged_prompts
from toolkit.parallel.decoders import with_ranks

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.batch.tree import DraftTree

JOINED = ("llama", "eagle3", (3, 3, 12))
SAMPLINGS = [{}, {"temperature": 1.1, "seed": 3}]


def decoder_of(zoo: Zoo, target: str, head: str, shape: Any, **settings: Any) -> SpecDecoder:
    draft: Any = head if head == "ngram" else [str(zoo.head(target, head)), "suffix"]
    given = {"device": "cpu", "dtype": "float32", "max_seq_len": 128, "smoke": False, "max_batch_size": 3}
    return SpecDecoder.from_pretrained(zoo.target(target), draft, SpecConfig(*shape), **{**given, **settings})


def edited(ids: list[int]) -> list[int]:
    """A prediction that is wrong here and there: a token replaced, some left out, some added."""
    return [*ids[:5], 39, *ids[6:11], *ids[13:18], 38, 37, *ids[18:]]


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("target", "head", "shape", "settings"),
    [
        (*JOINED, {"page_size": 4}),
        ("llama", "eagle3", (3, 1, 9, 8), {"page_size": 1, "prefix_caching": True, "prefill_chunk": 5}),
        ("mistral", "eagle3", (3, 2, 8), {"page_size": 4}),
        ("llama", "dflash-pruned", (3, 3, 10), {"page_size": 4}),
        ("llama", "ngram", (4, 1, 5), {"page_size": 4}),
        ("llama", "ngram", (3, 2, 7), {"prefix_caching": True, "page_size": 4, "prefill_chunk": 5}),
        ("llama", "ngram", ("auto", 2, 6), {"page_size": 4}),
    ],
    ids=str,
)
def test_text_is_the_target_s(
    zoo: Zoo, target: str, head: str, shape: Any, settings: dict[str, Any], sampling: dict[str, Any]
) -> None:
    """Keeps out: a row that reads another row's prediction after rows move, tokens of an ended request's, -1 for a token."""
    decoder = decoder_of(zoo, target, head, shape, **settings)
    driver, prompts = Driver(decoder), ragged_prompts(40, 7)
    lengths = [8, 40, 24, 30, 12, 40, 33][: len(prompts)]  # so that rows leave and move while others run
    base = [SamplingParams(max_tokens=length, **sampling) for length in lengths]
    plain = decoder.generate(prompts, base, speculate=False)
    want = [out.token_ids for out in plain]
    if shape[0] == "auto":
        driver.script_levels(2, 0, 0, 3, 0, 1)
    for predictions in (want, [edited(ids) for ids in want], [list(reversed(ids)) for ids in want]):
        given: list[SamplingParams] = [
            SamplingParams(max_tokens=length, **sampling, **({"prediction": ids} if number % 3 else {}))
            for number, (ids, length) in enumerate(zip(predictions, lengths, strict=True))
        ]
        outputs = decoder.generate(prompts, given)
        assert [out.token_ids for out in outputs] == want
        for out in outputs:
            out.stats.check_identity(len(out.token_ids))
    driver.assert_nothing_leaked()


NAMES = "drafter", "suffix", "corpus", "answers", "prediction"
CHOICES = [names for count in range(1, 6) for names in combinations(NAMES, count)]


@pytest.mark.slow_cases
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_every_mixture_of_sources(zoo: Zoo, sampling: dict[str, Any]) -> None:
    """Keeps out: texts that depend on who drafts, a choice that reaches another row, one that does nothing, drafts of a source
    that is left out which are accepted where they fill the tree."""
    decoder = zoo.decoder("llama", "eagle3+suffix+corpus+answers", SpecConfig(3, 3, 12), max_batch_size=8, corpus_memory="1MiB")
    prompt = ragged_prompts(40, 2)[1]
    want = decoder.generate(prompt, SamplingParams(max_tokens=40, **sampling), speculate=False)[0].token_ids
    Driver(decoder).settle_tables()  # the answer is an earlier one now
    Driver(decoder).bring_corpus([want[::-1], edited(want), want[:20], [5] * 500])
    given = [
        SamplingParams(max_tokens=40, **sampling, sources=names, prediction=edited(want) if "prediction" in names else None)
        for names in map(list, CHOICES)
    ]
    outputs = decoder.generate([prompt] * len(CHOICES), given, trees=True)
    assert [out.token_ids for out in outputs] == [want] * len(CHOICES)
    for out, names in zip(outputs, CHOICES, strict=True):
        assert {name for each in out.sources for name in each.split("+")} <= {*names, ""}
        assert out.rounds is not None
        of_nodes = {name for each in out.rounds for node in each.sources for name in node.split("+")}
        assert of_nodes <= {*names, "", "nobody"} and ("nobody" in of_nodes or names != ["prediction"]), "the tree is filled"
        for each in out.rounds:
            assert "nobody" not in [each.sources[node] for node in each.path]
    plainly = decoder.generate([prompt], SamplingParams(max_tokens=40, **sampling, speculate=False))[0]
    assert plainly.token_ids == want and plainly.stats.drafted == 0
    if not sampling:
        by_name = dict(zip(CHOICES, outputs, strict=True))
        assert {name for out in outputs for names in out.sources for name in names.split("+") if name} == {*NAMES}
        with_prediction = by_name["suffix", "prediction"].stats.rounds
        assert with_prediction < min(by_name["suffix",].stats.rounds, by_name["drafter",].stats.rounds)


@pytest.mark.parametrize("shape", [(4, 1, 5), (4, 2, 8)], ids=str)
def test_n_grams_by_choice_without_a_prediction(zoo: Zoo, shape: Any) -> None:
    """Keeps out: a round that fails because there is no path to join, drafts of a source that is left out, rates learnt from
    paths that no draft has written."""
    decoder, prompts = decoder_of(zoo, "llama", "ngram", shape), ragged_prompts(40, 3)
    want = decoder.generate(prompts, SamplingParams(max_tokens=24))
    given = [SamplingParams(max_tokens=24, sources=[name]) for name in ("suffix", "prediction", "suffix")]
    outputs = decoder.generate(prompts, given, trees=True)
    assert [out.token_ids for out in outputs] == [out.token_ids for out in want]
    assert [out.stats.accepted for out in outputs] == [want[0].stats.accepted, 0, want[2].stats.accepted]
    assert not int(Driver(decoder).drafter.survival.counts_CLKG2.sum())
    for out, names in zip(outputs, ("suffix", "nobody", "suffix"), strict=True):
        assert out.rounds is not None
        assert {name for each in out.rounds for name in each.sources[1:]} == {names}


@pytest.mark.slow_cases
@pytest.mark.parametrize("head", ["eagle3", "ngram"])
def test_what_was_predicted_is_accepted(zoo: Zoo, head: str) -> None:
    """Keeps out: a prediction that is shifted, lost with the first token, or lost for good after an edit."""
    decoder = decoder_of(zoo, "llama", head, (5, 2, 11))
    prompts = ragged_prompts(40, 3)
    base = SamplingParams(max_tokens=60, temperature=1.3, seed=5)
    want = decoder.generate(prompts, base, speculate=False)

    def rounds(predictions: list[list[int]]) -> int:
        given = [SamplingParams(max_tokens=60, temperature=1.3, seed=5, prediction=ids) for ids in predictions]
        outputs = decoder.generate(prompts, given)
        assert [out.token_ids for out in outputs] == [out.token_ids for out in want]
        return max(out.stats.rounds for out in outputs)

    right = rounds([out.token_ids for out in want])
    assert right <= -(-59 // (6 if head == "ngram" else 9)) + 1
    assert rounds([edited(out.token_ids) for out in want]) <= right + 12


def test_a_request_that_steps_back_keeps_its_place(zoo: Zoo) -> None:
    """Keeps out: a resumed row that begins its prediction anew, or has none any more."""
    decoder = decoder_of(zoo, *JOINED, page_size=4)
    driver, chance, prompts = Driver(decoder), random.Random(1), ragged_prompts(40, 3)
    want = [zoo.greedy("llama", prompt, 60) for prompt in prompts]
    driver.set_depth(1)
    given = [SamplingParams(max_tokens=60, prediction=ids) for ids in want]
    requests = [driver.submit(prompt, each) for prompt, each in zip(prompts, given, strict=True)]
    with driver.stepping_back(chance, 0.3) as counts:
        driver.run_until_idle()
    assert counts.total() >= 3
    outputs = [request.result() for request in requests]
    assert [out.token_ids for out in outputs] == want
    assert all(out.stats.rounds <= 12 for out in outputs)


@pytest.mark.slow_cases
@pytest.mark.parametrize("head", ["eagle3", "ngram"])
def test_tokens_name_who_drafted_them(zoo: Zoo, head: str) -> None:
    """Keeps out: names that are shifted by one, of a source that did not propose the token, or of the target's own tokens."""
    decoder = decoder_of(zoo, "llama", head, (4, 2, 10))
    known = {"suffix", "prediction"} | ({"drafter"} if head == "eagle3" else set())
    prompts = ragged_prompts(40, 3)
    plain = decoder.generate(prompts, SamplingParams(max_tokens=40), speculate=False)
    named = set[str]()
    for predicted in (False, True):
        given = [SamplingParams(max_tokens=40, **({"prediction": out.token_ids} if predicted else {})) for out in plain]
        for out in decoder.generate(prompts, given):
            assert [bool(source) for source in out.sources] == [depth > 0 for depth in out.origins]
            own = {name for source in out.sources if source for name in source.split("+")}
            assert own <= known and ("prediction" in own) == predicted
            assert out.predicted_tokens == (40 if predicted else 0)
            if predicted:  # the prediction is right, so it holds every token that was accepted
                assert all("prediction" in source.split("+") for source in out.sources if source)
            named |= own
    assert named >= {"suffix", "prediction"}
    chunks = list(decoder.stream(prompts[0], given[0]))
    assert sum(len(chunk.sources) for chunk in chunks) == 40
    assert all([bool(source) for source in chunk.sources] == [depth > 0 for depth in chunk.origins] for chunk in chunks)


def test_nodes_of_a_grammar_are_named_so() -> None:
    """Keeps out: a node that a grammar has put in a draft's place under the name of the draft's source."""
    chosen = [[9, 1, 2, 3], [0, 0, 1, 1]], [[9, 2, 1, 3], [0, 0, 0, 2]]
    drafted, made = (DraftTree(torch.tensor([ids]), torch.tensor([above]), 2) for ids, above in chosen)
    drafted = replace(drafted, sources_BN=torch.tensor([[0, 1, 2, 5]]))
    made = replace(made, sources_BN=torch.zeros(1, 4, dtype=torch.int64))
    made.find_sources(drafted)  # the child of the root with token 2 is new; tokens 1 and 3 after it have only moved
    assert made.sources_BN is not None and made.sources_BN.tolist() == [[0, 0, 1, 5]]


def test_ranks_follow_the_same_predictions(zoo: Zoo) -> None:
    """Keeps out: ranks that read unlike trees, of which one has no prediction."""
    prompts, draft = ragged_prompts(40, 4)[1:], [str(zoo.head("llama", "eagle3")), "suffix"]
    ids = [zoo.greedy("llama", prompt, 20) for prompt in prompts]
    given = [SamplingParams(max_tokens=20, prediction=edited(each)) for each in ids]

    def use(decoder: SpecDecoder) -> list[tuple[list[int], list[int]]]:
        return [(out.token_ids, out.stats.accepted_per_round) for out in decoder.generate(prompts, given)]

    settings: dict[str, Any] = {"page_size": 4, "max_batch_size": 2, "dtype": "float32"}
    shared = with_ranks(zoo.target("llama"), draft, SpecConfig(3, 3, 9), 2, use, **settings)
    assert shared == use(decoder_of(zoo, "llama", "eagle3", (3, 3, 9), **settings))
    assert [each for each, _ in shared] == ids


def test_at_the_door(zoo: Zoo) -> None:
    """Keeps out: a prediction that does nothing in silence, ids beyond the vocabulary, one longer than any answer."""
    decoder, prompt = decoder_of(zoo, *JOINED), ragged_prompts(40, 1)[0]
    with pytest.raises(ValueError, match="prediction must not be empty; nearest"):
        SamplingParams(prediction="")
    with pytest.raises(TypeError, match="prediction must be a list of ints, got 5"):
        SamplingParams(prediction=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"prediction holds 40000; expected ids in \[0, "):
        decoder.generate([prompt], SamplingParams(max_tokens=4, prediction=[40000]))
    with pytest.raises(ValueError, match="prediction has 129 tokens; expected at most max_seq_len = 128; nearest .* first 128"):
        decoder.generate([prompt], SamplingParams(max_tokens=4, prediction=[1] * 129))
    with pytest.raises(ValueError, match="prediction would do nothing with speculate=False; .* speculate=True"):
        decoder.generate([prompt], SamplingParams(max_tokens=4, prediction=[1]), speculate=False)
    with pytest.raises(ValueError, match="sources leaves out the prediction .* sources=\\['suffix', 'prediction'\\]"):
        SamplingParams(prediction=[1], sources=["suffix"])
    with pytest.raises(ValueError, match="sources would do nothing with speculate=False"):
        SamplingParams(sources=["suffix"], speculate=False)
    with pytest.raises(ValueError, match="sources names 'corpse'; expected some of .* nearest: 'drafter'"):
        decoder.generate([prompt], SamplingParams(max_tokens=4, sources=["corpse"]))
    with pytest.raises(ValueError, match="sources names 'sufix'; .* nearest: 'suffix'"):
        decoder.generate([prompt], SamplingParams(max_tokens=4, sources=["sufix"]))
    alone = zoo.decoder("llama", "eagle3", SpecConfig(3, 1, 4))
    with pytest.raises(ValueError, match=r"sources needs a decoder whose trees have several sources, and this one drafts by"):
        alone.generate([prompt], SamplingParams(max_tokens=4, sources=["drafter"]))
    with pytest.raises(ValueError, match=r"this one drafts by drafter alone; nearest .* draft=\[DRAFT, 'suffix'\]"):
        alone.generate([prompt], SamplingParams(max_tokens=4, prediction=[1]))
    with pytest.raises(ValueError, match="this one drafts nothing; nearest"):
        zoo.decoder("llama", None).generate([prompt], SamplingParams(max_tokens=4, prediction=[1]))


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["round", "step", False], ids=str)
@pytest.mark.parametrize("head", ["eagle3", "ngram"])
def test_captured_rounds(zoo: Zoo, head: str, graphs: Any) -> None:
    """Keeps out: rounds that replay another request's prediction, and memory that a capture has not seen."""
    decoder = decoder_of(zoo, "llama", head, (4, 3, 14), device="cuda", cuda_graphs=graphs, prefix_caching=True)
    prompts = ragged_prompts(40, 6)
    want = [zoo.greedy("llama", prompt, 40) for prompt in prompts]
    for predictions in (None, want, [edited(ids) for ids in want], None, want):
        given = [SamplingParams(max_tokens=40, prediction=predictions[i] if predictions else None) for i in range(len(prompts))]
        outputs = decoder.generate(prompts, given)
        assert [out.token_ids for out in outputs] == want
        if predictions is want:
            assert all(out.stats.rounds <= 12 for out in outputs)


def test_a_prediction_of_a_text_in_which_nothing_is_drafted(zoo: Zoo) -> None:
    """Keeps out: a round that looks for predictions where no row has brought one, of which all requests fail."""
    decoder = decoder_of(zoo, *JOINED)
    driver = Driver(decoder)
    driver.speculation.max_draft_length = 12
    long, short = [7] * 20, [5, 9]
    given = [SamplingParams(max_tokens=8, prediction=[1, 2, 3], sources=["prediction"]), SamplingParams(max_tokens=8)]
    outputs = decoder.generate([long, short], given)
    assert [out.token_ids for out in outputs] == [zoo.greedy("llama", prompt, 8) for prompt in (long, short)]
    assert [out.stats.drafted > 0 for out in outputs] == [False, True]


@pytest.mark.slow_cases
@pytest.mark.parametrize("shape", [(3, 2, 7), (3, 1, 4), ("auto", 2, 6)], ids=str)
def test_sources_of_which_none_has_a_path(zoo: Zoo, shape: Any) -> None:
    """Keeps out: a request that fails where its sources are named and the others, which have the paths, do not run."""
    with decoder_of(zoo, "llama", "ngram", shape) as decoder:
        ids = [5, 6, 7, 5, 6, 7, 5]
        want = decoder.generate([ids], SamplingParams(max_tokens=12))[0].token_ids
        for names in (["suffix"], ["prediction"], ["suffix", "prediction"]):
            out = decoder.generate([ids], SamplingParams(max_tokens=12, sources=names))[0]
            assert out.token_ids == want and {name for each in out.sources for name in each.split("+")} <= {*names, ""}
