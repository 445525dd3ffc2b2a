"""Two ranks on two GPUs over NCCL: they write what one writes, in captured rounds, and end when one of them does."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit.checkpoints.gpt_oss import save_gpt_oss
from toolkit.checkpoints.mixtures import save_mixture
from toolkit.deepseek import DeepseekZoo, SparseZoo
from toolkit.driver import Driver
from toolkit.models import Zoo, ragged_prompts, save_eagle3
from toolkit.parallel.gpus import in_turn
from toolkit.parallel.pairs import FailingPair

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.loading.pair import WantedPair
from specdec.loading.ranks import Ranks, start_ranks
from specdec.models.registry import choose_target
from specdec.models.sharding import misfit
from specdec.options import EngineOptions
from specdec.parallel.symmetric import inbox
from specdec.prompts.tokenizer import Tokenizer

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.ranks(2)]

TREE, CHAIN = SpecConfig(num_steps=3, topk=3, num_draft_tokens=8), SpecConfig(num_steps=3, topk=1, num_draft_tokens=4)
PROMPTS = ragged_prompts(40, 5, seed=5)
SAMPLINGS = [
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=9, temperature=0.9, seed=3),
    SamplingParams(max_tokens=24, temperature=0.8, top_k=7, top_p=0.9, seed=4),
    SamplingParams(max_tokens=16),
    SamplingParams(max_tokens=20, temperature=1.0, seed=5),
]
GREEDY = [SamplingParams(max_tokens=params.max_tokens) for params in SAMPLINGS]
ZOOS: dict[type[Zoo], tuple[str, ...]] = {
    Zoo: ("qwen3", "llama", "llama3-tied-dim8", "llama-dim80-biases", "qwen2", "diffllama-mha", "diffllama-gqa"),
    DeepseekZoo: ("v2-lite", "v3", "v2-dense-biases"),
    SparseZoo: ("v32-dense-biases", "glm"),
}
FAMILIES = [(zoo, name) for zoo, names in ZOOS.items() for name in names]
FIRST = [(Zoo, "qwen3"), (DeepseekZoo, "v3")]  # chains and sampling too; other families differ in their layers alone


def options_of(size: int, **more: Any) -> EngineOptions:
    usual = dict(device="cuda", dtype="float32", max_seq_len=80, max_batch_size=4, tensor_parallel_size=size)
    return EngineOptions(**usual | more)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _in_turn() -> Iterator[None]:
    with in_turn():
        yield


@pytest.fixture(scope="module")
def zoos(tmp_path_factory: pytest.TempPathFactory) -> dict[type[Zoo], Zoo]:
    return {zoo: zoo(tmp_path_factory.mktemp("zoo")) for zoo in (Zoo, DeepseekZoo, SparseZoo)}


@pytest.fixture(scope="module", params=[size for size in (2, 4) if size <= GPUS])
def ranks(request: pytest.FixtureRequest) -> Iterator[tuple[int, Ranks]]:
    """Processes that every test of the module has load another pair."""
    found = Ranks(options_of(request.param))
    yield request.param, found
    found.close()


def decoder_of(
    target: Path, draft: Path, spec: SpecConfig, size: int, ranks: Ranks | None = None, **more: Any
) -> SpecDecoder:  # fmt: skip
    wanted = WantedPair(target, draft, spec, options_of(size, **more))
    model, head, settings, folder = (ranks or Ranks(options_of(1))).load(wanted)
    return SpecDecoder(model, head, settings, Tokenizer(folder), ranks)


@pytest.mark.parametrize(("zoo", "name"), FAMILIES, ids=[name for _, name in FAMILIES])
def test_ranks_write_what_one_writes(zoo: type[Zoo], name: str, zoos: dict[type[Zoo], Zoo], ranks: tuple[int, Ranks]) -> None:
    """Keeps out: an exchange that a captured round leaves out or makes twice; a rank that chooses a token of its own."""
    target = zoos[zoo].target(name)
    if why := misfit(choose_target(target).config, ranks[0]):
        pytest.skip(f"{ranks[0]} ranks do not share {why}")
    draft = zoos[zoo].head(name, "eagle1" if name == "llama3-tied-dim8" else "eagle3")
    is_first = (zoo, name) in FIRST
    for spec in (TREE, CHAIN) if is_first else (TREE,):
        for sampling in (GREEDY, SAMPLINGS) if is_first else (GREEDY,):
            with decoder_of(target, draft, spec, 1) as decoder:
                want = [out.token_ids for out in decoder.generate(PROMPTS, sampling)]
            with decoder_of(target, draft, spec, *ranks) as decoder:
                for _ in range(2):  # the second time replays what the first has captured
                    assert [out.token_ids for out in decoder.generate(PROMPTS, sampling)] == want
                assert Driver(decoder).num_graphs("round") > 0


@pytest.mark.parametrize("name", ["qwen3-moe", "glm4-moe", "minimax", "gpt-oss"])
def test_ranks_that_divide_experts_write_what_one_writes(name: str, tmp_path: Path, ranks: tuple[int, Ranks]) -> None:
    """Five rows, padded to eight, in float32; and in bfloat16, whose kernels find a rank's own pairs, twice the same.

    Keeps out: whose experts the host read while capturing; outputs that nobody wrote in a sum."""
    if name == "gpt-oss":
        target = save_gpt_oss(tmp_path / "target", num_local_experts=5, num_hidden_layers=3)[0]
    else:
        target = save_mixture(tmp_path / "target", name)
    draft = save_eagle3(tmp_path / "head", target)
    more = {"expert_parallel": "experts", "max_batch_size": 8}
    with decoder_of(target, draft, TREE, 1) as decoder:
        want = [out.token_ids for out in decoder.generate(PROMPTS, GREEDY)]
    with decoder_of(target, draft, TREE, *ranks, **more) as decoder:
        for _ in range(2):
            assert [out.token_ids for out in decoder.generate(PROMPTS, GREEDY)] == want
        assert Driver(decoder).num_graphs("round") > 0
    with decoder_of(target, draft, TREE, *ranks, **more, dtype="bfloat16") as decoder:
        first, second = ([out.token_ids for out in decoder.generate(PROMPTS, GREEDY)] for _ in range(2))
        assert first == second


def test_a_cancelled_request_leaves_the_others_alone(zoos: dict[type[Zoo], Zoo], ranks: tuple[int, Ranks]) -> None:
    """Keeps out: a row that moves on one rank only."""
    target, draft = zoos[Zoo].target("qwen3"), zoos[Zoo].head("qwen3", "eagle3")
    with decoder_of(target, draft, TREE, *ranks) as decoder:
        want = [out.token_ids for out in decoder.generate(PROMPTS[1:4], GREEDY[1:4])]
        driver = Driver(decoder)
        requests = [driver.submit(prompt, params) for prompt, params in zip(PROMPTS[:4], GREEDY)]
        for _ in range(4):
            driver.step()
        driver.cancel(requests[0])
        driver.run_until_idle()
        assert [request.output.token_ids for request in requests[1:]] == want


@pytest.mark.parametrize("way", ["memory", "NCCL"])
def test_a_rank_that_dies_ends_the_requests(
    way: str, zoos: dict[type[Zoo], Zoo], monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Keeps out: a device that waits for ever for a rank that is gone, and a host that waits for this device."""
    if way == "NCCL":
        monkeypatch.setattr(inbox, "_check_kernels", unreachable)
    target, draft = zoos[Zoo].target("qwen3"), zoos[Zoo].head("qwen3", "eagle3")
    others = set(multiprocessing.active_children())
    with SpecDecoder.from_pretrained(target, draft, TREE, options=options_of(2)) as decoder:
        decoder.generate(PROMPTS, GREEDY)
        (child,) = set(multiprocessing.active_children()) - others
        assert child.pid is not None
        stream = decoder.stream(PROMPTS[0], SamplingParams(max_tokens=40, ignore_eos=True))
        next(stream)
        os.kill(child.pid, signal.SIGSTOP)  # its device stops to take part, while this rank's goes on
        time.sleep(0.5)
        os.kill(child.pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="rank 1 failed"):
            list(stream)
        named = time.monotonic() - began
    closed = time.monotonic() - began
    print(f"{way}: named after {named:.2f} s, closed after {closed:.2f} s")
    assert named < 10 and closed < 20 and not child.is_alive()
    assert any("over NCCL" in str(warning.message) for warning in recwarn) == (way == "NCCL")


def unreachable(device: torch.device) -> None:
    raise inbox.Unreachable("a test wants NCCL")


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_rank_ends_all(rank: int, zoos: dict[type[Zoo], Zoo]) -> None:
    """Keeps out: a device that waits for a pass which another rank gave up; an error without its rank and its reason."""
    wanted = WantedPair(zoos[Zoo].target("qwen3"), zoos[Zoo].head("qwen3", "eagle3"), TREE, options_of(2))
    with start_ranks(wanted.options) as started:
        model, head, settings, folder = started.load(FailingPair(wanted, rank, 1))
        with SpecDecoder(model, head, settings, Tokenizer(folder), started) as decoder:
            began = time.monotonic()
            with pytest.raises(RuntimeError, match="rank 1 failed: .*no more room" if rank else "no more room"):
                decoder.generate(PROMPTS, GREEDY)
            assert time.monotonic() - began < 10
            with pytest.raises(RuntimeError, match=f"rank {rank} failed: .*no more room"):
                decoder.generate(PROMPTS, GREEDY)
    started.close()
    assert time.monotonic() - began < 20


SCRIPT = """
import multiprocessing, sys
from specdec import SamplingParams, SpecConfig, SpecDecoder
with SpecDecoder.from_pretrained(*sys.argv[1:], SpecConfig(3, 3, 8), device="cuda", dtype="float32", max_seq_len=80,
                                 tensor_parallel_size=2) as decoder:
    sampling = SamplingParams(max_tokens=60, ignore_eos=True)
    decoder.generate([3, 1, 4], sampling)
    print(multiprocessing.active_children()[0].pid, flush=True)
    while True:
        decoder.generate([3, 1, 4], sampling)
"""


@pytest.mark.parametrize("how", ["Ctrl-C", "kill"])
def test_all_ranks_end_with_the_first(how: str, zoos: dict[type[Zoo], Zoo]) -> None:
    """Keeps out: a program that Ctrl-C does not end; a rank that stays on its GPU, waiting for the first one, which is gone."""
    folders = str(zoos[Zoo].target("qwen3")), str(zoos[Zoo].head("qwen3", "eagle3"))
    command = [sys.executable, "-P", "-c", SCRIPT, *folders]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True) as first:
        assert first.stdout is not None and first.stderr is not None
        other = int(first.stdout.readline())
        time.sleep(0.3)
        began = time.monotonic()
        if how == "kill":
            first.kill()
        else:
            os.killpg(first.pid, signal.SIGINT)  # as a terminal does
        try:
            first.wait(20)
            ended = time.monotonic() - began
            while runs(other) and time.monotonic() - began < 20:
                time.sleep(0.05)
            print(f"{how}: the first rank ended after {ended:.2f} s, the other after {time.monotonic() - began:.2f} s")
            assert time.monotonic() - began < 10
            assert how == "kill" or "KeyboardInterrupt" in first.stderr.read()
        finally:
            os.killpg(first.pid, signal.SIGKILL) if runs(other) else first.kill()


def runs(pid: int) -> bool:
    """Whether that process is there, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
