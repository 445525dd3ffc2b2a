"""A decoder neither feels nor changes what all threads of a process share: torch's defaults, and what transformers replaces.

tests/test_process_state.py has the rules of the code that this follows from.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from toolkit.checkpoints.gpt_oss import save_gpt_oss
from toolkit.driver import Driver
from toolkit.families import Families
from toolkit.heads import block_zoo  # noqa: F401 (its heads are the zoo's)
from toolkit.models import Zoo
from toolkit.mtp_layers.targets import save_mtp_target
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as hf_logging

from specdec import SamplingParams, SpecConfig, SpecDecoder, shipped
from specdec.loading.threads import using_threads
from specdec.models.transformers_backend.config import load_hf_config
from specdec.models.transformers_backend.make import filled_model

LOADS = 4
SAMPLED = {"temperature": 1.0, "seed": 5}
EVERY_OPTION: list[dict[str, Any]] = [
    {},
    {"logprobs": 3, "logprobs_mode": "processed", "top_k": 20, **SAMPLED},
    {"logprobs": 2},
    {"top_p": 0.7, **SAMPLED},
    {"top_k": 7, **SAMPLED},
    {"min_p": 0.1, **SAMPLED},
    {"top_p": 0.8, "top_k": 30, "min_p": 0.02, **SAMPLED},
    {"frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"repetition_penalty": 1.4, **SAMPLED},
    {"logit_bias": {30: 4.0, 31: 4.5}, **SAMPLED},
    {"min_tokens": 6, "stop_token_ids": list(range(20, 30))},
    {"bad_words": [[5, 6], [7]], **SAMPLED},
    {"ignore_eos": True, "n": 2, **SAMPLED},
]
GRAMMARS: list[dict[str, Any]] = [
    {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"regex": "[a-z ]{4,12}", **SAMPLED},
]


@pytest.fixture(autouse=True)
def nothing_is_left_changed(zoo: Zoo) -> Iterator[None]:
    for target, kind in {case[:2] for case in CASES.values()}:  # making them draws from the process's generator
        if target.startswith("mtp-") and not (zoo.root / target).is_dir():
            save_mtp_target(zoo.root / target, target.removeprefix("mtp-"))
        elif target == "gpt-oss" and not (zoo.root / target).is_dir():
            save_gpt_oss(zoo.root / "gpt-oss-parts")[0].rename(zoo.root / target)
        zoo.target(target)
        if kind not in (None, "ngram", "mtp"):
            zoo.head(target, kind)
    before = _shared()
    yield
    assert _shared() == before


def _shared() -> dict[str, Any]:
    """What all threads share, or new ones inherit, of torch, Python and transformers."""
    return {
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
        "precision": torch.get_float32_matmul_precision(),
        "random": torch.get_rng_state().tolist(),
        "filters": list(warnings.filters),
        "verbosity": hf_logging.get_verbosity(),
        "bars": hf_logging.is_progress_bar_enabled(),
        "levels": logging.getLogger("transformers").level,
        "functions": [PreTrainedModel.tie_weights, torch.linspace, *map(vars(torch.nn.init).get, torch.nn.init.__all__)],
    }


def sampling(*, grammars: bool = False, max_tokens: int = 10) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=max_tokens, **each) for each in EVERY_OPTION + (GRAMMARS if grammars else [])]


def texts(decoder: SpecDecoder, params: list[SamplingParams], prompt: Any) -> list[Any]:
    """All that a caller gets of a prompt with each of these options, to the last digit."""
    return [(out.token_ids, out.logprobs) for out in decoder.generate([prompt] * len(params), params)]


def test_a_decoder_beside_loads_stays_right(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: sampling that fails, or draws other tokens, while another decoder is loaded in another dtype; two loads at
    once that leave the process in the dtype of one of them, its warnings errors, or weights that transformers no longer ties.
    """
    set_default_dtype, were_set = torch.set_default_dtype, list[torch.dtype]()
    monkeypatch.setattr(torch, "set_default_dtype", lambda dtype: (were_set.append(dtype), set_default_dtype(dtype)))
    load, inside, at_once = PreTrainedModel._load_pretrained_model, list[int](), list[int]()

    def counted(*args: Any, **more: Any) -> Any:
        inside.append(0)
        at_once.append(len(inside))
        try:
            return load(*args, **more)
        finally:
            inside.pop()

    monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", staticmethod(counted))
    kinds = [(backend, dtype) for backend in ("native", "transformers") for dtype in ("float64", "bfloat16")]

    def loaded(kind: tuple[str, str]) -> list[Any]:
        backend, dtype = kind
        with zoo.decoder("llama", "eagle3", SpecConfig(3, 2, 6), backend=backend, dtype=dtype) as other:
            return texts(other, sampling()[:4], [1, 2, 3, 4])

    alone = {kind: loaded(kind) for kind in kinds}
    spec, folders = SpecConfig(3, 2, 6), (shipped.target_folder(), shipped.draft_folder())
    params, prompt = sampling(grammars=True), "Once upon a time"
    with SpecDecoder.from_pretrained(*folders, spec, device="cpu", dtype="float32", max_seq_len=64, smoke=False) as decoder:
        expected, rounds = texts(decoder, params, prompt), 0
        with ThreadPoolExecutor(LOADS) as threads:
            loads = [threads.submit(loaded, kind) for kind in kinds * (LOADS // len(kinds))]
            while rounds == 0 or not all(load.done() for load in loads):
                assert texts(decoder, params, prompt) == expected
                rounds += 1
    for kind, load in zip(kinds * (LOADS // len(kinds)), loads, strict=True):
        assert load.result() == alone[kind], kind
    assert were_set == [] and set(at_once) == {1}


class _NoOther(TorchDispatchMode):
    """Fails where an operation makes a tensor of that dtype, or on torch's meta device."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, torch.Tensor):
                assert each.dtype != self._dtype and not each.is_meta, f"{func} made {each.dtype} on {each.device}"
        return made


@pytest.fixture
def other_defaults() -> Iterator[None]:
    """Defaults that no float32 decoder has a use for."""
    before, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float16)
    torch.set_default_device("meta")
    torch.set_num_threads(3)
    yield
    assert (torch.get_default_dtype(), torch.get_default_device().type, torch.get_num_threads()) == (torch.float16, "meta", 3)
    torch.set_num_threads(threads)
    torch.set_default_device(None)
    torch.set_default_dtype(before)


USUAL = {"device": "cpu", "dtype": "float32", "max_seq_len": 96, "page_size": 64, "smoke": False}
CASES: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "eagle3": ("llama", "eagle3", {}),
    "ngram": ("llama", "ngram", {}),
    "fp8": ("llama", "eagle3", {"kv_cache_dtype": "fp8"}),
    "quantised": ("llama", None, {"quantize": "int4"}),
    "diffllama": ("diffllama", None, {}),
    "p-eagle": ("llama", "p-eagle-window", {}),
    "sparse": ("mtp-v32", "mtp", {}),
    "gpt-oss": ("gpt-oss", None, {}),
    "transformers": ("llama", "eagle3", {"backend": "transformers"}),
}


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize("case", CASES)
def test_a_user_s_defaults_mean_nothing_here_and_stay(zoo: Zoo, case: str, request: pytest.FixtureRequest) -> None:
    """Keeps out: tables in the dtype that a user computes in, or on the device that a user computes on."""
    target, kind, settings = CASES[case]

    def run(mode: AbstractContextManager[Any]) -> list[Any]:
        spec = SpecConfig(3, 2, 6) if kind else None
        folder, head = zoo.target(target), kind if kind in (None, "ngram", "mtp") else zoo.head(target, kind)
        with SpecDecoder.from_pretrained(folder, head, spec, **{**USUAL, **settings}) as decoder:
            driver, params = Driver(decoder), sampling(max_tokens=7)
            requests = [driver.submit([1, 2, 3, 4, 5], each) for each in params if each.n == 1]
            with using_threads(decoder.settings.threads), mode:
                driver.run_until_idle()
            assert [str(request.error) for request in requests if request.error] == []
            return [(request.output.token_ids, request.logprobs) for request in requests]

    expected = run(nullcontext())
    request.getfixturevalue("other_defaults")
    assert run(_NoOther(torch.float16)) == expected


TRANSFORMED = ("gemma3", "gpt-oss", "llama4", "phi3-longrope", "gemma3n", "mixtral")


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Families:
    made = Families(tmp_path_factory.mktemp("families"))
    for name in TRANSFORMED:
        made.target(name)
    return made


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformers_models_are_the_same_without_its_defaults(families: Families, name: str) -> None:
    """Keeps out: a buffer in another dtype than transformers gives it, as it makes models in a default dtype of the process."""
    config = load_hf_config(families.target(name))
    model, report = filled_model(families.target(name), config, torch.bfloat16)
    theirs, their_report = AutoModelForCausalLM.from_pretrained(
        families.target(name), config=config, dtype=torch.bfloat16, attn_implementation="specdec",
        experts_implementation="specdec", output_loading_info=True, ignore_mismatched_sizes=True,
    )  # fmt: skip
    assert type(model) is type(theirs) and report == their_report
    own, wanted = ({**dict(each.named_parameters()), **dict(each.named_buffers())} for each in (model, theirs))
    assert own.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert own[key].dtype == tensor.dtype and torch.equal(own[key], tensor), key
