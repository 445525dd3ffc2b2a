"""One options type: every engine setting stands in one place, and from_pretrained's signature and help come from it."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toolkit.models import Zoo

from specdec import EngineOptions, SpecConfig, SpecDecoder
from specdec.attention.capabilities import BACKENDS
from specdec.attention.capability import GRAPHS, KV_DTYPES
from specdec.checks import setting_of
from specdec.draft.formats.detect import FORMATS
from specdec.loading.resolve import check_threads
from specdec.models import registry
from specdec.models.checkpoints import loader
from specdec.options import usable_cpus

OPTIONS = fields(EngineOptions)
BY_NAME = {item.name: item for item in OPTIONS}


def test_options_need_no_torch(tmp_path: Path) -> None:
    """Keeps out: a command line whose help waits for torch."""
    code = "import sys; from specdec.options import EngineOptions; EngineOptions(page_size=4); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("item", OPTIONS, ids=lambda item: item.name)
def test_every_option_is_in_the_signature_and_the_help(item: Any) -> None:
    """Keeps out: a setting that from_pretrained takes and does not show, or shows with another default."""
    shown = inspect.signature(SpecDecoder.from_pretrained).parameters[item.name]
    assert (shown.default, shown.annotation, shown.kind) == (item.default, item.type, shown.KEYWORD_ONLY)
    said = " ".join((SpecDecoder.from_pretrained.__doc__ or "").split())
    assert f"{item.name} (default {item.default!r}): " in said and setting_of(item).meaning in said


def test_choices_are_what_the_code_knows() -> None:
    """Keeps out: a choice that no code knows, and one that the code knows and no user can make."""
    choices = {name: setting_of(item).choices for name, item in BY_NAME.items()}
    assert set(choices["dtype"]) == {"auto", *loader.DTYPES}
    assert choices["backend"] == registry.BACKENDS
    assert choices["attention"] == ("auto", *BACKENDS)
    assert choices["kv_cache_dtype"] == KV_DTYPES
    assert choices["draft_format"] == ("auto", *FORMATS)
    assert set(choices["cuda_graphs"]) == set(GRAPHS)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    (dict(device=""), ValueError, "device must be .* got ''"),
    (dict(attention="tritn"), ValueError, "got 'tritn'; nearest setting that works: attention='triton'"),
    (dict(backend="hf"), ValueError, "'native' or 'transformers', got 'hf'; nearest setting that works: backend='auto'"),
    (dict(backend=torch), TypeError, "backend must be 'auto', .* of type module"),
    (dict(cuda_graphs=None), TypeError, "cuda_graphs must be 'round', 'step' or False, got None of type NoneType"),
    (dict(cuda_graphs=0), TypeError, "cuda_graphs must be 'round', 'step' or False, got 0 of type int"),
    (dict(prefix_caching="yes"), TypeError, "prefix_caching must be a bool, got 'yes'; nearest .* prefix_caching=False"),
    (dict(max_batch_size=8.0), TypeError, "max_batch_size must be an int, got 8.0 of type float"),
    (dict(max_batch_size=None), TypeError, "max_batch_size must be an int, got None"),
    (dict(page_size=True), TypeError, "page_size must be 'sequence' or an int, got True of type bool"),
    (dict(page_size="row"), TypeError, "page_size must be 'sequence' or an int, got 'row'"),
    (dict(threads=0), ValueError, r"threads must be in \[1, .*\], got 0; nearest setting that works: threads=1"),
    (dict(threads="all"), TypeError, "threads must be 'auto' or an int, got 'all'"),
    (dict(threads=10_000), ValueError, f"threads must be .* got 10000; nearest setting that works: threads={usable_cpus()}"),
]


@pytest.mark.parametrize(("values", "error", "match"), WRONG, ids=str)
def test_wrong_values_are_refused_when_the_object_is_made(values: dict[str, Any], error: type[Exception], match: str) -> None:
    """Keeps out: a setting that is looked at after the weights were read, or never."""
    with pytest.raises(error, match=match):
        EngineOptions(**values)


def test_right_values_are_kept_as_they_are() -> None:
    """Keeps out: a check that changes the value, and torch's own objects refused because torch is not imported here."""
    for values in (
        dict(device=torch.device("cuda", 1)), dict(device="cpu"), dict(dtype=torch.bfloat16), dict(cuda_graphs=False),
        dict(threads=1), dict(threads="auto"), dict(max_seq_len=None), dict(max_seq_len=2), dict(max_batch_size=4096),
        dict(page_size="sequence"), dict(page_size=40_000),
    ):  # fmt: skip
        ((name, value),) = values.items()
        assert getattr(EngineOptions(**values), name) is value
    counts = EngineOptions(max_seq_len=np.int64(64), threads=np.int32(1))
    assert (type(counts.max_seq_len), type(counts.threads)) == (int, int), "a file of settings could not be written"
    with pytest.raises(FrozenInstanceError):
        EngineOptions().page_size = 4  # type: ignore[misc]


def test_unknown_settings_name_the_nearest_one(zoo: Zoo) -> None:
    """Keeps out: "got an unexpected keyword argument" without a hint, and a typing mistake that is silently ignored."""
    with pytest.raises(TypeError, match="no engine setting 'max_seqlen'; nearest: max_seq_len$"):
        SpecDecoder.from_pretrained(zoo.target("llama"), max_seqlen=64)
    with pytest.raises(TypeError, match="no engine setting 'drafts'; nearest: draft$"):
        SpecDecoder.from_pretrained(zoo.target("llama"), drafts="x")
    with pytest.raises(TypeError, match="no engine setting 'qqqq'; known: device, dtype, .*audit_folder$"):
        SpecDecoder.from_pretrained(zoo.target("llama"), qqqq=1)


def test_options_come_together_or_one_by_one(zoo: Zoo) -> None:
    """Keeps out: an options object of which some fields are ignored, and two sources that disagree in silence."""
    options = EngineOptions(
        device="cpu", dtype="float64", max_batch_size=2, max_seq_len=64, page_size=4, threads=1, smoke=False
    )  # fmt: skip
    one = SpecDecoder.from_pretrained(zoo.target("llama"), options=options)
    other = zoo.decoder("llama", dtype="float64", max_batch_size=2, max_seq_len=64, page_size=4, threads=1)
    assert one.settings == other.settings and one.settings.options == options
    assert (one.settings.dtype, one.settings.max_seq_len) == (torch.float64, 64)
    with pytest.raises(TypeError, match="page_size was given too; nearest: dataclasses.replace"):
        SpecDecoder.from_pretrained(zoo.target("llama"), options=options, page_size=8)
    with pytest.raises(TypeError, match="options must be an EngineOptions, got {} of type dict"):
        SpecDecoder.from_pretrained(zoo.target("llama"), options={})  # type: ignore[arg-type]


def test_what_runs_is_told_for_every_option(zoo: Zoo) -> None:
    """Keeps out: a record of a run that lacks a setting, or says "auto" where the machine has decided."""
    settings = zoo.decoder("llama", "eagle3", SpecConfig(3, 4, 12), page_size=4).settings
    found = settings.by_option()
    assert list(found) == list(BY_NAME)
    assert found == {
        "device": "cpu", "dtype": "float32", "max_batch_size": 8, "max_seq_len": 128, "page_size": 4, "attention": "torch",
        "cuda_graphs": False, "kv_cache_dtype": "auto", "kv_cache_memory": "auto",
        "int8_queries": False, "backend": "native", "quantize": "none",
        "pack_weights": False,
        "prefix_caching": False, "tensor_parallel_size": 1, "expert_parallel": "auto", "decode_context_parallel_size": 1,
        "context_interleave": None,
        "state_cache": "auto",
        "deterministic": False, "prefill_chunk": "auto", "threads": 1, "draft_format": "auto", "draft_pickle": False,
        "draft_quantize": "none", "beyond_trained": "draft", "smoke": False, "corpus": None, "corpus_memory": "256MiB",
        "audit": 0.0, "audit_max_tokens": 2048, "audit_busy": 0.0, "audit_stop": False, "audit_folder": "specdec-audit",
        "shapes": None,
        "chat_template": None,
    }  # fmt: skip
    assert settings.with_options(max_batch_size=3).by_option() == found | {"max_batch_size": 3}


def test_threads_of_a_decoder_on_a_gpu_are_refused() -> None:
    """Keeps out: a setting that is taken and ignored."""
    with pytest.raises(ValueError, match="threads=1 is for a decoder on a CPU, .* on cuda:0; nearest .* threads='auto'"):
        check_threads(replace(EngineOptions(), threads=1), torch.device("cuda", 0))
