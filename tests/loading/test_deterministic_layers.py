"""Targets under the invariant policy: no library multiplies anything, and the numbers are those of the other policy.

In float16, on a GPU or under Triton's interpreter.  Bits are compared in tests/gpu/test_gpu_deterministic.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from toolkit.checkpoints.gpt_oss import save_gpt_oss
from toolkit.checkpoints.mixtures import save_mixture
from toolkit.deepseek import save_sparse
from toolkit.kernels import DEVICE, use_kernels_everywhere
from toolkit.models import Zoo
from torch import Tensor

from specdec.attention.attend import PagedAttention, PassTables
from specdec.attention.backend import Backend
from specdec.attention.eager.torch_backend import TorchBackend
from specdec.attention.invariant.backend import InvariantBackend
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment
from specdec.attention.segment import AttentionPlan
from specdec.models.kv import make_cache
from specdec.models.linear import use_numerics
from specdec.models.registry import choose_target, load_chosen
from specdec.models.target import Target
from specdec.ops.products.numerics import INVARIANT

CHUNKS = ((0, 9), (9, 10))


def logits(model: Target, backend: Backend, dtype: torch.dtype, ids_T: Tensor) -> Tensor:
    """[chunks, V]: the logits after each chunk of one text, whose tokens lie on pages of 4."""
    cache = make_cache(model, model.config, 64, "auto", dtype, DEVICE)
    pages, out = PageTable(torch.tensor([[3, 1, 4, 2]], dtype=torch.int32, device=DEVICE), 4), []
    for start, end in CHUNKS:
        segment = causal_segment(pages, torch.tensor([end], dtype=torch.int32, device=DEVICE), end - start)
        positions_T = torch.arange(start, end, device=DEVICE)
        attn = PagedAttention(backend, cache, PassTables(AttentionPlan((segment,)), pages.slots_at(positions_T[None])[0]))
        out.append(model.logits(model(ids_T[start:end], positions_T, attn).hidden_TH[-1:]))
    return torch.cat(out).float()


MADE: dict[str, Callable[[Path], Path]] = {
    "v32": lambda folder: save_sparse(folder / "v32", "v32", num_hidden_layers=2),
    "diffllama": lambda folder: Zoo(folder).target("diffllama"),
    "gpt-oss": lambda folder: save_gpt_oss(folder, num_hidden_layers=2)[1],
    "ernie": lambda folder: save_mixture(folder / "ernie", "ernie", num_hidden_layers=2, moe_layer_end_index=1),
}


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", MADE)
def test_no_library_multiplies(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a product of heads, experts or a router that is left to torch, and kernels wired to other weights."""
    folder = MADE[name](tmp_path)
    choice, ids_T = choose_target(folder, "native"), torch.arange(1, 11, device=DEVICE)

    def load(dtype: torch.dtype) -> Target:
        return load_chosen(choice, folder, 64, DEVICE, dtype, False)

    with torch.inference_mode():
        want = logits(load(torch.float32), TorchBackend(), torch.float32, ids_T)
        model = load(torch.float16)
        use_numerics(model, INVARIANT)
        use_kernels_everywhere(monkeypatch)
        monkeypatch.setattr("specdec.ops.products.dense.has_pdl", lambda _: True)
        for library in ("linear", "grouped_mm"):
            monkeypatch.setattr(F, library, None)  # whoever calls it fails
        for library in ("bmm", "matmul"):
            monkeypatch.setattr(torch, library, None)
        got = logits(model, InvariantBackend(), torch.float16, ids_T)
    torch.testing.assert_close(got, want, atol=0.05, rtol=0.02)
