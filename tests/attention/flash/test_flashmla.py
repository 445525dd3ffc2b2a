"""The backend `flashmla`, held against the definition: on a CPU through a stand-in, on a Hopper GPU through the library itself.

On a GPU every slot that nobody may read holds NaN, or only bits of NaN.

Shapes: T queries, H heads, C latent rank, R rotated dim, L = C + R, I slots of a row.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit.attention import fake_flash, fake_flashmla, flashmla
from toolkit.attention.caches import Scattered
from toolkit.attention.segments import ragged_causal_segment
from toolkit.deepseek import DeepseekZoo, save_deepseek
from toolkit.driver import Driver
from toolkit.inside.captures import capturing
from toolkit.kernels import HAS_GPU
from toolkit.models import ragged_prompts
from toolkit.oracles.reference import ReferenceBackend
from torch import Tensor

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.attention.caches.fp8_latent import Fp8LatentView, quantise_latents
from specdec.attention.caches.latent_view import LatentView
from specdec.attention.caches.mla_cache import MLAView
from specdec.attention.flashmla import adapters
from specdec.attention.flashmla.backend import FlashMLABackend
from specdec.attention.kinds import LayerKind, Scoring
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment, prefix_segment
from specdec.attention.segment import AttentionPlan, Segment
from specdec.attention.state import AttentionState
from specdec.lossless.near_tie import explain_divergence
from specdec.session import Session

REAL = HAS_GPU and torch.cuda.get_device_capability()[0] == 9 and flashmla.library() is not None
DEVICE = "cuda" if REAL else "cpu"
C, R, P = 512, 64, 64
SCORING = Scoring(scale=0.05)
LENS = [300, 0, 3, 129]
BOUND = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
pytestmark = pytest.mark.skipif(HAS_GPU and not REAL, reason="needs flash_mla, or vLLM's _flashmla_C, and a Hopper GPU")


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    if not REAL:
        fake_flash.install(monkeypatch)
    else:  # vLLM's operators come without a package's metadata
        monkeypatch.syspath_prepend(fake_flash.metadata_of(frozenset({("flash_mla", "1.0.0")})))


def paged(dtype: torch.dtype, page_size: int = P) -> tuple[PageTable, Tensor, MLAView]:
    pages = Scattered(LENS, page_size, spare=1, idle_is_dummy=True, seed=7, device=DEVICE)
    latent = pages.fill(C + R, dtype=dtype)
    return PageTable(pages.table_BW, page_size), pages.lens_B, MLAView(latent if REAL else latent.nan_to_num(), C)


def queries(T: int, H: int = 4, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(T, H, C + R, generator=torch.Generator().manual_seed(T)).to(DEVICE, dtype)


def check(got: AttentionState, q_THL: Tensor, view: LatentView, segment: Segment) -> None:
    want = ReferenceBackend().run(q_THL.double(), view, segment, SCORING)
    bound = BOUND[q_THL.dtype]
    assert (got.out_THD.double() - want.out_THD).norm() <= bound * want.out_THD.norm()
    torch.testing.assert_close(got.lse_TH.double(), want.lse_TH.double(), atol=4 * bound, rtol=bound)
    empty_TH = want.lse_TH == -torch.inf
    assert torch.equal(got.lse_TH == -torch.inf, empty_TH) and not got.out_THD[empty_TH].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("shape", "n"), [("causal", 1), ("causal", 6), ("prefix", 6), ("prefix", 1)])
def test_pages(shape: str, n: int, dtype: torch.dtype) -> None:
    """Keeps out: lse in another layout or log, +inf of an empty row in a merge, a mask aligned at the first keys."""
    pages, lens, view = paged(dtype)
    segment = (causal_segment if shape == "causal" else prefix_segment)(pages, lens, n)
    q_THL = queries(len(LENS) * n, dtype=dtype)
    backend = FlashMLABackend()
    assert adapters.reads_pages(q_THL, view, segment)
    check(backend.run(q_THL, view, segment, SCORING), q_THL, view, segment)


def rows(counts: list[int], width: int, eight_bits: bool) -> tuple[Segment, LatentView]:
    """Rows of random slots; what lies in a row after its last key names slot 0, which nobody may read."""
    counts_T = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    read = torch.arange(width, device=DEVICE) < counts_T[:, None]
    slots = 1 + torch.randperm(20 * width, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    slots_TI = torch.where(read, slots[torch.randint(len(slots), read.shape).to(DEVICE)], 0).int()
    used = slots_TI[read].long()
    latent = torch.full((20 * width + 1, C + R), torch.nan if REAL else 0.0, dtype=torch.bfloat16, device=DEVICE)
    latent[used] = torch.randn(len(used), C + R, device=DEVICE).bfloat16()
    if not eight_bits:
        return Segment.of_slots(slots_TI, counts_T), MLAView(latent, C)
    rows_XB = torch.where(latent.isnan().any(1, keepdim=True), 0xFF, quantise_latents(latent.nan_to_num(), C))
    return Segment.of_slots(slots_TI, counts_T), Fp8LatentView(rows_XB, C)


@pytest.mark.parametrize("eight_bits", [False, True], ids=["16 bits", "8 bits"])
def test_rows_of_slots(eight_bits: bool) -> None:
    """Keeps out: slots read past a row's count, rows without keys that are not empty, few rows given to the wrong kernel."""
    segment, view = rows([128, 0, 1, 64, 65, 127, 2], 128, eight_bits)
    q_THL = queries(7, 64)
    assert adapters.reads_rows(q_THL, view, segment) == eight_bits, "few rows in 16 bits are our kernel's"
    backend = FlashMLABackend(min_rows=1)
    for _ in range(2):  # the second call uses the first one's schedule
        check(backend.run(q_THL, view, segment, SCORING), q_THL, view, segment)


def other_plans(pages: PageTable, lens: Tensor) -> dict[str, AttentionPlan]:
    """Plans that are left to our kernels."""
    chain, positions_T = causal_segment(pages, lens, 3), lens.long().repeat_interleave(3)
    return {
        "small pages": AttentionPlan((causal_segment(PageTable(pages.table, 16), lens, 3),)),
        "window": AttentionPlan((chain.local(LayerKind(window=4), positions_T),)),
        "ragged": AttentionPlan((ragged_causal_segment(pages, [6, 0, 3, 3], LENS),)),
        "shared": AttentionPlan((prefix_segment(pages, lens, 3), chain)),
        "slots": AttentionPlan((Segment.of_slots(torch.zeros(12, 8, dtype=torch.int32, device=DEVICE), lens.repeat(3)),)),
    }


@pytest.mark.parametrize("case", ["small pages", "window", "ragged", "shared", "slots", "chain", "8 bits", "heads"])
def test_who_reads_a_plan(case: str) -> None:
    """Keeps out: a backend asked for by name that never calls its library, or calls it for what it can't read."""
    pages, lens, view = paged(torch.bfloat16)
    plan = other_plans(pages, lens).get(case, AttentionPlan((causal_segment(pages, lens, 3),)))
    eight_bits = Fp8LatentView(torch.zeros(64, 656, dtype=torch.uint8, device=DEVICE), C)
    backend, q_THL = FlashMLABackend(), queries(12)
    if case == "heads":  # rows of a number of heads of which the library has no kernel
        plan, q_THL = AttentionPlan((rows([128] * 40, 128, False)[0],)), queries(40, 16)
    assert backend.reads(q_THL, eight_bits if case == "8 bits" else view, plan.segments) == (case == "chain")


def test_layers_share_a_schedule() -> None:
    """Keeps out: work divided anew in every layer, and a pass whose lengths changed that uses the last pass's division."""
    made: list[Any] = []
    pages, lens, view = paged(torch.bfloat16)
    backend, q_THL = FlashMLABackend(), queries(len(LENS))
    for shorter in (0, 1):
        segment = causal_segment(pages, (lens - shorter).clamp(min=0), 1)
        prepared, of_layers = backend.prepare(AttentionPlan((segment,))), list[Any]()
        for _ in range(3):
            check(backend.attend(q_THL, view, prepared, SCORING), q_THL, view, segment)
            of_layers += prepared.schedules.values()
        assert len(of_layers) == 3 and all(each is of_layers[0] for each in of_layers)
        assert not any(of_layers[0] is each for each in made)
        made.append(of_layers[0])


@pytest.mark.skipif(REAL, reason="of stand-ins")
@pytest.mark.parametrize("kind", ["pages", "rows", "8 bits"])
@pytest.mark.parametrize("fault", ["base 2", "not empty"])
def test_a_library_that_breaks_its_word_is_found_out(fault: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a release whose lse is base 2, or poisons a merge, used until the text is wrong."""
    pages, lens, view = paged(torch.bfloat16)
    segment = causal_segment(pages, lens, 1)
    if kind != "pages":
        segment, view = rows([5, 0, 128], 128, kind == "8 bits")
    q_THL = queries(segment.rows, 64)
    adapters.check_conventions(q_THL, view, segment)

    def wrong(lse: Tensor) -> Tensor:
        return lse / 0.6931 if fault == "base 2" else torch.where(lse == torch.inf, 0.0, lse)

    fake_flash.install(monkeypatch, flash_mla=fake_flashmla.module(wrong))
    with pytest.raises(RuntimeError, match="flashmla: the installed library .* attention='triton'"):
        FlashMLABackend(min_rows=1).run(q_THL, view, segment, SCORING)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["tree", "8 bits"])
def test_a_captured_pass_follows_the_lengths(kind: str) -> None:
    """Keeps out: a division of work, or a count of keys, that a graph froze."""
    pages, lens, view = paged(torch.bfloat16)
    suffix = None
    if kind == "tree":
        segment = prefix_segment(pages, lens, 5)
        slots = PageTable(pages.table[:1].expand(20, -1), P).slots_at(torch.arange(4, device=DEVICE).expand(20, 4)).int()
        suffix = Segment.of_slots(slots, torch.tensor([1, 2, 3, 4, 2] * 4, dtype=torch.int32, device=DEVICE))
    else:
        segment, view = rows([128, 0, 1, 64, 65, 127, 2], 128, True)
    T = segment.rows * segment.max_seqlen_q
    q_THL, backend, counts = queries(T, 64), FlashMLABackend(), segment.cache_seqlens
    plan = AttentionPlan((segment,), suffix=suffix)

    def run() -> AttentionState:
        return backend.attend(q_THL, view, backend.prepare(plan), SCORING)

    run()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        captured = run()
    full = counts.clone()
    for lengths in (full, (full - 1).clamp(min=0), full // 2, torch.zeros_like(full), full):
        counts.copy_(lengths)
        captured.out_THD.fill_(torch.nan)
        graph.replay()
        oracle = ReferenceBackend()
        want = oracle.attend(q_THL.double(), view, oracle.prepare(plan), SCORING)
        assert (captured.out_THD.double() - want.out_THD).norm() <= 1e-2 * want.out_THD.norm()
        torch.testing.assert_close(captured.lse_TH.double(), want.lse_TH.double(), atol=4e-2, rtol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["round", False])
def test_the_whole_runtime(graphs: Any, tmp_path: Path) -> None:
    """Keeps out: a library that asks the device in a capture; a backend that is never asked; text beyond near-ties."""
    name, zoo, sampling = "v3-wide-latents", DeepseekZoo(tmp_path), SamplingParams(max_tokens=24)
    target = save_deepseek(tmp_path / name, name, kv_lora_rank=C, qk_rope_head_dim=R)
    settings: dict[str, Any] = dict(device="cuda", dtype="bfloat16", max_seq_len=192, page_size=P, spec=SpecConfig(3, 4, 12))
    ours = SpecDecoder.from_pretrained(target, zoo.head(name, "eagle3"), **settings, attention="triton")
    theirs = SpecDecoder.from_pretrained(
        target, zoo.head(name, "eagle3"), **settings, attention="flashmla", cuda_graphs=graphs
    )  # fmt: skip
    prompts = [[prompt[i % len(prompt)] for i in range(80)] for prompt in ragged_prompts(40, 4, seed=7)]
    plain = ours.generate(prompts, sampling, speculate=False)
    for fast in (theirs.generate(prompts, sampling), theirs.generate(prompts, sampling, speculate=False)):
        for number, (a, b) in enumerate(zip(plain, fast, strict=True)):
            found = explain_divergence(Session(ours), number, a.prompt_token_ids, a.token_ids, b.token_ids, sampling)
            assert found is None or found.verdict == "near-tie", found
    assert Driver(theirs).backend.checked
