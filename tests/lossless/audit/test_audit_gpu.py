"""The audit on a GPU: among captured rounds, in 16 bit and over fp8 keys and values, and in the memory that is kept free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit.driver import Driver
from toolkit.inside.round_faults import fault
from toolkit.traffic.audit import audited, auditor_of, weights, work_by_hand

from specdec import SamplingParams, SpecConfig, SpecDecoder, shipped
from specdec.loading.memory import audit_bytes

pytestmark = pytest.mark.gpu
PROMPTS = [f"{a} {b}" for a in ("Once upon a time", "The bear", "One day") for b in ("was", "had a", "saw the")]


def load(folder: Path, **settings: Any) -> SpecDecoder:
    pair = shipped.target_folder(), shipped.draft_folder()
    given = {"audit": 1.0, "audit_folder": folder, "max_seq_len": 256, "smoke": False, "audit_max_tokens": 256}
    decoder = SpecDecoder.from_pretrained(*pair, SpecConfig(5, 4, 16), device="cuda", dtype="bfloat16", **given, **settings)
    auditor_of(Driver(decoder)).tell = lambda said: None
    return decoder


@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_captured_rounds_stay_as_they_are(tmp_path: Path, kv: str) -> None:
    """Keeps out: false alarms in 16 bit; weights that move, so that captured graphs read others; a fault that goes unseen."""
    params = [SamplingParams(max_tokens=40, temperature=0.8 if i % 2 else 0.0, seed=i if i % 2 else None) for i in range(9)]
    with load(tmp_path, kv_cache_dtype=kv) as decoder:
        driver, before = Driver(decoder), weights(Driver(decoder))
        for count in (9, 18):  # the second time after passes over wide weights
            decoder.generate(PROMPTS, params)
            found = audited(driver)
            assert (found.audit_texts, found.audit_mismatch) == (count, 0) and weights(driver) == before
    with fault("both sides"), load(tmp_path, kv_cache_dtype=kv, audit_stop=True) as decoder:
        decoder.generate(PROMPTS[:3], SamplingParams(max_tokens=40))
        assert audited(Driver(decoder)).audit_mismatch > 0 and not decoder.is_drafting


def test_passes_take_no_more_than_is_kept_free(tmp_path: Path) -> None:
    """Keeps out: an audit that runs out of memory, which the pool has taken."""
    with load(tmp_path) as decoder:
        driver, model = Driver(decoder), decoder.model
        size = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
        driver.submit(list(range(200)), SamplingParams(max_tokens=50, temperature=0.7))
        driver.run_until_idle()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        while auditor_of(driver).has_work:  # what goes on holds more than what runs through
            work_by_hand(driver, lambda: True)
        took, kept = torch.cuda.max_memory_allocated() - held, audit_bytes(model.config, decoder.settings, size)
        assert took <= kept
