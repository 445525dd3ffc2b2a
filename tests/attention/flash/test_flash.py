"""The adapters of the flash-attn packages, held against the definition; on a CPU through stand-ins, on a GPU the packages
that are installed.

Shapes: B sequences, T queries, H heads, K kv heads, D head dim.
"""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from toolkit.attention import fake_flash
from toolkit.attention.caches import Scattered
from toolkit.attention.segments import ragged_causal_segment
from toolkit.oracles.reference import ReferenceBackend
from toolkit.paths import ROOT
from torch import Tensor

from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.caches.quant_cache import QuantView, to_fp8
from specdec.attention.capabilities import TABLE, choose_backend, installed
from specdec.attention.capability import Feature
from specdec.attention.flash.adapters import ADAPTERS
from specdec.attention.flash.conventions import check_conventions
from specdec.attention.flash.queries import float8_queries
from specdec.attention.flash.rule import AttentionShape, is_faster
from specdec.attention.kinds import PLAIN, LayerKind, Scoring
from specdec.attention.needs import AttentionNeeds
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment, prefix_segment
from specdec.attention.segment import Segment

H, K, D, P = 4, 2, 16, 256
LENS = [300, 0, 3, 511]
REAL = [name for name in ADAPTERS if torch.cuda.is_available() and installed(TABLE[name].machine.package or "")]
DEVICE = "cuda" if REAL else "cpu"
DTYPE = torch.bfloat16 if REAL else torch.float16
BOUND = 2e-2 if REAL else 4e-3
NAMES = REAL or list(ADAPTERS)
HEAD_DIMS = {"fa2": 64, "fa3": 128, "fa4": 128} if REAL else dict.fromkeys(ADAPTERS, D)  # builds of fa2 lack the small ones


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    if not REAL:
        fake_flash.install(monkeypatch)


def world(page_size: int, lens: list[int], head_dim: int = D) -> tuple[Tensor, Tensor, MHAView]:
    """A scattered page table, lengths, and a cache that is NaN wherever no row may read, in the last page too."""
    pages = Scattered(lens, page_size, spare=1, seed=7, device=DEVICE)
    return pages.table_BW, pages.lens_B, MHAView(pages.fill(2, K, head_dim, dtype=DTYPE))


def queries(count: int, head_dim: int = D) -> Tensor:
    return torch.randn(count, H, head_dim, generator=torch.Generator().manual_seed(count)).to(DEVICE, DTYPE)


def segments(table: Tensor, lens: Tensor, page_size: int) -> dict[str, tuple[Segment, int]]:
    prompts = [300, 0, 3, 40]
    pages = PageTable(table, page_size)
    return {
        "prefix": (prefix_segment(pages, lens, 5), 20),
        "chain": (causal_segment(pages, lens, 5), 20),  # of three tokens too: its first queries see nothing
        "decode": (causal_segment(pages, lens, 1), 4),
        "prompts": (ragged_causal_segment(pages, prompts, LENS), sum(prompts)),
        "empty": (prefix_segment(pages, torch.zeros_like(lens), 2), 8),
    }


SCORINGS = {"plain": PLAIN, "softcap": Scoring(softcap=2.0), "scale": Scoring(scale=0.1)}


@pytest.mark.slow_cases(keep=15)
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("shape", ["prefix", "chain", "decode", "prompts", "empty"])
@pytest.mark.parametrize("name", NAMES)
def test_a_door_answers_the_segment(name: str, shape: str, scoring: str) -> None:
    """Keeps out: lse in another layout or log, +inf of an empty row in a merge, a call whose arguments changed places."""
    if "fa4" in REAL and scoring != "plain" and shape not in ("prefix", "chain"):
        pytest.skip("compiles for seconds, and another shape shows nothing new")
    page_size = P if name == "fa2" else 16
    head_dim = HEAD_DIMS[name]
    table, lens, view = world(page_size, LENS, head_dim)
    segment, count = segments(table, lens, page_size)[shape]
    q_THD = queries(count, head_dim)
    if REAL:  # stale shared memory where a tile is not full
        ADAPTERS[name](q_THD, MHAView(torch.full_like(view.kv, torch.nan)), segment, SCORINGS[scoring], {})
    got = ADAPTERS[name](q_THD, view, segment, SCORINGS[scoring], {})
    want = ReferenceBackend().run(q_THD.double(), MHAView(view.kv.double()), segment, SCORINGS[scoring])
    torch.testing.assert_close(got.out_THD.double(), want.out_THD, atol=BOUND, rtol=BOUND)
    torch.testing.assert_close(got.lse_TH.double(), want.lse_TH, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("page_size", [128, 256])
@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_not_read_past_its_last_token(name: str, page_size: int) -> None:
    """Keeps out: large pages that a library copies whole: 0 times what was never written there may be NaN."""
    if TABLE[name].pages.fault(page_size):
        pytest.skip("the capability table refuses such pages")
    table, lens, view = world(page_size, LENS, HEAD_DIMS[name])
    segment, count = segments(table, lens, page_size)["prompts"]
    q_THD = queries(count, HEAD_DIMS[name])
    got = ADAPTERS[name](q_THD, view, segment, PLAIN, {})
    want = ReferenceBackend().run(q_THD.double(), MHAView(view.kv.double()), segment)
    torch.testing.assert_close(got.out_THD.double(), want.out_THD, atol=BOUND, rtol=BOUND)


# ---- flash-attn 3 over an fp8 cache ----

needs_fa3 = pytest.mark.skipif("fa3" not in NAMES, reason="flash-attn-3 is not installed")


def fp8_world(page_size: int, head_dim: int) -> tuple[Tensor, Tensor, QuantView]:
    """As `world`, in fp8: every head has scales of its own, of keys and of values."""
    table, lens, view = world(page_size, LENS, head_dim)
    scale_2K = torch.tensor([[0.02, 0.05], [0.03, 0.0125]], device=DEVICE)
    stored = to_fp8(view.kv.nan_to_num(), scale_2K).view(torch.uint8)
    return table, lens, QuantView(stored.masked_fill_(view.kv.isnan(), 0x7F).view(torch.float8_e4m3fn), scale_2K=scale_2K)


def uneven_queries(count: int, head_dim: int) -> Tensor:
    """Queries of heads and rows that differ in size, so that a scale of another one shows."""
    sizes_T = torch.tensor([0.5, 1.0, 2.0, 4.0]).repeat_interleave(-(-count // 4))[:count].to(DEVICE, DTYPE)
    return (
        queries(count, head_dim)
        * sizes_T[:, None, None]
        * torch.tensor([1, 1, 0.25, 0.25], device=DEVICE, dtype=DTYPE)[:, None]
    )


@needs_fa3
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("page_size", [16, 256])
@pytest.mark.parametrize("shape", ["prefix", "chain", "decode", "prompts", "empty"])
def test_fa3_reads_an_fp8_cache(shape: str, page_size: int, scoring: str) -> None:
    """Keeps out: a descale in another layout, or of another row or head; an lse that forgets the factors."""
    table, lens, view = fp8_world(page_size, HEAD_DIMS["fa3"])
    segment, count = segments(table, lens, page_size)[shape]
    q_THD, K_ = uneven_queries(count, HEAD_DIMS["fa3"]), view.kv.shape[2]
    got = ADAPTERS["fa3"](q_THD, view, segment, SCORINGS[scoring], {})
    assert got.out_THD.dtype == DTYPE and got.lse_TH.dtype == torch.float32
    # The definition, over the dequantised values of the cache and of the rounded queries.
    rounded, scale_RK = float8_queries(q_THD, segment.cu_seqlens_q, segment.max_seqlen_q, K_)
    row_T = torch.repeat_interleave(segment.cu_seqlens_q.diff().long())
    q_THD64 = rounded.double() * scale_RK.double().repeat_interleave(H // K_, dim=1)[row_T][:, :, None]
    want = ReferenceBackend().run(q_THD64, view, segment, SCORINGS[scoring])
    torch.testing.assert_close(got.lse_TH.double(), want.lse_TH, atol=2e-2, rtol=4e-3)
    if shape == "empty":
        assert not got.out_THD.any()
        return
    error = float((got.out_THD.double() - want.out_THD).norm() / want.out_THD.norm())
    assert error < (5e-2 if REAL else 4e-3), f"{error:.4f}: a GPU rounds softmax weights to float8, a stand-in does not"
    assert not got.out_THD.isnan().any()


@needs_fa3
@pytest.mark.parametrize("shape", ["prefix", "chain", "decode", "prompts"])
def test_fa3_keeps_the_conventions_over_fp8(shape: str) -> None:
    table, lens, view = fp8_world(P, HEAD_DIMS["fa3"])
    check_conventions("fa3", queries(4, HEAD_DIMS["fa3"]), view, segments(table, lens, P)[shape][0])


@pytest.mark.skipif(bool(REAL), reason="of stand-ins")
@pytest.mark.parametrize("fault", ["no q", "k and v swapped", "one head's", "of one row"])
def test_a_library_that_misreads_descales_is_found_out(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a release that takes its factors in another layout, used until the text is wrong."""

    def other(*args: Any, q_descale: Tensor, k_descale: Tensor, v_descale: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
        if fault == "no q":
            q_descale = torch.ones_like(q_descale)
        elif fault == "k and v swapped":
            k_descale, v_descale = v_descale, k_descale
        elif fault == "one head's":
            k_descale = k_descale[:, :1].expand_as(k_descale)
        else:
            q_descale = q_descale[:1].expand_as(q_descale)
        return fake_flash.fa3_with_kvcache(*args, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, **kwargs)

    fake_flash.install(monkeypatch, fa3=other)
    table, lens, view = fp8_world(16, D)
    with pytest.raises(RuntimeError, match="fa3: the installed library .* attention='triton'"):
        check_conventions("fa3", queries(4), view, segments(table, lens, 16)["chain"][0])


@pytest.mark.parametrize(("name", "by_rule", "asks"), [("fa3", False, True), ("fa3", True, False), ("fa4", False, False)])
def test_who_reads_an_fp8_cache(name: str, by_rule: bool, asks: bool) -> None:
    """Keeps out: a library that is handed a cache that it can't read, or by a rule that nobody measured."""
    from specdec.attention.flash.backend import FlashBackend

    table, lens, view = fp8_world(P, D)
    segment, count = segments(table, lens, P)["prefix"]
    backend = FlashBackend(name, (lambda *_: True) if by_rule else None)
    assert (backend.partial_splits(queries(count), view, segment, PLAIN) == 0) == asks
    of_tokens = QuantView(view.kv.view(torch.int8), scales_N2K=torch.ones(len(view.kv), 2, K, device=DEVICE))
    assert backend.partial_splits(queries(count), of_tokens, segment, PLAIN) > 0


@pytest.mark.skipif(bool(REAL), reason="of stand-ins")
def test_fa2_is_asked_for_the_pages_it_can_read() -> None:
    """Keeps out: a stand-in that takes what the library refuses."""
    table, lens, view = world(16, LENS)
    with pytest.raises(RuntimeError, match="divisible by 256"):
        ADAPTERS["fa2"](queries(4), view, causal_segment(PageTable(table, 16), lens, 1), PLAIN, {})


@pytest.mark.parametrize("shape", ["prefix", "chain", "decode", "prompts"])
@pytest.mark.parametrize("name", NAMES)
def test_libraries_keep_the_conventions(name: str, shape: str) -> None:
    head_dim = HEAD_DIMS[name]
    table, lens, view = world(P, LENS, head_dim)
    check_conventions(name, queries(4, head_dim), view, segments(table, lens, P)[shape][0])


@pytest.mark.skipif(bool(REAL), reason="of stand-ins")
@pytest.mark.parametrize("fault", ["base 2", "+inf", "swapped"])
def test_a_library_that_breaks_its_word_is_found_out(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a release whose lse is base 2, or poisons a merge, used until the text is wrong."""

    def other(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        out, lse = fake_flash.fa4_varlen(*args, **kwargs)
        if fault == "+inf":
            return out, torch.where(lse == -torch.inf, torch.inf, lse)
        return (out, lse / 0.6931) if fault == "base 2" else (out, lse.flip(1))

    fake_flash.install(monkeypatch, fa4=other)
    table, lens, view = world(16, LENS)
    with pytest.raises(RuntimeError, match="fa4: the installed library .* attention='triton'"):
        check_conventions("fa4", queries(4), view, segments(table, lens, 16)["chain"][0])


LARGEST, CHAIN = AttentionShape(8, 8, 256, 8192), frozenset[Feature]()


@pytest.mark.parametrize(
    ("gpu", "asked", "change"),
    [
        ("H100", "fa4", dict()),
        ("H100", "triton", dict(largest=LARGEST._replace(rows=4))),
        ("H100", "triton", dict(largest=LARGEST._replace(seqlen_q_packgqa=128))),
        ("H100", "triton", dict(largest=LARGEST._replace(keys=1024))),
        ("H100", "triton", dict(features=CHAIN)),
        ("H100", "triton", dict(head_dims=(128, 64))),
        ("H100", "triton", dict(architecture=(8, 0))),
        ("H100", "triton", dict(page_size=128)),
        ("H100", "triton", dict(kv_cache_dtype="fp8")),
        ("H200", "fa3", dict()),
        ("H200", "fa3", dict(largest=LARGEST._replace(seqlen_q_packgqa=128))),
        ("H200", "fa3", dict(largest=LARGEST._replace(seqlen_q_packgqa=24))),  # for its prompts
        ("H200", "fa3", dict(features=CHAIN)),
        ("H200", "triton", dict(largest=LARGEST._replace(keys=1024))),
        ("H200", "triton", dict(largest=LARGEST._replace(keys=4080), features=CHAIN)),
        ("H200", "triton", dict(head_dims=(64,))),
        ("H200", "triton", dict(kv_cache_dtype="fp8")),
        ("", "triton", dict()),
    ],
)
def test_auto_takes_what_measured_faster(gpu: str, asked: str, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a library where our own kernel answers sooner, or on a GPU that nobody measured, and no reason given."""
    fake_flash.install(monkeypatch)
    needs = AttentionNeeds(
        torch.device("cuda"), torch.bfloat16, (9, 0), gpu, features=frozenset({Feature.TREES}), largest=LARGEST
    )
    choice = choose_backend("auto", replace(needs, **change))
    assert choice.name == asked and choice.reason and choice.by_rule == (asked != "triton")


@pytest.mark.parametrize(
    "cell", json.loads((ROOT / "benchmarks/layers/results/flash_grid_h200.json").read_text())["cells"], ids=str
)
def test_the_rule_of_an_h200_takes_what_was_measured_faster(cell: dict[str, Any]) -> None:
    """Keeps out: a threshold that is moved without a measurement, and a slower library in any cell that was measured."""
    kv_heads, group = 8, 4
    queries, keys = cell["N"], cell["L"]
    shape = AttentionShape(cell["B"], kv_heads, queries * group, keys)
    if cell["window"]:
        shape = shape._replace(keys=min(keys, cell["window"]), window=True)
    if cell["shared"]:
        shape = AttentionShape(1, kv_heads, cell["B"] * queries * group, cell["shared"], shared=True)
    taken = is_faster("fa3", "H200", shape)
    assert not taken or cell["fa3_us"] < cell["us"], "the rule takes the slower side"
    assert taken or cell["fa3_us"] > 0.89 * cell["us"], "the rule leaves more than 11 percent of a layer's attention"
    assert not is_faster("fa3", "H100", shape)


def test_the_rule_counts_a_prompts_own_keys() -> None:
    """Keeps out: a short prompt that counts for a long one because its page table has room."""
    from specdec.attention.flash.backend import FlashBackend

    seen: list[AttentionShape] = []
    table, lens, view = world(P, LENS)
    shapes = segments(torch.nn.functional.pad(table, (0, 4)), lens, P)
    prompts, count = shapes["prompts"]
    captured = replace(prompts, max_cached=None)
    backend = FlashBackend("fa3", lambda name, gpu, reads: bool(seen.append(reads)))
    for segment, queried in ((prompts, count), (captured, count), shapes["prefix"]):
        backend.partial_splits(queries(queried), view, segment, PLAIN)
    # The longest prompt has 300 queries, and another one 471 keys before its own queries.
    assert seen == [
        AttentionShape(4, K, 600, 771),
        AttentionShape(4, K, 600, 300),
        AttentionShape(4, K, 10, 1792),
    ]


class Asked(Exception):
    """Raised by a stand-in library when it is called."""


@pytest.mark.parametrize(
    ("name", "by_rule", "shape", "asks"),
    [
        ("fa4", False, "prefix", True),
        ("fa4", True, "prefix", False),
        ("fa4", True, "prompts", False),
        ("fa3", False, "decode", True),
        ("fa2", False, "chain", True),
        ("fa2", False, "small pages", False),
        ("fa3", False, "window", True),
        ("fa3", True, "window", False),
        ("fa2", False, "window", False),
        ("fa4", False, "window", False),
    ],
)
def test_who_reads_a_segment(name: str, by_rule: bool, shape: str, asks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a backend asked for by name that quietly never calls its library, or calls it for what it can't do."""
    from specdec.attention.flash.backend import FlashBackend

    def knock(*args: Any) -> None:
        raise Asked

    monkeypatch.setitem(ADAPTERS, name, knock)
    page_size = 16 if shape == "small pages" else P
    table, lens, view = world(page_size, LENS)
    shapes = segments(table, lens, page_size)
    segment, count = shapes.get(shape, shapes["chain"])
    if shape == "window":
        segment = segment.local(LayerKind(window=4), lens.long().repeat_interleave(5))
    backend, q_THD = FlashBackend(name, is_faster if by_rule else None), queries(count)
    assert (backend.partial_splits(q_THD, view, segment, PLAIN) == 0) == asks
    if asks:
        with pytest.raises(Asked):
            backend.run(q_THD, view, segment)
