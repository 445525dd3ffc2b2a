"""Targets with mixtures, most of them quantised, on a GPU: ids of float32, and bf16 texts through the kernel of experts."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit.checkpoints.gpt_oss import save_gpt_oss
from toolkit.checkpoints.mixtures import save_mixture
from toolkit.deepseek import save_deepseek
from toolkit.driver import Driver
from toolkit.models import ragged_prompts, save_eagle3
from toolkit.oracles.quantised import SCHEMES, as_quantised

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.config import GraphMode
from specdec.lossless.verify import verify
from specdec.models.linear import use_numerics
from specdec.ops.products.numerics import Numerics
from specdec.ops.products.tiles.experts import MixtureTiles
from specdec.session import Session

pytestmark = pytest.mark.gpu

PROMPTS = ragged_prompts(40, 5, seed=11)
SAMPLING = [SamplingParams(max_tokens=n) for n in (24, 9, 16, 2, 20)]
MODES: list[GraphMode] = [
    mode for mode in ("round", "step", False) if str(mode) in os.environ.get("GRAPHS", "round,step,False")
]  # type: ignore[misc]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Quantised targets, and a head of each."""
    root = tmp_path_factory.mktemp("experts")
    quantised, plain = save_gpt_oss(root / "gpt-oss", head_dim=16)
    v3 = save_deepseek(root / "plain-v3", "v3", n_routed_experts=16)
    made = {"gpt-oss": (quantised, plain), "v3": (as_quantised(v3, root / "v3", SCHEMES["deepseek fp8"]), v3)}
    qwen = save_mixture(root / "plain-qwen2", "qwen2-moe")
    made["qwen2-moe"] = as_quantised(qwen, root / "qwen2", SCHEMES["deepseek fp8"]), qwen
    made |= {"plain gpt-oss": (plain, plain), "plain qwen2-moe": (qwen, qwen)}
    return {name: (folder, save_eagle3(root / f"{name}-head", own)) for name, (folder, own) in made.items()}


def load(folders: tuple[Path, Path], spec: SpecConfig, **settings: Any) -> SpecDecoder:
    merged: dict[str, Any] = {"max_seq_len": 64, "max_batch_size": 4, "smoke": False, **settings}
    return SpecDecoder.from_pretrained(*folders, spec, **merged)


NAMES = ("gpt-oss", "v3", "qwen2-moe")


@pytest.mark.parametrize("name", [*NAMES, "plain gpt-oss", "plain qwen2-moe"])
def test_float32_ids_equal_the_cpu_s(folders: dict[str, tuple[Path, Path]], name: str) -> None:
    """Keeps out: an expert dequantised from another one's values, or inside of a graph by stale topk_ids."""
    plain = load(folders[name], SpecConfig(3, 1, 4), device="cpu", dtype="float32")
    expected = [out.token_ids for out in plain.generate(PROMPTS, SAMPLING, speculate=False)]
    for mode in MODES:
        decoder = load(folders[name], SpecConfig(3, 2, 6), device="cuda", dtype="float32", cuda_graphs=mode)
        for _ in range(2):  # the second run replays graphs dirtied by the first
            assert [out.token_ids for out in decoder.generate(PROMPTS, SAMPLING)] == expected, mode


class Watched(Numerics):
    """The policy that chooses what is fastest, and how often captures asked it for experts' kernels in bfloat16, by answer."""

    def __init__(self) -> None:
        self.captured: Counter[str | None] = Counter()

    def mixture_tiles(
        self,
        tokens: int,
        top_k: int,
        experts: int,
        kind: Any,
        dtype: torch.dtype,
        chained: bool,
        hopper: bool = False,
        gated: bool = True,
    ) -> MixtureTiles | None:
        tiles = super().mixture_tiles(tokens, top_k, experts, kind, dtype, chained, hopper, gated)
        if torch.cuda.is_current_stream_capturing() and dtype == torch.bfloat16:
            self.captured[tiles and tiles.kernel] += 1
        return tiles


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_texts_part_at_near_ties_alone(folders: dict[str, tuple[Path, Path]], name: str) -> None:
    """Keeps out: a logic error of the kernels that is passed off as rounding; rounds that never ask for them."""
    decoder, watched = load(folders[name], SpecConfig(3, 2, 6), device="cuda", dtype="bfloat16"), Watched()
    use_numerics(decoder.model, watched)
    assert verify(Session(decoder), PROMPTS, SAMPLING).passed
    assert Driver(decoder).num_graphs("round") > 0
    assert watched.captured and None not in watched.captured
