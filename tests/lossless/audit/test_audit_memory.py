"""The memory that is kept free for comparisons, against what they hold on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from toolkit.driver import Driver
from toolkit.families import FAMILIES, save_family
from toolkit.traffic.audit import auditor_of, totals_of, work_by_hand
from toolkit.traffic.live_bytes import LiveBytes
from toolkit.unlike.targets import save_unlike

from specdec import SamplingParams, SpecDecoder
from specdec.loading.memory import audit_bytes

SIZES = {"a table": (8000, 32), "a text": (40, 512)}  # of the vocabulary, of the text: what takes the most of layers' inputs
SMALL, LARGE = 8, 256  # numbers of a layer's own input


def folder_of(folder: Path, model: str, vocabulary: int, size: int) -> Path:
    sizes = dict(vocab_size=vocabulary, vocab_size_per_layer_input=vocabulary, hidden_size_per_layer_input=size)
    if model == "native":
        return save_unlike(folder, "gemma-small", **sizes, max_position_embeddings=512)
    return save_family(folder, FAMILIES[model][0], 1, **FAMILIES[model][1] | sizes | dict(max_position_embeddings=512))


def took_and_kept(folder: Path, model: str, tokens: int) -> tuple[int, int]:
    """The bytes that a comparison held which made way before each layer, and those that are kept free for it."""
    decoder = SpecDecoder.from_pretrained(
        folder, device="cpu", dtype="bfloat16", smoke=False, max_seq_len=tokens, audit=1.0, audit_folder=str(folder),
        backend="native" if model == "native" else "transformers",
    )  # fmt: skip
    with decoder:
        driver, own = Driver(decoder), decoder.model
        size = sum(tensor.nbytes for tensor in (*own.parameters(), *own.buffers()))
        driver.submit([place % 40 for place in range(tokens - 9)], SamplingParams(max_tokens=8, ignore_eos=True))
        driver.run_until_idle()
        with LiveBytes() as live:
            while auditor_of(driver).has_work:
                work_by_hand(driver, lambda: True)
        assert totals_of(driver).audit_texts == 1
        return live.most, audit_bytes(own.config, decoder.settings, size)


@pytest.mark.parametrize("what", SIZES)
@pytest.mark.parametrize("model", ["native", "gemma3n", "gemma4"])
def test_inputs_of_layers_are_kept_free(tmp_path: Path, model: str, what: str) -> None:
    """Keeps out: widened tables of what each layer reads of a token, and these inputs themselves, which a pass that has made
    way holds beside those of the call that goes on, in memory that the KV pool has taken."""
    vocabulary, tokens = SIZES[what]
    (took, kept), (more, more_kept) = (
        took_and_kept(folder_of(tmp_path / f"{size}", model, vocabulary, size), model, tokens) for size in (SMALL, LARGE)
    )
    assert took <= kept and more <= more_kept
    assert more - took <= more_kept - kept <= 1.7 * (more - took), "nor is much more kept free than is held"
