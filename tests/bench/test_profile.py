"""Profiles: bytes counted by hand, traces split by the clock, phases that add up, and a table that says so."""

from __future__ import annotations

import io
import json
import re

import pytest
import torch
from rich.console import Console
from toolkit.bench import traced
from toolkit.driver import Driver
from toolkit.models import Zoo
from toolkit.paths import ROOT

from specdec import SamplingParams, SpecConfig
from specdec.bench.budget import ATTENTION, COPY, EXCHANGE, GEMM, NORM, OTHER, RECURRENT, TREE, Budget
from specdec.bench.byte_limit import READ_REPEATS, byte_limit, read_bandwidth
from specdec.bench.kernels import MARKS, Span, kind_of, phases_of, short_name, split
from specdec.bench.measurement import Measurement
from specdec.bench.profile import Workload, full_rounds, phases_ms, profile_work, rounds_in
from specdec.bench.show.budget_report import print_budgets
from specdec.ops.compiling.chains import CHAINS
from specdec.session import Session

SPEC = SpecConfig(3, 2, 6)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7]]


def shown(*budgets: Budget, synthetic: list[float] | None = None, width: int = 80) -> str:
    out = io.StringIO()
    print_budgets(Measurement({}, {}, {}, {}, [], list(budgets), synthetic), Console(file=out, width=width))
    return out.getvalue()


@pytest.mark.parametrize("kind", ["eagle3", "eagle3-full", "eagle1"])
@pytest.mark.parametrize("target", ["llama", "qwen2"])  # qwen2: the output layer is the embedding table
def test_bytes_are_those_that_a_round_reads(zoo: Zoo, target: str, kind: str) -> None:
    """Keeps out: embedding tables counted whole, output layers left out, features fused in every pass, one pass too few."""
    decoder = zoo.decoder(target, kind, SPEC)
    model, head = decoder.model, decoder.head
    V, H, I, N = 40, model.config.hidden_size, 48, 4
    Q, K, D = model.config.num_heads, model.config.num_kv_heads, model.config.head_dim
    bias = (Q + 2 * K) * D if target == "qwen2" else 0
    layer = H * (Q + 2 * K) * D + bias + Q * D * H + 3 * H * I + 2 * H
    step = byte_limit(model, head, None, batch=2, context=10)
    assert step.target == 4 * (N * layer + H + V * H + 2 * H)  # a row for each sequence
    assert step.target_kv == 4 * 2 * 10 * N * 2 * K * D
    assert (step.draft, step.draft_kv, step.draft_passes) == (0, 0, 0)
    assert byte_limit(model, head, None, batch=2, context=10, sharers=2).target_kv == step.target_kv // 2
    once = byte_limit(model, head, SPEC, batch=2, context=10)
    assert once.target == step.target + 4 * 10 * H  # 12 nodes instead of 2
    Vd = {"eagle3": 2 * V // 3, "eagle3-full": V, "eagle1": V}[kind]
    inputs = H if kind == "eagle1" else 2 * H
    body = inputs * (Q + 2 * K) * D + Q * D * H + 3 * H * 40 + H + Vd * H
    body += bias if head.config.model.qkv_bias else 0
    body += 2 * H * H + H if kind == "eagle1" else 3 * H  # fc in every pass; or norms
    fused = 0 if kind == "eagle1" else 3 * H * H
    rows = 2 * (2 * 2 + 4)  # two steps of two branches, four rows of extend
    assert once.draft == 4 * (3 * body + fused + rows * H)
    assert once.draft_kv == 3 * 4 * 2 * 10 * 2 * K * D
    assert once.total == once.target + once.target_kv + once.draft + once.draft_kv
    assert once.of_phase("draft") + once.of_phase("extend") == pytest.approx(once.draft + once.draft_kv)
    assert once.of_phase("verify") == once.target + once.target_kv and once.of_phase("rest") is None


def test_bandwidth_is_bytes_by_the_clock() -> None:
    """The clock is scripted: three ways of reading take 4, 2 and 8 ms, but for a repeat of each that is disturbed and one that
    is not timed right.  Keeps out: bytes by bits, seconds by milliseconds, the mean or the best repeat, the slowest way."""
    repeats = READ_REPEATS["cpu"]
    lasting = [ms for usual in (4, 2, 8) for ms in (100, 0.1, *[usual] * (repeats - 2))]
    ticks = [tick for ms in lasting for tick in (0.0, ms / 1e3)]
    assert read_bandwidth(torch.device("cpu"), 4 << 20, lambda: ticks.pop(0)) == pytest.approx((4 << 20) / 0.002)
    assert not ticks


def test_every_instant_of_a_trace_is_counted_once() -> None:
    """Keeps out: chained kernels whose waiting counts as work, so that parts add up to more than the whole."""
    spans = [
        Span("nvjet_a", 10_000, 16_000),
        Span("rms_norm_kernel", 12_000, 17_000),  # launched early, waits for the product
        Span("Memcpy DtoH (Device -> Pinned)", 16_500, 16_600),  # beside it
        Span("what_is_this", 18_000, 20_000),
    ]
    got = split(reversed(spans), rounds=2)
    assert got.by_kind == {GEMM: 3.0, NORM: 0.5, OTHER: 1.0} and got.by_phase == {}
    assert (got.idle, got.span, got.kernels) == (0.5, 5.0, 1.5)
    assert got.idle_share == pytest.approx(0.1)
    assert got.longest[0] == ("nvjet_a", 3.0, 0.5)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_64x8_64x16_4x1_v_bz_splitK_TNT", GEMM),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(cublasLt::cublasSplitKParams<float>)", GEMM),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16, float, 128, 16, 4, 4, false>(float)", GEMM),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(Params)", GEMM),
        ("gated_linear_kernel", GEMM),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", EXCHANGE),
        ("few_rows_kernel", EXCHANGE),
        ("paged_attention_kernel", ATTENTION),
        ("paged_hopper_kernel", ATTENTION),
        ("wide_hopper_kernel", ATTENTION),
        ("wide_many_hopper_kernel", ATTENTION),
        ("single_query_attention_kernel", ATTENTION),
        ("suffix_merge_kernel", ATTENTION),
        ("void pytorch_flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, cutlass::bfloat16_t> >()", ATTENTION),
        ("rope_store_kernel", NORM),
        ("add_rms_norm_kernel", NORM),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctorOnSelf_add<long> >(int)", NORM),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<OpaqueType<8u>, 2>(char)", NORM),
        ("void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<lambda>>(long)", TREE),
        ("void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>(Tensor)", TREE),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps> >()", TREE),
        ("top_tokens_kernel", TREE),
        ("accept_path_kernel", TREE),
        ("move_kernel", TREE),
        ("merge_kernel", TREE),
        ("next_tokens_kernel", TREE),
        ("sinks_kernel", ATTENTION),
        ("subtract_kernel", ATTENTION),
        ("multi_query_scores_kernel", ATTENTION),
        ("merge_kv_blocks_kernel", ATTENTION),
        ("path_kernel", ATTENTION),
        ("select_kernel", ATTENTION),
        ("filter_kernel", ATTENTION),
        ("rows_hopper_kernel", ATTENTION),
        ("merge_rows_kernel", ATTENTION),
        ("latent_merge_kernel", ATTENTION),
        ("activation_kernel", NORM),
        ("gated_norm_kernel", RECURRENT),
        ("chunk_scan_kernel", RECURRENT),
        ("kimi_scan_kernel", RECURRENT),
        ("quantised_experts_kernel", GEMM),
        ("few_down_kernel", GEMM),
        ("Memset (Device)", COPY),
        ("stop_kernel", OTHER),
    ],
)  # fmt: skip
def test_kernels_are_known_by_name(name: str, kind: str) -> None:
    """Keeps out: words inside template arguments taken for what the kernel does."""
    assert kind_of(short_name(name)) == kind


def test_every_kernel_of_specdec_has_a_kind() -> None:
    """Keeps out: a new kernel whose time is shown as "other", where nobody looks for it."""
    assert [name for name in CHAINS if kind_of(short_name(name)) == OTHER] == []


def words(text: str) -> list[str]:
    """The phases of the kernels named; `*` is any other."""
    return phases_of([f"{word}_kernel" if word != "*" else "linear_kernel" for word in text.split()])


def test_phases_are_told_by_the_kernels_that_begin_them() -> None:
    """Keeps out: a chain's draft taken for its verify, whose rows the same kernel makes; a plain step called a round."""
    tree = "first_level fork * expand fork * expand best_nodes path_tables * * accept move take_rows next_tokens * merge "
    draft, verify, accept, extend = ["draft"] * 7, ["verify"] * 3, ["accept, commit"] * 3, ["extend"] * 3
    assert words(tree * 2) == (draft + ["build"] + verify + accept + extend) * 2
    chain = "next_tokens * * next_tokens * accept next_tokens * "
    assert words("* " + chain * 2)[1:] == (["draft"] * 3 + ["verify"] * 2 + ["accept, commit"] + ["extend"] * 2) * 2
    two_groups = "next_tokens next_tokens * accept "
    assert words(two_groups * 2) == (["decode"] * 3 + ["accept, commit"]) * 2
    one_level = "next_tokens * accept next_tokens * "
    assert words(one_level * 2) == (["verify"] * 2 + ["accept, commit"] + ["extend"] * 2) * 2
    assert words("next_tokens * * accept " * 2) == (["decode"] * 3 + ["accept, commit"]) * 2
    assert words("* * *") == [""] * 3
    sources = "".join(
        path.read_text()
        for room in ("attention", "draft", "verify", "specdec/batch")
        for path in (ROOT / room).rglob("*_triton.py")
    )
    assert all(f"def {mark}(" in sources for mark in MARKS), "a kernel that begins a phase was renamed"


def test_only_rounds_of_the_full_batch_count(zoo: Zoo) -> None:
    """Keeps out: prefills and half-empty rounds in a median; a profile after which requests or timers still run."""
    decoder = zoo.decoder("llama", "eagle3", SPEC, max_batch_size=2)
    sampling = [SamplingParams(max_tokens=30), SamplingParams(max_tokens=20)]
    session = Session(decoder)
    work = Workload(session, PROMPTS, sampling, speculate=True)
    driver = Driver(decoder)

    def step() -> int:
        before = session.num_running
        session.step()
        return before

    found = full_rounds(work, step, rounds=40)
    assert [rows for rows, _ in found] == [2] * 40
    contexts = [context for _, context in found]
    assert min(contexts) > 4.5 and any(b < a for a, b in zip(contexts, contexts[1:])), "prompts were run anew"
    driver.assert_nothing_leaked()
    parts = phases_ms(work, rounds=6)
    assert list(parts) == ["draft", "verify", "extend", "rest"] and min(parts.values()) > 0
    assert not driver.times_phases


def test_a_profile_on_a_cpu(zoo: Zoo) -> None:
    """Keeps out: a profile that needs a GPU, and phases of plain decoding that are called a round's."""
    decoder = zoo.decoder("llama", "eagle3", SPEC, max_batch_size=2)
    sampling = [SamplingParams(max_tokens=40)] * 2
    plain, fast = (profile_work(Session(decoder), PROMPTS, sampling, speculate, 1e10, rounds=8) for speculate in (False, True))
    assert (plain.spec, fast.spec, fast.batch_size) == (None, (3, 2, 6), 2)
    assert list(plain.phases_ms) == ["decode", "rest"] and list(fast.phases_ms) == ["draft", "verify", "extend", "rest"]
    assert fast.kernels is None and fast.host_ms is None and len(fast.round_ms) == 8
    assert 4 < fast.context < 43 and fast.ms > 0
    text = shown(plain, fast)
    assert "round 3,2,6, batch 2" in text and "  extend" in text and "GPU" not in text
    data = json.loads(json.dumps(fast.as_json()))
    assert data["derived"]["times_limit"] == pytest.approx(fast.ms / fast.limit_ms)


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", ["round", "step", False])
def test_a_profile_on_a_gpu(zoo: Zoo, cuda_graphs: str | bool) -> None:
    """Keeps out: kernels inside graphs that the trace misses or can't name, a host that is always or never at work."""
    properties = torch.cuda.get_device_properties(0)
    most = 2e3 * properties.memory_clock_rate * properties.memory_bus_width / 8  # kHz, both edges of the clock; bits
    assert 0.5 * most < read_bandwidth(torch.device("cuda"), 1 << 30) < 1.02 * most
    settings = {"device": "cuda", "dtype": "bfloat16", "cuda_graphs": cuda_graphs}
    decoder = zoo.decoder("llama", "eagle3", SPEC, max_batch_size=2, **settings)
    got = profile_work(Session(decoder), PROMPTS, [SamplingParams(max_tokens=40)] * 2, True, 1e12, rounds=10)
    assert got.graphs == cuda_graphs and list(got.phases_ms) == ["draft", "verify", "extend", "rest"]
    assert got.kernels is not None and got.host_ms is not None and 0 < got.host_ms <= got.ms
    kinds = got.kernels.by_kind
    assert list(got.kernels.by_phase) == ["draft", "build", "verify", "accept, commit", "extend"]
    assert sum(got.kernels.by_phase.values()) == pytest.approx(sum(kinds.values()))
    assert {GEMM, ATTENTION, NORM, TREE} <= kinds.keys() and kinds.get(OTHER, 0) < 0.1 * sum(kinds.values())
    assert got.kernels.kernels > 4 * 8, got.kernels  # four layers, more than two products and an attention each
    assert got.kernels.span < 100 * got.ms  # both in ms; other processes on this GPU lengthen a traced round


def test_a_batch_that_does_not_fit_is_refused(zoo: Zoo) -> None:
    """Keeps out: an endless search for a full round, or a half batch under a whole one's name."""
    decoder = zoo.decoder("llama", "eagle3", SPEC, max_batch_size=2)
    session = Session(decoder)
    work = Workload(session, [*PROMPTS, [1]], [SamplingParams(max_tokens=30)] * 3, speculate=True)
    with pytest.raises(ValueError, match="needs all 3 sequences of the batch to run at once, got 2"):
        full_rounds(work, session.step)
    assert Driver(decoder).is_idle


def test_nothing_ends_a_profile_s_texts_early(zoo: Zoo) -> None:
    """Keeps out: a profile that looks for enough full rounds for ever, since each text stops after a few tokens."""
    sampling = [SamplingParams(max_tokens=30, stop_token_ids=list(range(40)))] * 2
    work = Workload(Session(zoo.decoder("llama", "eagle3", SPEC, max_batch_size=2)), PROMPTS, sampling, speculate=True)
    with work.running() as requests:
        assert not any(request.is_done for request in requests)


def test_rounds_that_surely_fit() -> None:
    """Keeps out: a trace that runs beyond the end of its requests."""
    assert rounds_in(1 + 4 * 6, SpecConfig(5, 1, 6)) == 1 and rounds_in(4 * 6, SpecConfig(5, 1, 6)) == 0
    assert rounds_in(64, None) == 60


@pytest.mark.parametrize("synthetic", [None, [0.9] * 5])
def test_a_budget_shows_every_part(synthetic: list[float] | None) -> None:
    """Keeps out: tables that wrap at 80 columns, shares of the wrong whole, forced numbers that look measured."""
    budget, plain = traced(), traced(spec=None, phases_ms={"decode": 5.0, "rest": 0.5})
    text = shown(plain, budget, synthetic=synthetic)
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, lines)) <= 80
    assert "Read bandwidth, measured here: 3.00 TB/s" in text
    found = (re.match(r"\s*(.*?)\s+((?:\d+\.\d+%?\s*)+)(?:SYNTHETIC)?$", line) for line in lines)
    rows = {match[1]: match[2].split() for match in found if match}
    assert rows["verify"] == ["6.00", "69.8%", "5.04", "1.19"]
    assert rows["as it runs (one graph a round)"] == ["8.00", "100.0%", "6.28", "1.27"]
    assert rows["idle"] == ["0.500", "6.2%"] and rows["GEMM"] == ["6.00", "75.0%", "6.23", "0.96"]
    after = text[text.index("round 5,1,6") :].split("Limit:")[0].splitlines()[2:]
    assert all(("SYNTHETIC" in line) == (synthetic is not None) for line in after if line.strip())
    assert ("SYNTHETIC: round 5,1,6" in text) == (synthetic is not None)
    assert "SYNTHETIC" not in text[: text.index("round 5,1,6") - 15], "plain decoding accepts nothing"
