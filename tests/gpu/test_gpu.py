"""The whole runtime on a GPU: graphs, padding and the Triton kernels may change nothing that the reader sees."""

from __future__ import annotations

import gc
import json

import pytest
import torch
from toolkit.driver import Driver

from specdec import Generation, SamplingParams, SpecConfig, SpecDecoder
from specdec.config import GraphMode
from specdec.generation import Stats
from specdec.lossless.near_tie import explain_divergence
from specdec.ops.cuda_graph import GraphSet
from specdec.session import Session
from specdec.shipped import draft_folder, prompts_file, target_folder

pytestmark = pytest.mark.gpu

SPECS = [SpecConfig(5, 4, 16), SpecConfig(5, 1, 6), SpecConfig(3, 8, 32)]
GREEDY = SamplingParams(max_tokens=64)


def prompts(count: int) -> list[str]:
    return [json.loads(line)["prompt"] for line in prompts_file().read_text().splitlines()[:count]]


def load(**settings: object) -> SpecDecoder:
    merged = {"spec": SPECS[0], "dtype": "float32", "max_seq_len": 256, **settings}
    return SpecDecoder.from_pretrained(target_folder(), draft_folder(), device="cuda", **merged)  # type: ignore[arg-type]


def ids(outputs: list[Generation]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Greedy ids by the torch backend on the CPU, without speculation."""
    decoder = SpecDecoder.from_pretrained(target_folder(), device="cpu", max_seq_len=256)
    return ids(decoder.generate(prompts(11), GREEDY))


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("attention", ["triton", "torch"])
@pytest.mark.parametrize("cuda_graphs", ["round", "step", False])
def test_float32_ids_equal_the_cpu_s(
    spec: SpecConfig, attention: str, cuda_graphs: GraphMode, expected: list[list[int]]
) -> None:
    """Keeps out: a graph that reads stale buffers, a kernel that reads beyond its row.  11 prompts on 8 rows: requests leave
    and enter, so every bucket from 8 down to 1 is captured, replayed and shrunk."""
    decoder = load(spec=spec, attention=attention, cuda_graphs=cuda_graphs)
    for _ in range(
        4
    ):  # rounds are captured at once, chunks at their third use; the last run replays graphs that others have used
        assert ids(decoder.generate(prompts(11), GREEDY)) == expected
    assert ids(decoder.generate(prompts(11), GREEDY, speculate=False)) == expected
    driver = Driver(decoder)  # plain steps are phases in every mode
    assert (driver.num_graphs("phase") > 0) == bool(cuda_graphs) and (driver.num_graphs("round") > 0) == (
        cuda_graphs == "round"
    )
    assert (driver.num_graphs("prefill") > 0) == (bool(cuda_graphs) and attention == "triton")


@pytest.mark.parametrize("spec", SPECS[:2], ids=str)
@pytest.mark.parametrize("cuda_graphs", ["round", "step"])
def test_rows_with_and_without_speculation_share_graphs(
    spec: SpecConfig, cuda_graphs: GraphMode, expected: list[list[int]]
) -> None:
    """Keeps out: a captured round that remembers which rows speculated, drafts of NaN whose tokens are no ids."""
    decoder = load(spec=spec, cuda_graphs=cuda_graphs, max_batch_size=4, prefix_caching=True)
    driver = Driver(decoder)
    driver.poison_free_slots(torch.nan, "draft")
    for turn in range(3):
        requests = [driver.submit(text, GREEDY, speculate=(row + turn) % 3 > 0) for row, text in enumerate(prompts(11))]
        driver.run_until_idle()
        assert [request.output.token_ids for request in requests] == expected
        assert [request.stats.drafted > 0 for request in requests] == [(row + turn) % 3 > 0 for row in range(11)]
        assert Stats.total([request.stats for request in requests if request.speculate]).accept_length > 1.5
    driver.assert_nothing_leaked()


@pytest.mark.parametrize("page_size", [1, 5, 64])
def test_page_sizes_change_nothing(page_size: int, expected: list[list[int]]) -> None:
    """Keeps out: tree slots that run over a page's end."""
    decoder = load(page_size=page_size, max_batch_size=3)
    assert ids(decoder.generate(prompts(11), GREEDY)) == expected
    Driver(decoder).assert_nothing_leaked()


@pytest.mark.parametrize("attention", ["triton", "torch"])
def test_padded_rows_are_never_read(attention: str, expected: list[list[int]]) -> None:
    """Keeps out: a padded row of a graph's batch that leaks into a real one.  Every page holds NaN, its state junk."""
    decoder = load(max_batch_size=8, attention=attention)
    decoder.generate(prompts(3), SamplingParams(max_tokens=8))  # captures the bucket of 4 that 3 prompts run in
    Driver(decoder).poison_free_slots(torch.nan)
    Driver(decoder).poison_free_rows()
    assert ids(decoder.generate(prompts(3), GREEDY)) == expected[:3]


@pytest.mark.parametrize("cuda_graphs", ["round", "step"])
def test_padding_is_junk_before_every_replay(cuda_graphs: GraphMode) -> None:
    """Keeps out: what padding holds at the tenth round and not at the first; acceptance that falls as a batch shrinks."""
    alone = load(max_batch_size=1, cuda_graphs=False)
    sampling = [SamplingParams(max_tokens=2 + 2 * index, ignore_eos=True) for index in range(32)]
    asked = prompts(32)
    expected = alone.generate(asked, sampling)
    decoder = load(max_batch_size=32, cuda_graphs=cuda_graphs)
    decoder.generate(asked, sampling)  # captures every bucket
    driver = Driver(decoder)
    driver.before_each_round(driver.poison_padding)
    for count in (32, 5, 1):
        outputs = decoder.generate(asked[:count], sampling[:count])
        assert ids(outputs) == ids(expected[:count])
        got, want = (Stats.total([out.stats for out in each]) for each in (outputs, expected[:count]))
        assert got.accepted == pytest.approx(want.accepted, rel=0.02)  # products of other shapes may turn a tie of two drafts


def test_nothing_is_collected_during_a_capture() -> None:
    """Keeps out: a dropped decoder whose graphs are freed while another's are captured, which ends the process."""
    seen: list[bool] = []
    x = torch.zeros(1, device="cuda")

    def work() -> None:
        seen.append(gc.isenabled())
        x.add_(1)

    GraphSet(True).run("key", work, [x])
    assert seen == [True, True, False] and gc.isenabled()


def test_captures_go_on_after_one_that_failed() -> None:
    """Keeps out: a set of graphs whose later captures torch refuses, since the failed one still seems to fill their pool."""
    x, graphs = torch.zeros(1, device="cuda"), GraphSet(True)
    graphs.run("adds", lambda: x.add_(1), [x])
    with pytest.raises(RuntimeError):
        graphs.run("reads", lambda: x.add_(1).item(), [x], warm_ups=0)
    graphs.run("doubles", lambda: x.mul_(2), [x])
    graphs.run("adds", lambda: x.add_(1), [x])
    assert x.item() == (0 + 1) * 2 + 1


def test_no_phase_waits_for_the_device() -> None:
    """Keeps out: a host read inside a round (.item(), .tolist(), boolean indexing), which stalls it and can't be captured."""
    decoder = load(cuda_graphs=False)
    stream = decoder.stream(prompts(1)[0], SamplingParams(max_tokens=64))
    next(stream)
    torch.cuda.set_sync_debug_mode("error")  # whatever waits for the device raises now, which is what this test asserts
    try:
        Driver(decoder).run_phases(1, SPECS[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("cuda_graphs", ["round", "step"])
@pytest.mark.parametrize("speculate", [True, False])
def test_one_wait_a_round(cuda_graphs: GraphMode, speculate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a host that waits for the round it has just launched, or waits twice.  Counts the waits of 20 rounds,
    of which a quick one may need none; any other synchronisation is an error."""
    decoder = load(cuda_graphs=cuda_graphs, max_seq_len=400)
    driver = Driver(decoder)
    for text in prompts(3):
        driver.submit(text, SamplingParams(max_tokens=200, ignore_eos=True), speculate)
    for _ in range(4):
        driver.step()
    before, forbidden = driver.waits, lambda *args: pytest.fail("the host waited for the device")
    monkeypatch.setattr(torch.cuda, "synchronize", forbidden)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            driver.step()
            assert driver.rounds_in_flight == 1, "the next round runs while this one's tokens are handed out"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert driver.waits - before <= 20 and len(driver.running) == 3
    driver.cancel_all()


@pytest.mark.parametrize("spec", [SpecConfig("auto", 4, 16), SpecConfig("auto", 1, 6)], ids=str)
def test_auto_writes_the_same_text(spec: SpecConfig, expected: list[list[int]]) -> None:
    """Keeps out: a pause or a change of levels that replays a graph of other shapes or leaves a stale first level."""
    decoder = load(spec=spec)
    for _ in range(2):
        assert ids(decoder.generate(prompts(11), GREEDY)) == expected


def test_sampled_ids_do_not_depend_on_speculation_or_graphs() -> None:
    """Keeps out: noise that depends on the row, the bucket or the draft instead of (seed, position)."""
    sampling = [SamplingParams(max_tokens=48, temperature=0.8, top_p=0.95, top_k=50, seed=i) for i in range(5)]
    graphs, eager = load(), load(cuda_graphs=False)
    sampled = ids(graphs.generate(prompts(5), sampling))
    assert sampled == ids(graphs.generate(prompts(5), sampling, speculate=False))
    assert sampled == ids(eager.generate(prompts(5), sampling))
    assert sampled[2] == ids(eager.generate(prompts(5)[2], sampling[2]))[0]


@pytest.mark.parametrize("batch", [1, 8])
def test_bfloat16_differs_only_at_near_ties(batch: int) -> None:
    """Keeps out: a logic error passed off as rounding.  Every divergence must be a tie of the target's best tokens."""
    decoder = load(dtype="bfloat16", max_batch_size=batch)
    texts = prompts(16)
    plain, fast = (decoder.generate(texts, GREEDY, speculate=speculate) for speculate in (False, True))
    for number, (a, b) in enumerate(zip(plain, fast)):
        found = explain_divergence(Session(decoder), number, a.prompt_token_ids, a.token_ids, b.token_ids, GREEDY)
        assert found is None or found.verdict == "near-tie", found
    stats = Stats.total([output.stats for output in fast])
    assert stats.accept_length > 2, "the pair speculates in bfloat16 too"
