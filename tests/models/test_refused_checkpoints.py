"""Folders that are broken, swapped or absurd are refused in one line that names the file, before time or memory goes into them.

Each test is about files and weights; `test_config_fuzz.py` is about values of config.json.
"""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from toolkit.deepseek import save_deepseek
from toolkit.families import save_family
from toolkit.models import Zoo, save_eagle1, save_eagle3, save_target
from torch import Tensor

from specdec.draft.load import load_head
from specdec.models.checkpoints.checkpoint import resolve_folder
from specdec.models.checkpoints.finite import FiniteCheck
from specdec.models.checkpoints.frame import check_tensors, open_target
from specdec.models.config import read_json
from specdec.models.llama.loader import FAMILY
from specdec.models.registry import choose_target, load_chosen
from specdec.models.target import Target
from specdec.shipped import FOLDER as PAIR

Tensors = dict[str, Tensor]
CPU = torch.device("cpu")
NAN, INF = float("nan"), float("inf")
MEANT = "the model that this head drafts for as target, and this folder as its draft"
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


def load(folder: Path, backend: str = "auto", dtype: torch.dtype = torch.float32) -> Target:
    return load_chosen(choose_target(folder, backend), folder, 64, CPU, dtype, cuda_graphs=False)


def load_draft(folder: Path, zoo: Zoo) -> None:
    load_head(folder, load(zoo.target("llama")), 64, CPU, torch.float32)


def change_weights(folder: Path, change: Callable[[Tensors], Any]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def set_last(name: str, value: float) -> Callable[[Tensors], None]:
    """Sets the very last number of a tensor."""

    def change(tensors: Tensors) -> None:
        tensors[name].view(-1)[-1] = value

    return change


def change_config(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | changes))
    return folder


def refused(call: Callable[[], Any], *says: str) -> None:
    """The error is one line and says all that."""
    with pytest.raises(ValueError) as info:
        call()
    message = str(info.value)
    assert "\n" not in message and len(message) < 700, message
    assert all(part in message for part in says), message


# ---- weights that are not finite ----


HELD = [(dtype, value) for dtype in DTYPES for value in (NAN, INF, -INF)]
HELD = [case for case in HELD if not (case[0] == torch.float8_e4m3fn and abs(case[1]) == INF)]  # which has no infinity


@pytest.mark.parametrize(("dtype", "value"), HELD, ids=str)
def test_one_bad_number_among_many_is_seen(dtype: torch.dtype, value: float) -> None:
    """Keeps out: a check of sums, which large numbers overflow, of a sample, or one that 8-bit dtypes have no kernel for; and
    an error for a rank's run of a vocabulary that is empty."""
    check, largest = FiniteCheck(), torch.finfo(dtype).max
    check.see("empty", torch.empty(0, 5, dtype=dtype))
    for name, last in (("fine", largest), ("least", -largest), ("bad", value), ("zero", 0.0)):
        tensor = torch.full((3, 5), largest, dtype=torch.float64)
        tensor[-1, -1] = last
        check.see(name, tensor.to(dtype))
    assert check.not_finite() == ["bad"] and check.not_finite() == []


TARGETS = [
    ("qwen3", "model.layers.2.mlp.up_proj.weight"),
    ("qwen3", "model.layers.0.self_attn.k_proj.weight"),
    ("qwen3", "model.layers.3.self_attn.k_norm.weight"),
    ("qwen3", "model.embed_tokens.weight"),
    ("qwen2", "model.layers.1.self_attn.v_proj.bias"),
    ("v3", "model.layers.1.mlp.experts.7.down_proj.weight"),
    ("v3", "model.layers.1.mlp.gate.e_score_correction_bias"),
    ("v3", "model.layers.2.self_attn.kv_a_proj_with_mqa.weight"),
    ("v3", "model.layers.0.self_attn.q_b_proj.weight"),
]


@pytest.mark.slow_cases
@pytest.mark.parametrize(("model", "name"), TARGETS)
def test_a_target_that_is_not_finite(tmp_path: Path, model: str, name: str) -> None:
    """Keeps out: a target with NaN weights that benches as a success, with every text empty and "equal"."""
    folder = save_deepseek(tmp_path, model) if model == "v3" else save_target(tmp_path, model)
    load(folder)
    for value in (NAN, INF):
        change_weights(folder, set_last(name, value))
        refused(lambda: load(folder), f"{folder}/model.safetensors: tensor {name!r} holds NaN or infinity")


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.experts.gate_up_proj", "model.layers.0.self_attn.sinks", "lm_head.weight"]
)
def test_a_target_through_transformers_that_is_not_finite(tmp_path: Path, name: str) -> None:
    """Keeps out: NaN reported as tokens mixed outside of attention, or not at all."""
    folder = save_family(tmp_path, "gpt_oss", 0, sliding_window=8, num_local_experts=4, num_experts_per_tok=2)
    change_weights(folder, set_last(name, NAN))
    refused(lambda: load(folder, "transformers"), f"{folder}/model.safetensors: tensor {name!r} holds NaN or infinity")


@pytest.mark.parametrize("name", ["fc.weight", "midlayer.hidden_norm.weight", "lm_head.weight"])
def test_a_head_that_is_not_finite(tmp_path: Path, zoo: Zoo, name: str) -> None:
    """Keeps out: a NaN head that loads silently and drafts nothing that is ever accepted."""
    folder = change_weights(save_eagle3(tmp_path, zoo.target("llama")), set_last(name, NAN))
    refused(lambda: load_draft(folder, zoo), f"{folder}/model.safetensors: tensor {name!r} holds NaN or infinity")


def test_numbers_beyond_the_dtype_asked_for(tmp_path: Path) -> None:
    """Keeps out: float32 weights that become infinite in float16, blamed on the checkpoint."""
    folder = change_weights(save_target(tmp_path, "llama"), set_last("model.norm.weight", 1e5))
    load(folder)
    refused(lambda: load(folder, dtype=torch.float16), "'model.norm.weight' holds numbers too large", "dtype='bfloat16'")


def test_the_host_waits_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a check that makes the host wait for the device at every tensor."""
    reads: list[int] = []
    for read in ("item", "tolist", "__bool__", "cpu", "numpy"):
        plain = getattr(Tensor, read)
        monkeypatch.setattr(Tensor, read, lambda *args, plain=plain: reads.append(1) or plain(*args))
    load(save_target(tmp_path, "llama"), "native")
    assert len(reads) == 1


# ---- weights of another kind ----


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_weights_are_floats(tmp_path: Path, dtype: torch.dtype, backend: str) -> None:
    """Keeps out: integer norms, which say that the checkpoint is quantised or broken, taken for weights."""
    name = "model.layers.1.input_layernorm.weight"
    folder = change_weights(save_target(tmp_path, "llama"), lambda t: t.update({name: t[name].to(dtype)}))
    refused(
        lambda: load(folder, backend), f"{folder}/model.safetensors: tensor {name!r} must hold floating-point numbers, got "
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_floats_of_every_size_load(tmp_path: Path, dtype: torch.dtype) -> None:
    """Keeps out: bytes of another size taken for numbers of the model's dtype."""
    name = "model.layers.1.input_layernorm.weight"
    folder = change_weights(save_target(tmp_path, "llama"), lambda t: t.update({name: t[name].to(dtype)}))
    want = load_file(folder / "model.safetensors")[name].float()
    assert torch.equal(load(folder).state_dict()[name.removeprefix("model.")], want)


def wrapping(d2t: Tensor) -> Tensor:
    """Ids that each seem greater than the one before, since int64 wraps around, and that end inside the vocabulary."""
    ids = torch.tensor([0, 2**63 - 1, -(2**63) + 5, -1, *range(4, len(d2t))])
    return ids - torch.arange(len(d2t))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d2t: d2t.float(), "tensor 'd2t' must hold integers, got F32"),
        (lambda d2t: d2t + 0.5, "tensor 'd2t' must hold integers, got F32"),
        (lambda d2t: d2t - 40, "d2t must hold offsets"),
        (lambda d2t: d2t + 40, "d2t must hold offsets"),
        (wrapping, "d2t must hold offsets"),
    ],
)
def test_draft_ids(tmp_path: Path, zoo: Zoo, change: Callable[[Tensor], Tensor], says: str) -> None:
    """Keeps out: ids cut down from floats, and ids outside of the vocabulary that the last check of a row misses."""
    folder = change_weights(save_eagle3(tmp_path, zoo.target("llama")), lambda t: t.update(d2t=change(t["d2t"])))
    refused(lambda: load_draft(folder, zoo), f"{folder}/model.safetensors", says)


# ---- files ----


def test_indices_that_are_broken(tmp_path: Path, zoo: Zoo) -> None:
    """Keeps out: a KeyError for an index without its map, and weights read from outside of the model's folder."""
    folder = tmp_path / "model"
    shutil.copytree(zoo.target("llama"), folder)
    (folder / "model.safetensors").rename(tmp_path / "model.safetensors")
    index = folder / "model.safetensors.index.json"
    for text, says in (
        ("{}", "has no weight_map"),
        ('{"weight_map": null}', "has no weight_map"),
        ('{"weight_map": {}}', "has no weight_map"),
        ('{"weight_map": ["model.safetensors"]}', "weight_map must be an object"),
        ('{"weight_map": {"a": 3}}', "weight_map must give 'a' a .safetensors or .bin file, got 3"),
        ('{"weight_map": {"a": "config.json"}}', "got 'config.json'"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "inside its own folder, got '../model.safetensors' for 'a'"),
        (json.dumps({"weight_map": {"a": str(tmp_path / "model.safetensors")}}), "inside its own folder"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "names files that do not exist: gone.safetensors"),
        ("{", "is not valid JSON"),
        ("[]", "must hold a JSON object, got list"),
    ):
        index.write_text(text)
        for backend in ("native", "transformers"):
            refused(lambda: load(folder, backend), str(index), says)  # noqa: B023


def test_pickles_that_are_broken(tmp_path: Path, zoo: Zoo) -> None:
    """Keeps out: a page of torch's advice to unpickle without a check, for a file that is junk."""
    shutil.copytree(zoo.target("llama"), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    file = tmp_path / "pytorch_model.bin"
    torch.save(tensors, file, _use_new_zipfile_serialization=False)
    load(tmp_path)
    torch.save(tensors, file)
    load(tmp_path)
    whole = file.read_bytes()
    for junk in (b"", b"junk", b"<html>Sign in</html>", whole[: len(whole) // 2], bytes(1000), b"\x80\x02cos\nsystem\n."):
        file.write_bytes(junk)
        for backend in ("native", "transformers"):
            refused(lambda: load(tmp_path, backend), f"{file} is no whole file of torch tensors")  # noqa: B023
    for value, says in (([1], "must hold a dict of tensors by name, got list"), ({"step": 3}, "got int for 'step'")):
        torch.save(value, file)
        refused(lambda: load(tmp_path), str(file), says)


def test_safetensors_that_are_cut_off(tmp_path: Path, zoo: Zoo) -> None:
    """Keeps out: a download that broke off, anywhere, reported without its file's name."""
    shutil.copytree(zoo.target("llama"), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for length in (0, 4, 8, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        for backend in ("native", "transformers"):
            refused(lambda: load(tmp_path, backend), f"{file} is no whole safetensors file")  # noqa: B023
    file.unlink()
    file.mkdir()
    refused(lambda: load(tmp_path), f"{file}: expected a safetensors file that can be read, got a folder")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b'{"model_type": "\xff"}', "is not valid UTF-8"),
        (b"\xff\xfe{\x00}\x00", "is not valid UTF-8"),
        (b"", "is not valid JSON"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b'{"model_type": "llama", "model_type": "qwen2"}', "is not valid JSON: the key 'model_type' stands twice"),
        (b"null", "must hold a JSON object, got NoneType"),
        (b'"llama"', "must hold a JSON object, got str"),
    ],
    ids=lambda x: str(x)[:20],
)
def test_json_that_is_broken(tmp_path: Path, zoo: Zoo, text: bytes, says: str) -> None:
    """Keeps out: "'utf-8' codec can't decode byte" without a file's name, whatever the machine's own encoding."""
    file = tmp_path / "config.json"
    file.write_bytes(text)
    for call in (lambda: choose_target(tmp_path), lambda: load_draft(tmp_path, zoo), lambda: read_json(file)):
        refused(call, str(file), says)


def test_config_is_read_as_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("locale.getencoding", lambda: "ascii")
    (tmp_path / "config.json").write_bytes('{"_name": "Grüße"}'.encode())
    assert read_json(tmp_path / "config.json") == {"_name": "Grüße"}


def test_no_name_is_no_folder() -> None:
    """Keeps out: an empty name, which a Path takes for the folder that the command happens to run in."""
    refused(lambda: resolve_folder("", "target"), "target must be a folder or a hub id")


# ---- target and draft swapped ----


def test_a_head_given_for_a_target(tmp_path: Path, zoo: Zoo) -> None:
    """Keeps out: an error about unknown keys or missing tensors, for two arguments in the wrong order."""
    refused(lambda: load(PAIR / "draft"), f"{PAIR}/draft/config.json: expected a target", MEANT)
    plain = save_eagle1(tmp_path, zoo.target("llama"))
    refused(lambda: load(plain), f"{plain}/config.json: expected a target", "(bias)", MEANT)
    raw = json.loads((plain / "config.json").read_text())
    del raw["bias"]  # then it is a plain Llama's config
    (plain / "config.json").write_text(json.dumps(raw))
    refused(lambda: load(plain), f"{plain}: expected a target", "(fc.weight)", MEANT)
    refused(lambda: load(plain, "transformers"), f"{plain}: expected a target", MEANT)


def test_a_whole_model_given_for_a_head(zoo: Zoo) -> None:
    """Keeps out: "'fc.weight' is missing" for a folder that holds a whole model."""
    for folder in (zoo.target("llama"), PAIR / "target"):
        refused(lambda: load_draft(folder, zoo), f"{folder}: expected a draft head", "beside a target of its vocabulary")  # noqa: B023


# ---- sizes that nothing holds ----

BILLION = 10**9
FAMILIES = ("llama", "v3", "gpt_oss")
SIZES = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings", "n_routed_experts", "moe_intermediate_size", "n_shared_experts", "kv_lora_rank",
    "q_lora_rank", "qk_nope_head_dim", "num_nextn_predict_layers", "num_local_experts",
)  # fmt: skip


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("absurd")
    save_target(root / "llama", "llama")
    save_deepseek(root / "v3", "v3")
    save_family(root / "gpt_oss", "gpt_oss", 0, sliding_window=8, num_local_experts=4, num_experts_per_tok=2)
    return {name: root / name for name in FAMILIES}


@pytest.mark.slow_cases(keep=12)
@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_absurd_sizes_are_refused_at_once(families: dict[str, Path], tmp_path: Path, family: str, key: str) -> None:
    """Keeps out: a command that hangs, or takes all memory, for a config.json that no checkpoint goes with."""
    raw = json.loads((families[family] / "config.json").read_text())
    shutil.copytree(families[family], tmp_path, dirs_exist_ok=True)
    unused = key not in raw or (family == "v3" and key in ("head_dim", "num_key_value_heads"))
    for value in (5000, BILLION, 10**30):
        if unused or (key == "max_position_embeddings" and value == 5000):
            continue
        change_config(tmp_path, **{key: value})
        start = time.process_time()
        refused(lambda: load(tmp_path), str(tmp_path))
        assert time.process_time() - start < 5


@pytest.mark.slow_cases
@pytest.mark.parametrize("save", [save_eagle1, save_eagle3], ids=["eagle1", "eagle3"])
def test_absurd_sizes_of_heads(tmp_path: Path, zoo: Zoo, save: Callable[[Path, Path], Path]) -> None:
    """Keeps out: the same hang, in a head."""
    folder = save(tmp_path, zoo.target("llama"))
    raw = json.loads((folder / "config.json").read_text())
    for key in (*SIZES[:7], "draft_vocab_size", "target_hidden_size"):
        for value in (1000, BILLION):  # test_config_fuzz.py tries 10**30 with every key
            (folder / "config.json").write_text(json.dumps(raw | {key: value}))
            refused(lambda: load_draft(folder, zoo), str(folder))


def test_layers_are_counted_in_the_checkpoint(tmp_path: Path) -> None:
    """Keeps out: an error that names a tensor of a layer, where the number of layers is what is wrong."""
    folder = change_config(save_target(tmp_path, "llama"), num_hidden_layers=7)
    refused(lambda: load(folder), f"{folder}/config.json: num_hidden_layers is 7, but the checkpoint holds 4 layers")


@pytest.mark.parametrize(("key", "said"), [
    ("intermediate_size", ("gate_proj.weight", "(64, 32), got (48, 32)", "by intermediate_size and hidden_size")),
    ("vocab_size", ("embed_tokens.weight", "(64, 32), got (40, 32)", "by vocab_size and hidden_size")),
])  # fmt: skip
def test_sizes_are_compared_before_memory_is_taken(tmp_path: Path, key: str, said: tuple[str, ...]) -> None:
    """Keeps out: modules built for sizes that fit in memory here, and would not on another machine."""
    folder = change_config(save_target(tmp_path, "llama"), **{key: 64})
    config, family = choose_target(folder).config, FAMILY._replace(layer=lambda *_: pytest.fail("modules were built"))
    refused(lambda: check_tensors(open_target(folder, config), family, config), *said)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("model.layers.3.mlp.down_proj.weight"), "'model.layers.3.mlp.down_proj.weight' is missing"),
        (lambda t: t.update(odd_proj_blocks=torch.ones(2)), "1 tensors are not part of this architecture: odd_proj_blocks"),
        (lambda t: t.update({"model.norm.weight": torch.ones(32).int()}), "'model.norm.weight' must hold floating-point"),
    ],
)
def test_headers_are_checked_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensors], Any], says: str
) -> None:
    """Keeps out: minutes of reading before an error that names and shapes had shown at once."""
    folder = change_weights(save_target(tmp_path, "llama"), change)
    monkeypatch.setattr("specdec.models.checkpoints.files.StoredTensor.read", property(lambda _: pytest.fail("was read")))
    refused(lambda: load(folder), says)
