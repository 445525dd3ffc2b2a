"""Products may leave their terms to whoever reads them (ops/products/terms.py), which only Hopper GPUs do.  Here every product
that may does, on a CPU: targets of all families, heads of all kinds, ordinary weights and codes.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit.parallel.many import FAMILIES, FEATURES, IDS, SAMPLINGS, Pair
from torch import Tensor

from specdec import SpecConfig, SpecDecoder
from specdec.models import linear as products
from specdec.ops.products.terms import Terms

QUANTISED = [(each.pair, each.options) for each in FEATURES if "quantize" in each.options and len(each.options) == 1]
DRAFTED = {each.pair.name: each.pair for each in FEATURES if each.name.startswith(("MTP", "one pass"))}
PAIRS = [*((pair, {}) for pair in (*FAMILIES, *DRAFTED.values())), *QUANTISED]


@pytest.mark.parametrize(("pair", "options"), PAIRS, ids=lambda each: each.name if isinstance(each, Pair) else "".join(each))
def test_whoever_reads_a_product_takes_terms(
    pair: Pair, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keeps out: a family, a head or a layer's end that takes terms for the product, which only a GPU would show."""
    left = []

    def leave(y: Tensor) -> Terms:
        left.append(y.shape)
        return Terms(torch.stack((y.float(), torch.zeros_like(y, dtype=torch.float32))), y.dtype)

    spec = SpecConfig(num_steps=3, topk=3, num_draft_tokens=8)
    with SpecDecoder.from_pretrained(
        *pair.make(tmp_path), spec, device="cpu", max_seq_len=80, smoke=False, **options
    ) as decoder:
        expected = [out.token_ids for out in decoder.generate(IDS, SAMPLINGS)]
        plain, of_codes = products.linear, products.quantised_linear
        monkeypatch.setattr(products, "linear_terms", lambda *given: leave(plain(*given)))
        monkeypatch.setattr(products, "quantised_linear_terms", lambda *given: leave(of_codes(*given)))
        assert [out.token_ids for out in decoder.generate(IDS, SAMPLINGS)] == expected and left
