"""Targets through transformers' code on a GPU: our kernels, and CUDA graphs around code that is not ours, change nothing."""

from __future__ import annotations

import inspect
import os

import pytest
import torch
from toolkit.driver import Driver
from toolkit.families import FAMILIES, NO_FEATURES, Families
from toolkit.inside.captures import capturing
from toolkit.models import HEADS, ragged_prompts
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextModel

from specdec import Generation, SamplingParams, SpecConfig, SpecDecoder
from specdec.config import GraphMode
from specdec.loading.build import free_memory
from specdec.models.registry import choose_target, load_chosen
from specdec.models.transformers_backend.load import check_capturable, lone_pass
from specdec.models.transformers_backend.target import TransformersTarget

pytestmark = pytest.mark.gpu

PROMPTS = ragged_prompts(40, 5, seed=11)
SAMPLING = [SamplingParams(max_tokens=n) for n in (24, 9, 16, 1, 20)]
# GRAPHS=round,step and the like narrow a run where device time is scarce
MODES: list[GraphMode] = [
    mode for mode in ("round", "step", False) if str(mode) in os.environ.get("GRAPHS", "round,step,False")
]  # type: ignore[misc]


# Families that this release of transformers can't run in a graph: in some, Gemma 3n copies a number from the host in each pass.
REFUSED = {"gemma3n"} if "epsilon_tensor.to(" in inspect.getsource(Gemma3nTextModel.forward) else set()


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Families:
    return Families(tmp_path_factory.mktemp("families"))


def load(families: Families, name: str, head: str, spec: SpecConfig, **settings: object) -> SpecDecoder:
    folder = families.root / f"{name}--{head}"
    folder = folder if folder.is_dir() else HEADS[head](folder, families.target(name))
    merged = {"dtype": "float32", "max_seq_len": 64, "max_batch_size": 4, "backend": "transformers", **settings}
    return SpecDecoder.from_pretrained(families.target(name), folder, spec, **merged)  # type: ignore[arg-type]


def ids(outputs: list[Generation]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("name", FAMILIES)
def test_float32_ids_equal_the_cpu_s(families: Families, name: str) -> None:
    """Keeps out: a window, sink or softcap lost in a kernel; a model's own host read or stale constant inside a graph."""
    head = "eagle1" if name in NO_FEATURES else "eagle3"
    plain = load(families, name, head, SpecConfig(5, 1, 6), device="cpu")
    expected = ids(plain.generate(PROMPTS, SAMPLING, speculate=False))
    for mode in MODES:
        if mode and name in REFUSED:
            with pytest.raises(ValueError, match="can't be captured in a CUDA graph .*cuda_graphs=False"):
                load(families, name, head, SpecConfig(5, 1, 6), device="cuda", cuda_graphs=mode)
            continue
        for spec, page_size in ((SpecConfig(5, 4, 16), 5), (SpecConfig(5, 1, 6), 16)):
            decoder = load(families, name, head, spec, device="cuda", attention="triton", cuda_graphs=mode, page_size=page_size)
            for _ in range(2):  # the second run replays graphs dirtied by the first
                assert ids(decoder.generate(PROMPTS, SAMPLING)) == expected, (mode, spec)
            assert ids(decoder.generate(PROMPTS, SAMPLING, speculate=False)) == expected, (mode, spec)
            assert (Driver(decoder).num_graphs("round") > 0) == (mode == "round")


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3-moe", "mixtral", "gemma2", "gemma4"])
@torch.inference_mode()
def test_bfloat16_passes_are_captured(families: Families, name: str) -> None:
    """Keeps out: grouped products that read their groups' sizes on the host, or replay those of another pass."""
    folder, device = families.target(name), torch.device("cuda")
    target = load_chosen(choose_target(folder, "transformers"), folder, 128, device, torch.bfloat16, cuda_graphs=True)
    assert isinstance(target, TransformersTarget)
    run, order = lone_pass(target)
    static = order.clone()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        states = run(static)
    for seed in range(3):
        static.copy_(torch.randperm(len(order), generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert torch.equal(states, run(static))


@torch.inference_mode()
def test_a_model_that_reads_the_device_says_so(families: Families) -> None:
    """Keeps out: a capture that fails in the middle of a user's first request, without the setting that works; a process that
    can't draw random numbers on the GPU afterwards, keeps its memory, or goes on in the capture's stream."""
    folder = families.target("llama")
    target = load_chosen(choose_target(folder, "transformers"), folder, 128, torch.device("cuda"), torch.float32, True)
    assert isinstance(target, TransformersTarget)
    target.parts.on_layers(lambda layer, state: state.sum().item())
    torch.manual_seed(7)
    with pytest.raises(ValueError, match="can't be captured in a CUDA graph .*cuda_graphs=False"):
        check_capturable(target, "here")
    drawn = torch.rand(5, device="cuda")
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(5, device="cuda"))
    assert torch.ones(3, device="cuda").sum().item() == 3  # the device is as it was
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    before = torch.cuda.memory_reserved()
    large = torch.empty(before + 100_000_000, dtype=torch.uint8, device="cuda")  # more than is kept
    del large
    free_memory(torch.device("cuda"))
    assert torch.cuda.memory_reserved() <= before
