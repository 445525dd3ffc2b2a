"""Heads of one pass in an engine: the text stays the target's, and each tree is the one that the head alone would make.

Keeps out: context rows that are lost, stored twice or overwritten by a block; a block that reads another row's, or an earlier
round's; a Markov head fed with the token of another branch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from toolkit.checkpoints.load import load_target, read_target_config
from toolkit.checkpoints.plans import plan_memory
from toolkit.driver import Driver, new_request
from toolkit.heads.block_zoo import HEADS, AlonePath
from toolkit.models import Zoo, ragged_prompts
from toolkit.parallel.decoders import with_ranks

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.draft.block.rounds.trees import STOPPED
from specdec.draft.load import load_head
from specdec.loading.build import plan_pool
from specdec.models.schemes.config import ROUNDED
from specdec.models.schemes.rules import Quantization, Rule
from specdec.options import EngineOptions

TEXTS = [  # target, head, shape, settings
    ("llama", "p-eagle", ("auto", 2, 6), {"page_size": 4, "prefix_caching": True}),
    ("llama", "dflash-pruned", (4, 2, 9), {"page_size": 4, "prefix_caching": True, "prefill_chunk": 5}),
    ("mistral", "dflash-mixed", (3, 1, 4), {"page_size": 4}),
    ("qwen3", "p-eagle-window", (3, 3, 12), {"page_size": 4, "prefill_chunk": 5}),
    ("qwen2", "dspark-rnn", ("auto", 1, 5), {"page_size": 1}),
    ("qwen3", "dflash2", ("auto", 3, 12), {"page_size": 4, "prefix_caching": True}),
    ("llama", "dflash2-anchored", (5, 1, 6), {"page_size": 4, "prefill_chunk": 5}),
]


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(("target", "head", "shape", "settings"), TEXTS, ids=str)
def test_text_is_the_target_s(zoo: Zoo, target: str, head: str, shape: Any, settings: dict[str, Any]) -> None:
    decoder = zoo.decoder(target, head, SpecConfig(*shape), max_batch_size=3, **settings)
    driver = Driver(decoder)
    if shape[0] == "auto":
        driver.script_levels(2, 0, 0, 3, 0, 1)
    prompts = ragged_prompts(40, 5)
    for _ in range(1 + settings.get("prefix_caching", False)):  # the second time cached pages are found
        outputs = decoder.generate(prompts, SamplingParams(max_tokens=16))
        assert [out.token_ids for out in outputs] == [zoo.greedy(target, prompt, 16) for prompt in prompts]
    sampled = SamplingParams(max_tokens=8, temperature=1.1, seed=3)
    fast, plain = (decoder.generate(prompts[3:], sampled, speculate=on) for on in (True, False))
    assert [out.token_ids for out in fast] == [out.token_ids for out in plain]
    driver.assert_nothing_leaked()


STOP_BELOW = 0.3
TREES = [  # target, head, shape, page size, batch
    ("llama", "p-eagle", (4, 3, 13), 4, 3),
    ("llama", "dspark-rnn", (5, 4, 28), 1, 3),
    ("llama", "p-eagle-window", (4, 1, 5), 1, 2),
    ("llama", "dflash", (5, 3, 16), 4, 3),
    ("qwen3", "dflash-pruned", (5, 2, 12), 1, 2),
    ("llama", "dflash-causal", (5, 1, 6), 4, 2),
    ("llama", "dflash-mixed", (3, 4, 18), 16, 1),
    ("llama", "dspark", (4, 3, 16), 4, 2),
    ("llama", "dspark-gated", (4, 1, 5), 4, 2),
    ("llama", "dflash2", (5, 6, 32), 4, 3),
    ("qwen3", "dflash2-anchored", (5, 3, 16), 1, 2),
    ("llama", "dflash2", (4, 1, 5), 1, 2),
]


@pytest.mark.slow_cases(keep=5)
@pytest.mark.parametrize(("target", "head", "shape", "page_size", "batch"), TREES, ids=str)
def test_trees_are_those_of_the_head_alone(
    zoo: Zoo, target: str, head: str, shape: tuple[int, int, int], page_size: int, batch: int
) -> None:
    """After some rounds, so that prompts, accepted tokens and earlier blocks all have left something in the cache.

    A random head is rarely sure, or rarely not: STOP_BELOW is such that some paths are stopped."""
    stopped = False
    spec = SpecConfig(*shape)
    decoder = zoo.decoder(target, head, spec, page_size=page_size, max_batch_size=batch, dtype="float64")
    decoder.head.stop_below = STOP_BELOW
    driver = Driver(decoder)
    requests = [new_request(p, SamplingParams(max_tokens=60, seed=0)) for p in ragged_prompts(40, batch + 2, seed=3)[2:]]
    for request in requests:
        driver.add(request)
    for _ in range(4):
        driver.step()
    tree = driver.draft(batch, spec)
    for row, request in enumerate(requests):
        alone = AlonePath(zoo, target, head, request.prompt_ids + request.output.token_ids, spec.num_steps)
        drawn: list[tuple[int, ...]] = [()]
        for token, parent in zip(tree.tokens_BN[row, 1:].tolist(), tree.parents_BN[row, 1:].tolist(), strict=True):
            drawn.append((*drawn[parent], token))
        assert set(drawn[1:]) == best_paths(alone, spec, HEADS[head][1].get("markov") is not None)
        if alone.parts.options.confidence != "none":
            stopped = stopped or any(stop(alone, path) for path in drawn[1:]) != all(stop(alone, path) for path in drawn[1:])
    assert stopped or HEADS[head][1].get("confidence") is None


def best_paths(alone: AlonePath, spec: SpecConfig, grows: bool) -> set[tuple[int, ...]]:
    """The best paths by the sum of log-probabilities along them.  grows: whether the best topk of a level go on alone."""
    placed, found = {(): 0.0}, dict[tuple[int, ...], float]()
    for _ in range(spec.num_steps):
        children = {
            (*path, token): score + logp for path, score in placed.items() for token, logp in alone.children(path, spec.topk)
        }
        if alone.parts.options.confidence != "none":
            children = {path: score - stop(alone, path) for path, score in children.items()}
        found |= children
        best = sorted(children, key=lambda path: -children[path])
        placed = {path: children[path] for path in (best[: spec.topk] if grows else best[: spec.num_draft_tokens])}
    return set(sorted(found, key=lambda path: -found[path])[: spec.num_draft_tokens - 1])


def stop(alone: AlonePath, path: tuple[int, ...]) -> float:
    """What is taken off the score of a path's last token, where it is hardly ever reached."""
    if len(path) < 2:
        return 0.0
    before = [alone.last, *path[:-1]]
    sure = alone.parts.confidences(alone.hidden_SH[: len(before)], before).sigmoid().prod()
    return STOPPED if sure < STOP_BELOW else 0.0


@pytest.mark.slow_cases
@pytest.mark.parametrize("head", ["p-eagle", "dflash-pruned", "dflash2", "dspark"])
def test_ranks_share_a_head(zoo: Zoo, head: str) -> None:
    """Keeps out: terms of a rank that are not added up, a vocabulary's run taken for the whole; caches hold NaN where nothing
    was written.
    """
    prompts, spec = ragged_prompts(40, 4)[2:], SpecConfig(3, 2, 6)

    def use(decoder: SpecDecoder) -> list[tuple[list[int], list[int]]]:
        outputs = decoder.generate(prompts, SamplingParams(max_tokens=12))
        return [(out.token_ids, out.stats.accepted_per_round) for out in outputs]

    settings: dict[str, Any] = {"page_size": 4, "max_batch_size": 2, "dtype": "float32"}
    shared = with_ranks(zoo.target("llama"), zoo.head("llama", head), spec, 2, use, **settings)
    assert shared == use(zoo.decoder("llama", head, spec, **settings))
    assert [ids for ids, _ in shared] == [zoo.greedy("llama", prompt, 12) for prompt in prompts]


def test_the_plan_of_memory(zoo: Zoo) -> None:
    """Keeps out: a block's slots that the plan forgets, and weights that it counts twice."""
    target, head, spec = zoo.target("llama"), zoo.head("llama", "p-eagle"), SpecConfig(4, 2, 6)
    settings: dict[str, Any] = {"max_batch_size": 3, "max_seq_len": 100, "dtype": "float32", "page_size": 1}
    plan = plan_memory(target, head, spec, EngineOptions(prefix_caching=False, **settings), 10**9)
    with zoo.decoder("llama", "p-eagle", spec, prefix_caching=False, **settings) as decoder:
        pool = plan_pool(decoder.model, decoder.head, decoder.settings)
        assert decoder.head is not None and plan.parts["keys and values"] == pool.bytes
        own = set(decoder.head.parameters()) - set(decoder.model.parameters())
        assert plan.parts["weights of the draft head"] == sum(weight.nbytes for weight in own)


def test_a_copy_of_a_quantised_output_layer_is_kept(zoo: Zoo) -> None:
    """Keeps out: an assertion where a layout repeats the output layer and the target's is stored in 8 bits."""
    folder = zoo.target("llama")
    every = Quantization("test", ((Rule("class", "Linear"), ROUNDED["fp8"]),))
    config, cpu = replace(read_target_config(folder), quantization=every), torch.device("cpu")
    target = load_target(folder, config, 64, cpu, torch.float32)
    head = load_head(zoo.head("llama", "dspark-gated"), target, 64, cpu, torch.float32)
    assert target.lm_head.quantised is not None and head.lm_head is not target.lm_head
    assert head.embed_tokens is target.embed_tokens
    assert torch.equal(head.lm_head.rows(torch.arange(40)), load_file(folder / "model.safetensors")["lm_head.weight"])


def test_the_plan_refuses_what_the_drafter_refuses(zoo: Zoo) -> None:
    """Keeps out: a plan that says of a shape that it fits, which then can't run."""
    options = EngineOptions(max_batch_size=2, max_seq_len=64, dtype="float32")
    target, head = zoo.target("llama"), zoo.head("llama", "dspark")
    with pytest.raises(ValueError, match="num_steps must be at most 5"):
        plan_memory(target, head, SpecConfig(9, 4, 16), options, 10**9)
    with pytest.raises(ValueError, match="a tree of n-grams needs a vocabulary"):
        plan_memory(target, "ngram", SpecConfig(9, 64, 300), options, 10**9)
    plan_memory(target, head, SpecConfig("auto", 4, 16), options, 10**9)


def test_more_steps_than_rows_are_refused(zoo: Zoo) -> None:
    with pytest.raises(ValueError, match=r"num_steps must be at most 5, .* got 6; nearest .* num_steps=5"):
        zoo.decoder("llama", "dflash", SpecConfig(6, 1, 7))
    auto = zoo.decoder("llama", "dflash", SpecConfig("auto", 1, 8))
    assert auto.head is not None and [shape.max_steps for shape in auto.head.shapes(SpecConfig("auto", 1, 8))] == [
        1,
        2,
        3,
        4,
        5,
    ]
    with pytest.warns(UserWarning, match="more tokens of a pass than the 5") as told:
        zoo.decoder("llama", "p-eagle", SpecConfig(6, 1, 7))
    assert len(told) == 1, "one line, though several places ask for shapes"


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["round", "step", False], ids=str)
@pytest.mark.parametrize(("head", "shape"), [
    ("p-eagle", (4, 1, 5)), ("dflash", (5, 3, 16)), ("dspark", (4, 3, 16)), ("dflash2", (5, 4, 24)),
    ("dflash2-anchored", (5, 1, 6)),
], ids=str)  # fmt: skip
def test_captured_rounds(zoo: Zoo, head: str, shape: tuple[int, int, int], graphs: Any) -> None:
    """Keeps out: a block that a replay puts where its capture stood."""
    settings: dict[str, Any] = {"device": "cuda", "cuda_graphs": graphs, "prefix_caching": True, "max_batch_size": 3}
    on_gpu = zoo.decoder("llama", head, SpecConfig(*shape), **settings)
    on_cpu = zoo.decoder("llama", head, SpecConfig(*shape), prefix_caching=True, max_batch_size=3)
    prompts = ragged_prompts(40, 6)
    for _ in range(2):
        outputs = on_gpu.generate(prompts, SamplingParams(max_tokens=24))
        assert [out.token_ids for out in outputs] == [zoo.greedy("llama", prompt, 24) for prompt in prompts]
    greedy, sampled = SamplingParams(max_tokens=60), SamplingParams(max_tokens=60, temperature=0.8, seed=5)
    for sampling in (greedy, sampled):
        fast, slow = (decoder.generate(prompts[2:4], sampling) for decoder in (on_gpu, on_cpu))
        assert [out.token_ids for out in fast] == [out.token_ids for out in slow]
        assert [out.stats.accepted_per_round for out in fast] == [out.stats.accepted_per_round for out in slow]


@pytest.mark.gpu
@pytest.mark.parametrize("head", ["p-eagle", "dflash-pruned", "dspark-rnn", "dflash2"])
def test_trees_in_bf16(zoo: Zoo, head: str) -> None:
    """Keeps out: what runs in bfloat16 alone: kernels that a float32 head never takes."""
    settings: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "max_batch_size": 2}
    decoder = zoo.decoder("llama", head, SpecConfig(4, 3, 14), **settings)
    outputs = decoder.generate(ragged_prompts(40, 4)[2:], SamplingParams(max_tokens=60))
    assert all(len(out.token_ids) == 60 for out in outputs)
    assert torch.isfinite(Driver(decoder).drafter.rows.hidden_BSH.float()).all()
