"""`python benchmarks products.counters`: Nsight Compute's table is read right, and each kernel has its product."""

import sys
from importlib import import_module
from pathlib import Path

import pytest
from toolkit.paths import ROOT

TIME, MEMORY = "gpu__time_duration.sum", "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed"
PIPE = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
WAITS = [
    f"smsp__average_warps_issue_stalled_{cause}_per_issue_active.ratio" for cause in ("barrier", "wait", "lg_throttle", "math")
]
FILL = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, ...>"
TABLE = [
    ["ID", "Kernel Name", TIME, MEMORY, PIPE, *WAITS], ["", "", "ns", "%", "%", "inst", "inst", "inst", "inst"],
    ["0", FILL, "1,100", "0", "0", "9", "9", "9", "9"], ["1", "first_kernel", "1,012,500", "81.2", "7", "1", "2.256", "0", "4"],
    ["2", FILL, "1,100", "0", "0", "9", "9", "9", "9"], ["3", "product_kernel", "20,000", "60", "30", "4", "1", "2", "3"],
    ["4", "sum_of_splits_kernel", "3,000", "50", "", "1", "1", "1", ""],
]  # fmt: skip


def test_kernels_belong_to_the_product_before_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: units taken for a kernel, a thousand read as one, the sum of splits counted for the next product."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    before = set(sys.modules)
    counters = import_module("products.counters")
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "products":
            del sys.modules[name]  # which other rooms of the same name would find
    table = tmp_path / "raw.csv"
    lines = [",".join(f'"{cell}"' for cell in line) for line in TABLE]
    table.write_text("\n".join(["==PROF== Connected to process 7", *lines]) + "\n")
    first, product, splits = counters.by_product(counters.kernels(table), list(counters.labels([1], [])))
    assert [first["product"], product["product"], splits["product"]] == ["qkv", "o", "o"]
    assert (first["microseconds"], first["memory"], first["tensor cores"]) == (1012.5, 81.2, 7.0)
    assert list(first["waits"].items()) == [("math", 4.0), ("wait", 2.26), ("barrier", 1.0)]
    assert product["tensor cores"] == 30.0 and first["registers"] is None
