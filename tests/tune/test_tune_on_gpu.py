"""`specdec tune` on a GPU: what it keeps is what products then take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdec.loading.about.doctor import tiles_line
from specdec.ops.products import dense as products
from specdec.ops.products.dense import gated_linear, linear
from specdec.ops.products.tuned.here import tuned_table
from specdec.ops.products.tuned.table import Product, path_for
from specdec.tune.run import TunedRow, tune

pytestmark = pytest.mark.gpu


def test_products_take_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a table that is written and not read, wrong sums by tiles that won, and a doctor that says nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    device, seen = torch.device("cuda", torch.cuda.current_device()), list[TunedRow]()
    qkv, pair = Product(3072, 2048, False, torch.bfloat16), Product(8192, 2048, True, torch.bfloat16)
    tuned_table.cache_clear()
    try:
        table = tune([qkv, pair], (1, 16), "a test", device, lambda row, done, of: seen.append(row))
        assert len(seen) == 4 and all(row.after > 0 and row.tried > 5 for row in seen)
        assert path_for(torch.cuda.get_device_name(device)).is_file() and tuned_table(device) == table
        assert "specdec tune measured here" in tiles_line(device) and "a test" in tiles_line(device)
        taken = []
        launch = products._launch
        monkeypatch.setattr(products, "_launch", lambda *given: (taken.append(given[-1]), launch(*given))[1])
        for M in (1, 9, 16):
            for product, multiply in ((qkv, linear), (pair, gated_linear)):
                x_MK = torch.randn(M, product.K, device=device, dtype=torch.bfloat16)
                weight_NK = torch.randn(product.N, product.K, device=device, dtype=torch.bfloat16) * product.K**-0.5
                exact_MN = x_MK.double() @ weight_NK.double().T
                if product.gated:
                    gate, up = exact_MN.chunk(2, -1)
                    exact_MN = torch.nn.functional.silu(gate) * up
                taken.clear()
                with torch.inference_mode():
                    got_MN = multiply(x_MK, weight_NK)
                assert taken == [tiles for tiles in [table.find(M, product)[1]] if tiles is not None]
                assert (got_MN.double() - exact_MN).norm() < 6e-3 * exact_MN.norm()
    finally:
        tuned_table.cache_clear()
