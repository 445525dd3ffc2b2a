"""Products may leave split-K partials to their caller (ops/products/partials.py), which only Hopper GPUs do.  Here every
product that may does, on a CPU: targets of all families, heads of all kinds, dense weights and quantised ones.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from toolkit.parallel.many import FAMILIES, FEATURES, IDS, SAMPLINGS, Pair
from torch import Tensor

from specdec import SpecConfig, SpecDecoder
from specdec.models.linear import Linear
from specdec.ops.products.numerics import Numerics
from specdec.ops.products.partials import Partials, added_up
from specdec.ops.products.weight import Weight

QUANTISED = [(each.pair, each.options) for each in FEATURES if "quantize" in each.options and len(each.options) == 1]
DRAFTED = {each.pair.name: each.pair for each in FEATURES if each.name.startswith(("MTP", "one pass"))}
# One of those whose products are the same modules': each kind of attention, of mixture and of a drafter
ALIKE = {
    "llama3-tied-dim8",
    "mistral",
    "v2-lite",
    "v2",
    "v32",
    "glm",
    "glm4-lite",
    "qwen3-moe",
    "mixtral-window",
    "hy3-biased",
    "dots1",
}
PAIRS = [*((pair, {}) for pair in (*FAMILIES, *DRAFTED.values()) if pair.name not in ALIKE), *QUANTISED]


@pytest.mark.slow_cases(keep=3)
@pytest.mark.parametrize(("pair", "options"), PAIRS, ids=lambda each: each.name if isinstance(each, Pair) else "".join(each))
def test_whoever_reads_a_product_takes_partials(
    pair: Pair, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keeps out: a family, a head or a layer's end that takes partials for the product, which only a GPU would show."""
    left = []

    class Leaves(NamedTuple):
        """A weight whose products are left as partials wherever they may be."""

        plain: Weight

        def matmul(self, x: Tensor, bias: Tensor | None, numerics: Numerics, *, partials: bool = False) -> Tensor | Partials:
            y = added_up(self.plain.matmul(x, bias, numerics))
            if not partials:
                return y
            left.append(y.shape)
            return Partials(torch.stack((y.float(), torch.zeros_like(y, dtype=torch.float32))), y.dtype)

        def gated(self, x: Tensor, bias: Tensor | None, numerics: Numerics) -> Tensor:
            return self.plain.gated(x, bias, numerics)

    spec = SpecConfig(num_steps=3, topk=3, num_draft_tokens=8)
    with SpecDecoder.from_pretrained(
        *pair.make(tmp_path), spec, device="cpu", max_seq_len=80, smoke=False, **options
    ) as decoder:
        expected = [out.token_ids for out in decoder.generate(IDS, SAMPLINGS)]
        stored = Linear.stored.fget
        assert stored is not None
        monkeypatch.setattr(Linear, "stored", property(lambda matrix: Leaves(stored(matrix))))
        assert [out.token_ids for out in decoder.generate(IDS, SAMPLINGS)] == expected and left
