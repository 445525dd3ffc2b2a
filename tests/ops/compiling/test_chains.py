"""The table of chained launches says what the kernels' source does."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from toolkit.ahead.chained import Found, Module, kernels
from toolkit.paths import ROOT

from specdec.ops.compiling.chains import CHAINS

PAGED = ROOT / "attention/kernels/paged_hopper.py"
WARPGROUP, WARP = (ROOT / f"specdec/ops/products/kernels/quantised/{name}_hopper.py" for name in ("warpgroup", "warp"))
WORDS = "max_outliers outlier_columns outliers scales zero_points"
NEVER_WRITTEN = {  # by kernels: arguments that may be read through L1 before a wait
    "add_rms_norm": "weight inner",
    "all_to_all_states": "table",  # addresses of the ranks' memory, also in the next three
    "flat": "table",
    "few_rows": "table weight",
    "many_rows": "table weight",
    "chain_step": "w2",
    "chunk_convolution": "bias weight",
    "convolve_add_norm": "weight",
    "corrected_logits": "w2",
    "gated_norm": "weight",
    "fill_pairs": "mask",  # a row of the drafter's weights
    "few_down_hopper": "correction qweight router_bias",
    "few_gate_up_hopper": "correction router_bias",
    "kimi_rule_hopper": "A_log dt_bias",
    "held_rows": "bias weight",
    "norm_router": "bias correction norm weight",
    "one_row": "bias weight",
    "quantised_warp": WORDS,
    "quantised_warpgroup": WORDS,
    "router": "bias correction weight",
    "router_one": "bias correction weight",
    "rope_store": "table",  # rotations, also in the next three
    "single_query_attention": "norm table",
    "ssd_step": "bias weight",
    "ssd_tree_hopper": "A_log D dt_bias",
    "store_index": "table",
    "store_latent": "table",
    "scan": "offsets",  # from a drafter's token ids to the target's
    "sinks": "sinks",
    "subtract": "factor norm",
    "suffix_merge": "scales sinks slopes",  # scales of fp8 heads; those of int8 tokens come from L2
    "take_columns": "order",
    "tree_convolution": "bias weight",
    "tree_rule_hopper": "A_log dt_bias",
}


@pytest.fixture(scope="module")
def source() -> Iterator[dict[str, Found]]:
    yield kernels()


def test_every_kernel_stands_in_the_table(source: dict[str, Found]) -> None:
    """Keeps out: a kernel whose neighbours nobody has thought of."""
    assert set(source) == set(CHAINS) and len(CHAINS) > 70


def test_kernels_trigger_when_the_table_says(source: dict[str, Found]) -> None:
    """Keeps out: a trigger that moves across a wait, and with it what the kernel behind may read: a race."""
    for name, found in source.items():
        when = "unchained" if not found.waits else "early" if found.early else "late" if found.triggers else "never"
        assert when == CHAINS[name].trigger, name


def test_every_branch_of_a_chained_kernel_waits(source: dict[str, Found]) -> None:
    """Keeps out: a program that ends without having waited, after which the next kernel takes all in front for complete."""
    assert {name for name, found in source.items() if found.waits and not found.always} == set()


def test_kernels_read_before_their_wait_what_the_table_says(source: dict[str, Found]) -> None:
    """Keeps out: one more load before a wait, of what the kernel in front may still be writing."""
    for name, found in source.items():
        assert not found.waits or found.reads == CHAINS[name].reads, name


def test_what_kernels_write_is_read_from_l2_before_a_wait(source: dict[str, Found]) -> None:
    """Keeps out: a plain load before a wait, which may find in L1 what stood there before the kernel in front wrote."""
    by_l1 = {name.removesuffix("_kernel"): found.by_l1 for name, found in source.items() if found.waits and found.by_l1}
    assert by_l1 == {name: set(arguments.split()) for name, arguments in NEVER_WRITTEN.items()}


def test_nothing_is_written_before_a_wait(source: dict[str, Found]) -> None:
    """Keeps out: a store into memory that the kernel in front may still be reading."""
    assert {name for name, found in source.items() if found.waits and found.stores} == set()


PLANTED = [
    # A kernel's file; a line of one of its partitions, and what is planted in front of it; what is found then, in which field.
    (PAGED, "    blocks = gl.cdiv(", "    gl.store(lse + split, 0.0)\n", "stores", "lse"),  # lse: in a tuple of arguments
    (PAGED, "    mbarrier.wait(full.index(STAGES), 0", "    gl.store(lse + split, 0.0)\n", "stores", None),  # after the wait
    (PAGED, "    blocks = gl.cdiv(", "    total_M = total_M + gl.load(lse + split)\n", "reads", "lse"),
    (PAGED, '    if FRESH != "all":', "    tma_load(q_tiles, [0, 0, 0], full.index(0), q_smem.index(0))\n", "reads", "q_tiles"),
    (WARPGROUP, "    stage = FIRST_STEP\n", "    gl.store(y + tile, 0.0)\n", "stores", "y"),
    (WARPGROUP, "    stage = FIRST_STEP\n", "    gl.atomic_add(arrivals + tile, 1)\n", "stores", "arrivals"),
    (WARPGROUP, "    stage = FIRST_STEP\n", "    base += gl.load(bias + tile)\n", "reads", "bias"),
    (WARPGROUP, "    if FIRST_STEP > 0:\n", "    gl.store(y + tile, 0.0)\n", "stores", None),
    # The consumers wait for columns of x.  If the producer loads some before its wait, they no longer wait for the kernel.
    (
        WARPGROUP, "    if PDL:\n        gdc_wait()\n        gdc_launch_dependents()\n",
        "    _load_x(x_tiles, more_tiles, x_pieces, full_x, first_m, low * BLOCK_K, 0, BLOCK_M, MORE_M, BLOCK_K)\n",
        "stores", "y",
    ),
    (WARP, "    for step in range(steps):\n", "    phase = 1\n", "stores", "y"),  # such a wait is none
]  # fmt: skip


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(("path", "line", "planted", "field", "found"), PLANTED)
def test_planted_accesses_of_partitions_are_found(
    path: Path, line: str, planted: str, field: str, found: str | None, tmp_path: Path
) -> None:
    """Keeps out: a walk that passes over warps of their own, or over what they are handed in tuples."""
    text = path.read_text()
    at = text.rindex(line)
    copy = tmp_path / path.name
    copy.write_text(text[:at] + planted + text[at:])
    (name, clean), (_, broken) = (next(iter(Module(each).kernels().items())) for each in (path, copy))
    expected = {found} if found else set()
    assert expected <= getattr(broken, field) - getattr(clean, field), name
    assert found is not None or getattr(broken, field) == getattr(clean, field)
    assert found not in CHAINS[name].reads
