"""Whole rounds through our kernels, without a GPU: Triton's interpreter runs them on the CPU's tensors.

tests/gpu runs them for real, and each room's tests hold each kernel against its definition.
"""

import pytest
import toolkit.recurrent.targets  # noqa: F401 (the zoo has its targets by name)
import torch
from toolkit.checkpoints.grammars import letters_json
from toolkit.driver import Driver
from toolkit.kernels import HAS_GPU, use_kernels_everywhere
from toolkit.models import Zoo, ragged_prompts

from specdec import SamplingParams, SpecConfig
from specdec.grammar.library import Grammars
from specdec.grammar.wait import Wait

pytestmark = pytest.mark.skipif(HAS_GPU, reason="the interpreter's turn; a GPU has tests/gpu")

ALWAYS = {
    "launch_next_tokens", "launch_take_rows", "launch_top_tokens", "launch_greedy_tokens", "launch_scan", "launch_accept",
    "launch_add_rms_norm", "launch_pair_rms_norm", "launch_activation",
}  # fmt: skip
TREES_ONLY = {
    "launch_move", "launch_fork", "launch_best_nodes", "launch_first_level", "launch_expand", "launch_path_tables",
}  # fmt: skip
STATES = {
    "launch_state_numbers", "launch_commit_states", "launch_tree_convolution", "launch_tree_rule", "launch_chunk_convolution",
    "launch_chunk_rule", "launch_gated_norm", "launch_gated_output",
}  # fmt: skip


@pytest.mark.slow
def test_rounds_through_the_kernels_give_the_target_s_text(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a kernel whose door is never reached, or reached with strides and dtypes that only rounds have."""
    launched = use_kernels_everywhere(monkeypatch)
    decoder = zoo.decoder("llama", "eagle3", SpecConfig(2, 3, 9), page_size=4, max_batch_size=2)
    prompts = ragged_prompts(40, 3, seed=1)[:2]
    outputs = decoder.generate(prompts, SamplingParams(max_tokens=5))
    assert [out.token_ids for out in outputs] == [zoo.greedy("llama", prompt, 24)[:5] for prompt in prompts]
    assert set(launched) == ALWAYS | TREES_ONLY


@pytest.mark.slow
def test_rounds_of_waiting_texts_through_the_kernels(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: columns of waiting rows in which the kernel strides from row to row as in a whole batch."""
    decoder = zoo.decoder("llama", "eagle3", SpecConfig(2, 3, 9), page_size=4, max_batch_size=3)
    Driver(decoder).use_grammars(Grammars(lambda: letters_json(40), 40, [39]))
    prompts, held = ragged_prompts(40, 3, seed=1), SamplingParams(max_tokens=6, regex="[a-f]+", stop_token_ids=[39])
    marks = ["abcdefghijklmnopqrstuvwxyz0123456789ABCDEF"[zoo.greedy("llama", p, 24)[2]] for p in prompts[:2]]

    def texts(masked: bool) -> list[list[int]]:
        requests = [decoder.new_request(prompt, held) for prompt in prompts[:2]]
        for request, mark in zip(requests, marks, strict=True):
            wait = Wait(None, (mark,))
            request.wait_for(wait, None if masked else decoder.grammars.prepare(wait))
        return [
            out.token_ids for out in decoder.run([*requests, decoder.new_request(prompts[2], SamplingParams(max_tokens=6))])
        ]

    expected = texts(masked=True)
    launched = use_kernels_everywhere(monkeypatch)
    assert texts(masked=False) == expected and "launch_halt" in launched


@pytest.mark.slow_cases
@pytest.mark.slow
@pytest.mark.parametrize("spec", [SpecConfig(2, 1, 3), SpecConfig(2, 3, 9)], ids=str)
def test_rounds_of_hybrids_through_the_kernels(zoo: Zoo, spec: SpecConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: strides that parents, gates and numbers have in rounds alone."""
    launched = use_kernels_everywhere(monkeypatch)
    decoder = zoo.decoder("qwen3_5_text wide", "eagle3", spec, page_size=4, max_batch_size=2)
    prompts = ragged_prompts(40, 3, seed=1)[:2]
    outputs = decoder.generate(prompts, SamplingParams(max_tokens=5))
    assert [out.token_ids for out in outputs] == [zoo.greedy("qwen3_5_text wide", prompt, 24)[:5] for prompt in prompts]
    own = {
        "launch_state_numbers",
        "launch_commit_states",
        "launch_tree_convolution",
        "launch_tree_rule",
        "launch_chunk_convolution",
    }
    assert own < set(launched), launched


@pytest.mark.slow_cases
@pytest.mark.slow
@pytest.mark.parametrize(("spec", "top_p"), [(SpecConfig(3, 1, 4), 0.8), (SpecConfig(3, 2, 6), 1.0)], ids=str)
def test_sampled_rounds_through_the_kernels(zoo: Zoo, spec: SpecConfig, top_p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: noise with strides that only a batch's table has, and kernels of sampling in a greedy round (above)."""
    prompts, decoder = ragged_prompts(40, 3, seed=1)[:2], zoo.decoder("llama", "eagle3", spec, page_size=4, max_batch_size=2)
    params = [SamplingParams(max_tokens=4, temperature=1.0, top_p=top_p, seed=4), SamplingParams(max_tokens=4)]
    want = [(out.token_ids, out.stats.accepted_per_round) for out in decoder.generate(prompts, params)]
    launched = use_kernels_everywhere(monkeypatch)
    outputs = zoo.decoder("llama", "eagle3", spec, page_size=4, max_batch_size=2).generate(prompts, params)
    assert [(out.token_ids, out.stats.accepted_per_round) for out in outputs] == want
    wanted = ALWAYS if spec.topk == 1 else ALWAYS | TREES_ONLY
    if top_p < 1:
        wanted = wanted | {"launch_cutoffs", "launch_approximate_cutoffs", "launch_sampled_tokens"}
    else:
        wanted = wanted - {"launch_greedy_tokens"} | {"launch_sampled_tokens"}
    assert set(launched) == wanted


@pytest.mark.slow
def test_a_row_whose_draft_is_nan_goes_through_the_kernels(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that does not speculate reads drafter keys that nobody wrote.  Keeps out: candidates of NaN whose tokens or parents
    are no indices, and a draft token accepted in such a row."""
    use_kernels_everywhere(monkeypatch)
    spec = SpecConfig(3, 2, 6)
    decoder = zoo.decoder("llama", "eagle3", spec, page_size=4, max_batch_size=2)
    driver, prompts = Driver(decoder), ragged_prompts(40, 3, seed=1)[:2]
    driver.poison_free_slots(torch.nan, "draft")
    plain = driver.submit(prompts[0], SamplingParams(max_tokens=6), speculate=False)
    while not plain.output.token_ids:
        driver.step()
    fast = driver.submit(prompts[1], SamplingParams(max_tokens=3))
    trees = []
    driver.before_each_round(lambda: trees.append(driver.draft(2, spec)) if len(driver.running) == 2 else None)
    driver.run_until_idle()
    assert trees and all(bool(((tree.tokens_BN >= 0) & (tree.tokens_BN < 40)).all()) for tree in trees)
    assert all(bool(((tree.parents_BN >= 0) & (tree.parents_BN < tree.num_nodes)).all()) for tree in trees)
    for request, prompt in zip((plain, fast), prompts, strict=True):
        assert request.output.token_ids == zoo.greedy("llama", prompt, 24)[: request.sampling.max_tokens]
    assert plain.stats.drafted == 0 < fast.stats.drafted
