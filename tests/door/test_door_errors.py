"""What is wrong is said at the door: the name, what was expected, what came, and the nearest setting that works.

Keeps out: settings ignored in silence, and errors from deep inside that name no setting.
"""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toolkit.attention import fake_flash
from toolkit.checkpoints.load import cut_numbers, read_target_config
from toolkit.deepseek import save_deepseek
from toolkit.driver import Driver
from toolkit.families import COMMON, FAMILIES
from toolkit.models import Zoo
from transformers import CONFIG_MAPPING

from specdec import AsyncSpecDecoder, SamplingParams, SpecConfig, SpecDecoder
from specdec.attention.capabilities import choose_backend
from specdec.attention.capability import KV_DTYPES
from specdec.attention.needs import AttentionNeeds
from specdec.checks import field_of
from specdec.config import SAMPLING_OPTIONS
from specdec.draft.find import head_folder
from specdec.loading.resolve import resolve_device, resolve_dtype, resolve_max_seq_len
from specdec.models.checkpoints.checkpoint import resolve_folder
from specdec.models.transformers_backend.config import read_transformers_config

SPEC_ERRORS = [
    (dict(num_steps=0), ValueError, "num_steps must be in \\[1, 64\\], got 0; nearest .* num_steps=1"),
    (dict(num_steps=65), ValueError, "num_steps .* got 65; nearest .* num_steps=64"),
    (dict(num_steps=True), TypeError, "num_steps must be an int, got True of type bool"),
    (dict(num_steps="5"), ValueError, "num_steps must be an int or 'auto', got '5'; nearest setting: 5"),
    (dict(num_steps=None), TypeError, "num_steps must be an int or 'auto', got None"),
    (dict(topk="4"), TypeError, "topk must be an int, got '4' of type str"),
    (dict(topk=0), ValueError, "topk must be in \\[1, 64\\], got 0; nearest .* topk=1"),
    (dict(num_draft_tokens=1), ValueError, "num_draft_tokens .* got 1; nearest .* num_draft_tokens=2"),
    (dict(num_draft_tokens=2.0), TypeError, "num_draft_tokens must be an int, got 2.0"),
    (dict(num_steps=5, topk=1, num_draft_tokens=16), ValueError, "= 6 when topk=1 .* got 16; .*=6, or num_steps=15"),
    (dict(num_steps="auto", num_draft_tokens=4), ValueError, "topk=4 would do nothing .* topk=1, or num_draft_tokens=5$"),
    (dict(num_steps=2, topk=2, num_draft_tokens=8), ValueError, "at most .* = 6, .* got num_draft_tokens=8; .*=7"),
]
SAMPLING_ERRORS = [
    (dict(max_tokens=0), ValueError, "max_tokens must be >= 1, got 0; nearest .* max_tokens=1"),
    (dict(max_tokens=1.0), TypeError, "max_tokens must be an int, got 1.0 of type float; nearest .* max_tokens=1$"),
    (dict(temperature=-1), ValueError, "temperature must be in \\[0.0, 100.0\\], got -1; nearest .* temperature=0.0"),
    (dict(temperature=1e-9), ValueError, "temperature must be 0 .* got 1e-09; nearest: 0"),
    (dict(temperature=float("nan")), ValueError, "temperature must be in .* got nan"),
    (dict(temperature="hot"), TypeError, "temperature must be a number, got 'hot'"),
    (dict(top_p=0), ValueError, "top_p must be in \\(0.0, 1.0\\], got 0"),
    (dict(top_p=1.5), ValueError, "top_p .* got 1.5; nearest .* top_p=1.0"),
    (dict(top_k=-1), ValueError, "top_k must be in .*, got -1; nearest .* top_k=0"),
    (dict(seed=2**63), ValueError, "seed must be in .* got 9223372036854775808"),
    (dict(seed=1.5), TypeError, "seed must be an int, got 1.5 of type float; nearest .* seed=1$"),
    (dict(stop=3), TypeError, "stop must be .* got 3"),
    (dict(stop=["a", 3]), TypeError, "stop must be a string or a list of strings, got 3"),
    (dict(stop=""), ValueError, "stop must not hold an empty string"),
    (dict(stop=["a", "\ud800"]), ValueError, "stop holds .* half of a surrogate pair"),
    (dict(stop_token_ids=[-1]), ValueError, r"stop_token_ids\[0\] must be in .*, got -1; nearest .* stop_token_ids\[0\]=0"),
    (dict(stop_token_ids=5), TypeError, "stop_token_ids must be .* got 5"),
    (dict(stop_token_ids=[3, "a"]), TypeError, "stop_token_ids must be a list of ints, got 'a' of type str at index 1"),
    (dict(stop_token_ids=[True]), TypeError, "stop_token_ids must be a list of ints, got True of type bool at index 0"),
    (dict(ignore_eos=1), TypeError, "ignore_eos must be a bool, got 1"),
    (dict(best_of=2), TypeError, "best_of"),
    (dict(min_p=1.5), ValueError, "min_p must be in .* got 1.5; nearest .* min_p=1.0"),
    (dict(repetition_penalty=0), ValueError, "repetition_penalty must be in .* got 0; nearest .* repetition_penalty=0.01"),
    (dict(presence_penalty=3), ValueError, "presence_penalty must be in .* got 3; nearest .* presence_penalty=2.0"),
    (dict(frequency_penalty="a"), TypeError, "frequency_penalty must be a number, got 'a'"),
    (dict(logit_bias=[1, 2]), TypeError, "logit_bias must be a dict from token ids to numbers, got .1, 2. of type list"),
    (dict(logit_bias={"1": 2}), TypeError, "logit_bias must have token ids as keys, got '1'"),
    (dict(logit_bias={1: 101}), ValueError, r"logit_bias\[1\] must be in .* got 101; nearest .*=100.0"),
    (dict(bad_words="ab"), TypeError, "bad_words must be a list of strings or a list of lists of ints, got 'ab'"),
    (dict(bad_words=["a", [1]]), TypeError, "bad_words must be .* got 'a' of type str among them"),
    (dict(bad_words=[3]), TypeError, "bad_words must be .* got 3 of type int among them"),
    (dict(bad_words=[[3], [5, "a"]]), TypeError, r"bad_words\[1\] must be a list of ints, got 'a' of type str at index 1"),
    (dict(bad_words=[[5, 2.0]]), TypeError, r"bad_words\[0\] must be a list of ints, got 2.0 of type float at index 1"),
    (dict(bad_words=["a", ""]), ValueError, "bad_words must not hold an empty word"),
    (dict(json_schema=3), TypeError, "json_schema must be a dict, or JSON of an object, .* got 3 of type int"),
    (dict(json_schema="[1]"), TypeError, "json_schema must be a dict, or JSON of an object"),
    (dict(json_schema="{"), ValueError, "json_schema is not usable JSON: .* expected a schema such as"),
    (dict(json_schema='{"type": 1, "type": 2}'), ValueError, "not usable JSON: the key 'type' stands twice in one object; exp"),
    (dict(json_schema='{"items":' * 9999), ValueError, "json_schema is nested too deeply; nearest .* in .defs"),
    (dict(json_schema={"const": {1}}), TypeError, "json_schema must hold what JSON can hold"),
    (dict(regex=3), TypeError, "regex must be a string, got 3 of type int"),
    (dict(grammar=""), ValueError, "grammar must not be empty; nearest .* leave it out"),
    (dict(grammar=" \n"), ValueError, "grammar must not be empty; nearest .* leave it out"),
    (dict(json_schema={"a": float("nan")}), TypeError, "json_schema must hold what JSON can hold"),
    (dict(json_schema='{"a": NaN}'), TypeError, "json_schema must hold what JSON can hold"),
    (dict(json_schema={}, regex="a"), ValueError, "json_schema and regex both say .* nearest setting that works: one of them"),
    (dict(regex="a", ignore_eos=True), ValueError, "ignore_eos would go on .* nearest: ignore_eos=False"),
    (dict(bad_words=["\ud800"]), ValueError, "bad_words holds .* half of a surrogate pair"),
    (dict(max_tokens=4, min_tokens=5), ValueError, "min_tokens must be at most max_tokens = 4, got 5; nearest .* min_tokens=4"),
    (dict(logprobs=1025), ValueError, "logprobs must be in .* got 1025; nearest .* logprobs=1024"),
    (dict(logprobs=True), TypeError, "logprobs must be an int, got True"),
    (dict(logprobs=1, logprobs_mode="Raw"), ValueError, "logprobs_mode must be 'raw' or 'processed'.* logprobs_mode='raw'"),
    (dict(logprobs_mode="processed"), ValueError, "logprobs_mode would do nothing without logprobs; nearest .* logprobs=0"),
    (dict(n=0), ValueError, "n must be in .* got 0; nearest .* n=1"),
    (dict(seed=2**63 - 2, n=3), ValueError, "seed . n - 1 must be at most .* nearest .* seed=9223372036854775805"),
]


@pytest.mark.parametrize(("values", "error", "match"), SPEC_ERRORS, ids=str)
def test_spec_config(values: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        SpecConfig(**values)


@pytest.mark.parametrize(("values", "error", "match"), SAMPLING_ERRORS, ids=str)
def test_sampling_params(values: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match) as caught:
        SamplingParams(**values)
    unknown = values.keys() - SAMPLING_OPTIONS.keys()
    assert unknown or field_of(caught.value) in values, "a door could not name the field"


def test_the_nearest_settings_work() -> None:
    """Keeps out: a hint that runs into the next error; and the limits themselves are inside."""
    for S, k, nd in [(5, 1, 6), (15, 1, 16), (2, 2, 7), (1, 64, 65), (1, 1, 2), (64, 4, 1013)]:
        spec = SpecConfig(S, k, nd)
        assert spec.lookahead >= max(nd, S + 1, k * (S - 1))
    for values in (dict(top_p=1.0), dict(temperature=1e-4), dict(temperature=100), dict(seed=-(2**63)), dict(stop=[])):
        SamplingParams(**values)


@pytest.mark.parametrize("shape", [(5, 1, 16), (5, 1, 100), (2, 2, 8), (64, 4, 1024), (1, 8, 64)], ids=str)
def test_every_hint_works(shape: tuple[int, int, int]) -> None:
    """Keeps out: a nearest setting that is itself refused."""
    names = ("num_steps", "topk", "num_draft_tokens")
    with pytest.raises(ValueError) as info:
        SpecConfig(*shape)
    hints = re.findall(r"(\w+)=(\d+)", str(info.value).partition("nearest")[2])
    assert hints
    for name, value in hints:
        SpecConfig(**{**dict(zip(names, shape, strict=True)), name: int(value)})


@pytest.fixture(scope="module")
def decoder(zoo: Zoo) -> SpecDecoder:
    return zoo.decoder("llama", "eagle3", SpecConfig(3, 4, 12), max_seq_len=64)


SHORT = SamplingParams(max_tokens=4)
HELLO = [{"role": "user", "content": "hello"}]
GENERATE_ERRORS: list[tuple[Callable[[SpecDecoder], Any], type[Exception], str]] = [
    (
        lambda d: d.generate([1], replace(SHORT, logit_bias={40: 1.0})),
        ValueError,
        r"logit_bias holds 40; expected ids in",
    ),
    (
        lambda d: d.generate([1], replace(SHORT, bad_words=[[1, 40]])),
        ValueError,
        r"bad_words holds 40; expected ids in",
    ),
    (lambda d: d.generate([1], replace(SHORT, bad_words=["a"])), ValueError, "bad_words as texts needs a tokenizer"),
    (
        lambda d: d.generate([1], replace(SHORT, bad_words=[[1] * 17])),
        ValueError,
        "bad_words holds a word of 17 tokens, .* expected at most 16; nearest",
    ),
    (
        lambda d: d.generate([1], replace(SHORT, bad_words=[[i % 40, i // 40] for i in range(257)])),
        ValueError,
        "bad_words must hold at most 256 words of several tokens, got 257",
    ),
    (lambda d: d.generate([[]]), ValueError, r"prompts\[0\] is empty: expected at least one token"),
    (lambda d: d.generate([[1], [40]], SHORT), ValueError, r"prompts\[1\] holds the token id 40; expected ids in \[0, 39\]"),
    (lambda d: d.generate([-1]), ValueError, r"prompt holds the token id -1"),
    (lambda d: d.generate(7), TypeError, "prompts must be a string, a list of token ids.* got int"),
    (lambda d: d.generate([[1], None], SHORT), TypeError, r"prompts\[1\] must be a string.* got None"),
    (lambda d: d.generate([1, "a"]), TypeError, r"prompts\[0\] must be a string.* got 1"),
    (lambda d: d.generate([[True]]), TypeError, r"prompts\[0\] must be"),
    (lambda d: d.generate("text"), ValueError, "a text prompt needs a tokenizer, but .* holds none"),
    (lambda d: d.generate(HELLO), ValueError, "chat messages needs a tokenizer"),
    (lambda d: d.generate([1] * 64), ValueError, "has 64 tokens; expected at most max_seq_len - 1 = 63"),
    (
        lambda d: d.generate([1] * 60, SamplingParams(max_tokens=5)),
        ValueError,
        "must be at most max_seq_len = 64, got 60 \\+ 5; nearest .* max_tokens=4",
    ),
    (lambda d: d.generate([[1], [2]], [SamplingParams()]), ValueError, r"one per prompt \(2\), got 1"),
    (lambda d: d.generate([1], 5), TypeError, "sampling must"),
    (lambda d: d.generate([1], [{"max_tokens": 3}]), TypeError, "must hold SamplingParams, got .* of type dict"),
    (lambda d: d.generate([1], SamplingParams(max_tokens=9), speculate=1), TypeError, "speculate must be a bool, got 1"),
    (lambda d: d.generate([1], SamplingParams(stop_token_ids=[40], max_tokens=9)), ValueError, "stop_token_ids holds 40"),
    (lambda d: d.generate([1], SamplingParams(stop="a", max_tokens=9)), ValueError, "stop needs a tokenizer"),
    (
        lambda d: d.stream([[1], [2]]),
        TypeError,
        r"prompt must be one string.* got \[\[1\], \[2\]\] of type list; nearest .* generate",
    ),
    (lambda d: d.stream([1], SHORT, speculate=0), TypeError, "speculate must be a bool, got 0"),
    (lambda d: d.generate(np.str_("text")), ValueError, "a text prompt needs a tokenizer"),  # numpy's text is text
]


@pytest.mark.parametrize(("call", "error", "match"), GENERATE_ERRORS)
def test_generate(decoder: SpecDecoder, call: Callable[[SpecDecoder], Any], error: type[Exception], match: str) -> None:
    """A refused call raises its error, and none of its prompts is queued, not even the good ones."""
    with pytest.raises(error, match=match):
        call(decoder)
    Driver(decoder).assert_nothing_leaked()


def test_options_as_arguments_are_shown_their_place(decoder: SpecDecoder) -> None:
    """Keeps out: Python's own error, which names a class that the caller has never seen, and no way on."""
    for call in (decoder.generate, decoder.stream, decoder.chat, AsyncSpecDecoder.generate, AsyncSpecDecoder.stream):
        ask: Callable[..., Any] = call
        for given, works in (
            ({"max_tokens": 6}, r"SamplingParams\(max_tokens=6\) as `sampling`$"),
            ({"temprature": 1}, r"SamplingParams\(temperature=1\)"),
            ({"samplings": 1}, "works: sampling$"),
        ):
            with pytest.raises(TypeError, match=rf"^{call.__name__} has no argument '{next(iter(given))}'; .*{works}"):
                ask("a", **given)


def test_no_prompt_is_an_error(decoder: SpecDecoder) -> None:
    """[] may be no prompts or a prompt of no tokens; either way there is nothing to go on from."""
    with pytest.raises(ValueError, match="prompts is empty"):
        decoder.generate([])


def test_the_nearest_length_works(decoder: SpecDecoder) -> None:
    (out,) = decoder.generate([1] * 60, SamplingParams(max_tokens=4))
    assert len(out.token_ids) == 4


LOAD_ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    (dict(max_batch_size=0), ValueError, "max_batch_size must be in \\[1, 4096\\], got 0; nearest .* max_batch_size=1"),
    (dict(page_size=0), ValueError, "page_size must be .* got 0; nearest .* page_size=1"),
    (dict(page_size=16.0), TypeError, "page_size must be 'sequence' or an int"),
    (dict(max_seq_len=1), ValueError, "max_seq_len must be >= 2, got 1; nearest .* max_seq_len=2"),
    (dict(max_seq_len=257), ValueError, "max_seq_len must be at most 256, its max_position_embeddings; got 257; .* 256"),
    (dict(device="gpu"), ValueError, "device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got 'gpu'; nearest .* device='auto'"),
    (dict(device="meta"), ValueError, "device must be 'auto', .* got 'meta'"),
    (dict(dtype="int8"), ValueError, "dtype must be 'auto', 'float32', .* got 'int8'; nearest .* dtype='auto'"),
    (dict(dtype=torch.int8), ValueError, "dtype must be 'auto', .* got torch.int8; nearest .* dtype='auto'"),
    (
        dict(attention="paged"),
        ValueError,
        "attention must be 'auto', .* or 'flashmla', got 'paged'; nearest .* attention='auto'",
    ),
    (
        dict(kv_cache_dtype="int4"),
        ValueError,
        "kv_cache_dtype must be {}, {}, {}, {} or {}, got 'int4'".format(*map(repr, KV_DTYPES)),
    ),
    (dict(cuda_graphs="yes"), ValueError, "cuda_graphs must be 'round', 'step' or False, got 'yes'"),
    (dict(cuda_graphs=True), ValueError, "got True; nearest setting that works: cuda_graphs='round'"),
    (dict(spec=(5, 4, 16)), TypeError, "spec must be a SpecConfig, got \\(5, 4, 16\\) of type tuple"),
    (dict(spec=SpecConfig(1, 30, 31)), ValueError, "topk must be at most the draft vocabulary, 26, got 30"),
]


@pytest.mark.parametrize(("settings", "error", "match"), LOAD_ERRORS, ids=str)
def test_from_pretrained(zoo: Zoo, settings: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        zoo.decoder("llama", "eagle3", **settings)


@pytest.mark.parametrize("name", ["triton", "fa2", "fa3", "fa4", "flashmla"])
def test_a_backend_that_cannot_run_here_is_refused(name: str) -> None:
    """Keeps out: a silent fall back to another backend."""
    with pytest.raises(ValueError, match=f"attention='{name}' .*nearest"):
        choose_backend(name, AttentionNeeds(torch.device("cpu"), torch.float32))
    choice = choose_backend("auto", AttentionNeeds(torch.device("cpu"), torch.float32))
    assert choice.name == "torch" and choice.reason


REFUSED = [  # target's changes, kv_cache_dtype, what is said after the backend's name, nearest setting
    (dict(kv_lora_rank=128), "fp8", "keeps latents (MLA) in the model's own dtype or as fp8_ds_mla", "fp8_ds_mla"),
    (dict(kv_lora_rank=128), "int8", "keeps latents (MLA) in the model's own dtype or as fp8_ds_mla", "fp8_ds_mla"),
    (dict(), "int8", "keeps latents (MLA) in the model's own dtype or as fp8_ds_mla", "auto"),
    (dict(kv_lora_rank=128), "int8_keys", "keeps latents (MLA) in the model's own dtype or as fp8_ds_mla", "fp8_ds_mla"),
    (dict(), "fp8_ds_mla", "keeps latents of a multiple of 128 numbers as fp8_ds_mla, these have 16", "auto"),
]


def on_meta(folder: Path, tmp_path: Path) -> Path:
    """A copy of a model of which only names and sizes can be read."""
    return cut_numbers(Path(shutil.copytree(folder, tmp_path / "without numbers")))


@pytest.mark.parametrize(("changes", "kept", "problem", "nearest"), REFUSED)
def test_latents_in_8_bits_are_refused_at_the_door(
    changes: dict[str, Any], kept: str, problem: str, nearest: str, tmp_path: Path
) -> None:
    """Keeps out: an MLA target that keeps latents another way than it was asked to, or an error after the weights."""
    folder = save_deepseek(tmp_path / "whole", "v3", **changes)
    settings: dict[str, Any] = dict(device="cpu", max_seq_len=64)
    said = re.escape(f"attention='torch' {problem}, got kv_cache_dtype='{kept}'; nearest setting that works: ")
    with pytest.raises(ValueError, match=f"^{said}kv_cache_dtype='{nearest}'$"):
        SpecDecoder.from_pretrained(on_meta(folder, tmp_path), kv_cache_dtype=kept, **settings)
    decoder = SpecDecoder.from_pretrained(folder, kv_cache_dtype=nearest, **settings)
    assert decoder.settings.options.kv_cache_dtype == nearest


def test_8_bit_latents_are_refused_where_a_model_keeps_none(zoo: Zoo, tmp_path: Path) -> None:
    """Keeps out: keys and values of ordinary heads kept in 16 bits although 8 were asked for."""
    said = (
        "keeps latents .* as fp8_ds_mla, which these models have none of, got kv_cache_dtype='fp8_ds_mla'; nearest setting that"
    )
    with pytest.raises(ValueError, match=f"{said} works: kv_cache_dtype='fp8'$"):
        target = on_meta(zoo.target("llama"), tmp_path)
        SpecDecoder.from_pretrained(target, kv_cache_dtype="fp8_ds_mla", device="cpu", max_seq_len=64)


@pytest.mark.parametrize("kept", ["auto", "fp8"])
def test_int8_queries_without_int8_keys_are_refused(kept: str, zoo: Zoo, tmp_path: Path) -> None:
    """Keeps out: queries that stay as they are although int8 was asked for, or that meet float8 keys."""
    said = f"rounds queries to int8 where keys are in int8, got int8_queries=True with kv_cache_dtype='{kept}'; nearest setting"
    with pytest.raises(ValueError, match=f"{said} that works: kv_cache_dtype='int8_keys'$"):
        target = on_meta(zoo.target("llama"), tmp_path)
        SpecDecoder.from_pretrained(target, kv_cache_dtype=kept, int8_queries=True, device="cpu", max_seq_len=64)


@pytest.mark.parametrize("name", ["fa2", "fa3", "fa4"])
def test_8_bit_kv_on_flash_attn_is_refused_at_the_door(
    name: str, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keeps out: a door that asks the table for less than was asked of it.  The GPU is a stand-in."""
    fake_flash.install(monkeypatch)
    monkeypatch.setattr("specdec.loading.resolve.resolve_device", torch.device)
    monkeypatch.setattr("specdec.loading.resolve.architecture_of", lambda device: (9, 0))
    target = on_meta(zoo.target("llama"), tmp_path)
    settings: dict[str, Any] = dict(device="cuda:0", dtype="bfloat16", page_size=256, max_seq_len=64)
    own = "own dtype or as fp8" if name == "fa3" else "own dtype"
    said = f"attention='{name}' reads KV in the models' {own}, got kv_cache_dtype='int8'; nearest setting that works: "
    with pytest.raises(ValueError, match=f"^{said}kv_cache_dtype='auto' or attention='triton'$"):
        SpecDecoder.from_pretrained(target, attention=name, kv_cache_dtype="int8", **settings)
    for attention, kept in ((name, "auto"), ("triton", "int8")):  # what it calls nearest passes the door
        with pytest.raises(ValueError, match="is no whole safetensors file"):
            SpecDecoder.from_pretrained(target, attention=attention, kv_cache_dtype=kept, **settings)


def test_the_longest_text_names_the_key_that_sets_it(tmp_path: Path) -> None:
    """Keeps out: max_position_embeddings=256 called 64, because longrope turns texts beyond 64 otherwise."""
    for longrope, limit, why in ((True, 64, "original_max_position_embeddings"), (False, 256, "max_position_embeddings")):
        changes = COMMON | FAMILIES["phi3-longrope" if longrope else "phi3"][1]
        CONFIG_MAPPING["phi3"](**changes).save_pretrained(tmp_path)
        config = read_transformers_config(tmp_path)
        said = rf"at most {limit}, its {why}\b.*; got 300; nearest setting: {limit}"
        with pytest.raises(ValueError, match=said):
            resolve_max_seq_len(300, config)
        assert resolve_max_seq_len(None, config) == limit


def test_folders(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    for name, match in [
        (file, "got the file .*model.safetensors"),
        ("./nowhere", "existing model folder or a hub id"),
        ("a/b/c", "draft: .* hub id"),
        ("a" * 5000, "draft must be a folder .*: .*name too long"),
        ("no such/thing here", "draft is no local folder, and no hub id"),
    ]:
        with pytest.raises(ValueError, match=match):
            resolve_folder(name, "draft")
    assert resolve_folder(str(tmp_path), "target") == tmp_path


@pytest.mark.parametrize(
    ("draft", "near"), [("Ngram", "'ngram'"), ("MTP", "'mtp'"), ("mtp ", "'mtp'"), ("none", "None"), ("eagle", "")]
)
def test_a_misspelt_drafter_is_named(draft: str, near: str) -> None:
    """Keeps out: a name of a drafter, written otherwise, of which is said only that it is no folder."""
    with pytest.raises(ValueError, match="existing model folder or a hub id") as error:
        head_folder(draft)
    assert str(error.value).partition("nearest setting that works: draft=")[2] == near


def test_auto_means_what_it_says(zoo: Zoo) -> None:
    config = read_target_config(zoo.target("llama"))
    assert resolve_dtype("auto", config, torch.device("cpu")) == torch.float32
    assert resolve_device("cpu").type == "cpu" and resolve_max_seq_len(None, config) == 256
    if not torch.cuda.is_available():
        assert resolve_device("auto").type == "cpu"
        with pytest.raises(ValueError, match="device='cuda' asks for a GPU, but torch sees none; nearest: device='cpu'"):
            resolve_device("cuda")
