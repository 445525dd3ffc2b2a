"""Layers that share keys and values on a GPU: our kernels, in every graph mode, with trees at page sizes 1, 16 and 64."""

from __future__ import annotations

import pytest
import torch
from toolkit.driver import Driver
from toolkit.models import ragged_prompts
from toolkit.oracles.sharing import SharingZoo

from specdec import SamplingParams, SpecConfig
from specdec.attention.kernels.rope_store_triton import launch_rope
from specdec.config import GraphMode
from specdec.lossless.near_tie import explain_divergence
from specdec.ops.rope import HeadPrep, Rotation, rotary_table
from specdec.session import Session

pytestmark = pytest.mark.gpu

MAX_TOKENS = [20, 7, 24, 1, 13]
SAMPLING = [SamplingParams(max_tokens=n) for n in MAX_TOKENS]
PROMPTS = ragged_prompts(40, len(MAX_TOKENS))


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> SharingZoo:
    return SharingZoo(tmp_path_factory.mktemp("sharing"))


@pytest.mark.parametrize(
    ("name", "head", "page_size", "mode"),
    [
        ("half", "eagle3", 16, "round"),
        ("half", "eagle1", 1, "step"),
        ("windows", "eagle3", 64, "round"),
        ("crossed", "eagle3", 1, "round"),
        ("pairs", "eagle3", 16, False),
    ],
)
def test_float32_ids_equal_the_oracle_s(zoo: SharingZoo, name: str, head: str, page_size: int, mode: GraphMode) -> None:
    """Keeps out: rows of a prompt's last layers frozen in a graph; a NaN of an unwritten slot."""
    expected = [zoo.greedy(name, prompt, 24)[:n] for prompt, n in zip(PROMPTS, MAX_TOKENS, strict=True)]
    decoder = zoo.decoder(
        name, head, SpecConfig(4, 4, 16), device="cuda", attention="triton", cuda_graphs=mode, page_size=page_size,
        max_batch_size=3,
    )  # fmt: skip
    Driver(decoder).poison_free_slots(torch.nan)
    for speculate in (True, True, False):
        outputs = decoder.generate(PROMPTS, SAMPLING, speculate=speculate)
        assert [out.token_ids for out in outputs] == expected, (speculate, mode)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "int8"])
def test_bfloat16_text_is_the_plain_one(zoo: SharingZoo, kv_cache_dtype: str) -> None:
    """The first difference of two texts, if any, is a tie of the best tokens."""
    decoder = zoo.decoder(
        "half", "eagle3", SpecConfig(4, 4, 16), device="cuda", dtype="bfloat16", kv_cache_dtype=kv_cache_dtype, max_batch_size=5
    )
    plain, fast = (decoder.generate(PROMPTS, SAMPLING, speculate=speculate) for speculate in (False, True))
    for number, (a, b) in enumerate(zip(plain, fast, strict=True)):
        found = explain_divergence(Session(decoder), number, a.prompt_token_ids, a.token_ids, b.token_ids, SAMPLING[number])
        assert found is None or found.verdict == "near-tie", found


@pytest.mark.parametrize("T", [1, 7, 300])
def test_bfloat16_queries_against_float64(T: int) -> None:
    """The kernel for queries alone, at the size of a Llama-3.1-8B layer.  Rows after the queries hold NaN and keep it."""
    generator = torch.Generator().manual_seed(T)
    buffer = torch.randn(T + 1, 32, 128, generator=generator).to("cuda", torch.bfloat16)
    buffer[T] = torch.nan
    table = rotary_table(1.0 / 5e5 ** (torch.arange(0, 128, 2) / 128), 64).to("cuda")
    positions_T = torch.randint(64, (T,), generator=generator).cuda()
    weight_QD = (1 + 0.2 * torch.randn(32, 128, generator=generator)).to("cuda", torch.bfloat16)
    exact = HeadPrep(Rotation(table.double(), positions_T), 0, weight_QD.double(), 1e-5)
    want, _ = exact.apply_(buffer[:T].double())
    prep = HeadPrep(Rotation(table.to(torch.bfloat16), positions_T), 0, weight_QD, 1e-5)
    got = launch_rope(buffer[:T], prep).double()
    assert (got - want).abs().max() < 0.03 * want.abs().max() and buffer[T].isnan().all()
