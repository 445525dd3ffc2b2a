"""What tests of hybrids' modules have in common: loading, logits, bytes, and values of config.json that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.attention.eager.dense import DenseAttention
from specdec.models.causal_lm import CausalLM
from specdec.models.registry import check_chosen, choose_target, load_chosen

CPU = torch.device("cpu")
IDS = torch.randint(40, (2, 21), generator=torch.Generator().manual_seed(5))


def load(folder: Path, quantize: str = "none", dtype: torch.dtype = torch.float32) -> CausalLM:
    """The target by specdec's own modules."""
    model = load_chosen(choose_target(folder, "native", quantize), folder, 64, CPU, dtype, False)
    assert isinstance(model, CausalLM)
    return model


@torch.inference_mode()
def logits(model: CausalLM, tokens: int = 7) -> Tensor:
    """Of a random text."""
    ids = torch.randint(0, 40, (tokens,), generator=torch.Generator().manual_seed(tokens))
    return model.logits(model(ids, torch.arange(tokens), DenseAttention(model.config.layer_kinds)).hidden_TH)


def held(model: CausalLM) -> int:
    """Bytes of its weights, each counted once: a tied head's are the embeddings'."""
    shared = {model.embed_tokens.weight.data_ptr()} if model.config.tie_embeddings else set()
    own = [x for x in (*model.parameters(), *model.buffers()) if x.untyped_storage().data_ptr() not in shared]
    return sum(x.nbytes for x in own) + len(shared) * model.embed_tokens.weight.nbytes - model.rotary.table.nbytes


@torch.inference_mode()
def expect_equal_logits(hf: PreTrainedModel, folder: Path, tolerance: float = 2e-5) -> None:
    """Saves transformers' model there, and compares whole rows of tokens.  tolerance: as a share of the largest logit."""
    hf.save_pretrained(folder)
    want, model = hf(IDS, use_cache=False).logits, load(folder)
    rows, tokens = IDS.shape
    attention = DenseAttention(model.config.layer_kinds, rows, kv_layers=model.config.kv_source)
    hidden_TH = model(IDS.flatten(), torch.arange(tokens).repeat(rows), attention).hidden_TH
    assert float(want.std()) > 0.1
    torch.testing.assert_close(
        model.logits(hidden_TH).unflatten(0, (rows, tokens)), want, atol=tolerance * float(want.abs().max()), rtol=1e-5
    )


def expect_refused(folder: Path, place: Path, keys: dict[str, Any], said: str) -> None:
    """With these keys in its config.json, by specdec's modules and by `auto`: transformers' code can't run such layers here."""
    (place / "model.safetensors").symlink_to(folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**raw, **keys}))
    for backend in ("native", "auto"):
        with pytest.raises(ValueError, match=said):
            check_chosen(choose_target(place, backend), place)
