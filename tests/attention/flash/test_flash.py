"""The adapters of the flash-attn packages, held against the definition; on a CPU through stand-ins, on an H100 fa4 itself.

Shapes: B sequences, T queries, H heads, K kv heads, D head dim.
"""

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from toolkit.attention import fake_flash
from toolkit.attention.caches import Scattered
from toolkit.attention.segments import ragged_causal_segment
from toolkit.oracles.reference import ReferenceBackend
from torch import Tensor

from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.capabilities import TABLE, choose_backend, installed
from specdec.attention.flash.adapters import ADAPTERS, check_conventions
from specdec.attention.kinds import PLAIN, LayerKind, Scoring
from specdec.attention.needs import AttentionNeeds
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment, prefix_segment
from specdec.attention.segment import Segment

H, K, D, P = 4, 2, 16, 256
LENS = [300, 0, 3, 511]
REAL = [name for name in ADAPTERS if torch.cuda.is_available() and installed(TABLE[name].package or "")]
DEVICE = "cuda" if REAL else "cpu"
DTYPE = torch.bfloat16 if REAL else torch.float16
BOUND = 2e-2 if REAL else 4e-3
NAMES = REAL or list(ADAPTERS)


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
    head_dim = 128 if REAL else D
    table, lens, view = world(page_size, LENS, head_dim)
    segment, count = segments(table, lens, page_size)[shape]
    q_THD = queries(count, head_dim)
    if REAL:  # stale shared memory where a tile is not full
        ADAPTERS[name](q_THD, MHAView(torch.full_like(view.kv, torch.nan)), segment, SCORINGS[scoring])
    got = ADAPTERS[name](q_THD, view, segment, SCORINGS[scoring])
    want = ReferenceBackend().run(q_THD.double(), MHAView(view.kv.double()), segment, SCORINGS[scoring])
    torch.testing.assert_close(got.out_THD.double(), want.out_THD, atol=BOUND, rtol=BOUND)
    torch.testing.assert_close(got.lse_TH.double(), want.lse_TH, atol=4e-3, rtol=4e-3)


@pytest.mark.skipif(bool(REAL), reason="of stand-ins")
def test_fa2_is_asked_for_the_pages_it_can_read() -> None:
    """Keeps out: a stand-in that takes what the library refuses."""
    table, lens, view = world(16, LENS)
    with pytest.raises(RuntimeError, match="divisible by 256"):
        ADAPTERS["fa2"](queries(4), view, causal_segment(PageTable(table, 16), lens, 1), PLAIN)


@pytest.mark.parametrize("name", NAMES)
def test_adapters_answer_full_layers_only(name: str) -> None:
    """Keeps out: a window handed to a library that would shift it from query to query."""
    table, lens, view = world(P, LENS)
    local = causal_segment(PageTable(table, P), lens, 1).local(LayerKind(window=4), lens.long() - 1)
    with pytest.raises(AssertionError, match="our kernel reads such segments"):
        ADAPTERS[name](queries(4), view, local, PLAIN)


@pytest.mark.parametrize("shape", ["prefix", "chain", "decode", "prompts"])
@pytest.mark.parametrize("name", NAMES)
def test_libraries_keep_the_conventions(name: str, shape: str) -> None:
    head_dim = 128 if REAL else D
    table, lens, view = world(P, LENS, head_dim)
    check_conventions(name, queries(4, head_dim), view, segments(table, lens, P)[shape][0])


@pytest.mark.skipif(bool(REAL), reason="of stand-ins")
@pytest.mark.parametrize("fault", ["base 2", "+inf", "swapped"])
def test_a_library_that_breaks_its_word_is_found_out(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a release whose lse is base 2, or poisons a merge, used until the text is wrong."""
    module = sys.modules["flash_attn.cute.interface"]
    honest = module.flash_attn_varlen_func

    def other(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        out, lse = honest(*args, **kwargs)
        if fault == "+inf":
            return out, torch.where(lse == -torch.inf, torch.inf, lse)
        return (out, lse / 0.6931) if fault == "base 2" else (out, lse.flip(1))

    monkeypatch.setattr(module, "flash_attn_varlen_func", other)
    table, lens, view = world(16, LENS)
    with pytest.raises(RuntimeError, match="fa4: the installed library .* attention='triton'"):
        check_conventions("fa4", queries(4), view, segments(table, lens, 16)["chain"][0])


@pytest.mark.parametrize(
    ("gpu", "asked", "change"),
    [
        ("H100", "fa4", dict()),
        ("H100", "triton", dict(rows=4)),
        ("H100", "triton", dict(packed=128)),
        ("H100", "triton", dict(tokens=1024)),
        ("H100", "triton", dict(tree=False)),
        ("H100", "triton", dict(head_dims=(128, 64))),
        ("H100", "triton", dict(architecture=(8, 0))),
        ("H100", "triton", dict(page_size=128)),
        ("H100", "triton", dict(kv_cache_dtype="fp8")),
        ("H200", "fa3", dict()),
        ("H200", "fa3", dict(packed=128)),
        ("H200", "triton", dict(packed=124)),
        ("H200", "triton", dict(tokens=1024)),
        ("H200", "triton", dict(tree=False)),
        ("H200", "triton", dict(head_dims=(64,))),
        ("", "triton", dict()),
    ],
)
def test_auto_takes_what_measured_faster(gpu: str, asked: str, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a library where our own kernel answers sooner, or on a GPU that nobody measured, and no reason given."""
    fake_flash.install(monkeypatch)
    needs = AttentionNeeds(
        torch.device("cuda"), torch.bfloat16, (9, 0), gpu, head_dims=(128,), rows=8, tokens=8192, kv_heads=8, packed=256
    )
    choice = choose_backend("auto", replace(needs, **change))
    assert choice.name == asked and choice.reason and choice.by_rule == (asked != "triton")


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
    backend, q_THD = FlashBackend(name, by_rule), queries(count)
    monkeypatch.setattr(backend, "_check_once", lambda *args: None)
    assert (backend.partial_splits(q_THD, view, segment, PLAIN) == 0) == asks
    if asks:
        with pytest.raises(Asked):
            backend.run(q_THD, view, segment)
