"""`specdec inspect` of a target: what it says against transformers' own models, and how it tells a target from a head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from safetensors.torch import load_file, save_file
from toolkit.checkpoints.gguf_files import write_gguf
from toolkit.checkpoints.gpt_oss import save_gpt_oss
from toolkit.checkpoints.mixtures import save_mixture
from toolkit.checkpoints.native import ABSENT, NativeZoo
from toolkit.checkpoints.plans import plan_memory
from toolkit.checkpoints.tokenizers import byte_tokenizer
from toolkit.families import FAMILIES, eager, save_family
from toolkit.heads.block_parts import BlockOptions, random_block_parts
from toolkit.heads.block_writers import BLOCK_WRITERS
from toolkit.heads.parts import Options, random_parts
from toolkit.heads.writers import WRITERS, save
from toolkit.models import HEADS, Zoo, save_target
from toolkit.mtp_layers.targets import save_mtp_target
from toolkit.oracles.quantised import SCHEMES, save_quantised

from specdec import EngineOptions, SpecConfig, cli, shipped
from specdec.loading.about.inspect_target import is_head, target_facts
from specdec.models.registry import choose_target


def facts_of(capsys: pytest.CaptureFixture[str], folder: Path, *flags: str) -> dict[str, Any]:
    assert cli.main(["inspect", str(folder), *flags, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.slow_cases(keep=3)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_described_as_transformers_has_it(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keeps out: tied embeddings counted twice, experts left out, sizes of another key, a token's bytes unlike the plan's."""
    folder = save_family(tmp_path, FAMILIES[name][0], 0, **FAMILIES[name][1])
    facts, hf = facts_of(capsys, folder), eager(folder)
    assert facts["kind"] == "target" and facts["architectures"] == [type(hf).__name__]
    held = {tensor.data_ptr(): tensor.numel() for tensor in hf.state_dict().values()}  # tied ones once
    assert facts["weights"]["parameters"] == sum(held.values())
    shown, config = facts["target"], hf.config
    assert [shown[key] for key in ("layers", "hidden_size", "vocab_size")] == [
        config.num_hidden_layers, config.hidden_size, config.vocab_size,
    ]  # fmt: skip
    heads = shown["heads, kv heads, head_dim"]  # by kind of layer where these have unlike heads
    assert (heads if isinstance(heads, list) else next(iter(heads.values())))[0] == config.num_attention_heads
    assert shown["embeddings"].startswith("tied" if config.tie_word_embeddings else "apart")
    assert shown["context"].startswith(f"{config.max_position_embeddings} ") or name == "phi3-longrope"
    assert ("experts" in shown) == any(getattr(config, key, 0) for key in ("num_local_experts", "num_experts"))
    plan = plan_memory(folder, None, None, EngineOptions(), 10**9)
    assert (
        shown["bytes of a token's keys and values"] == plan.kv_token[0] and facts["weights"]["stored as"] == plan.target_weights
    )
    assert facts["backend"] == ("native" if facts["why"].startswith("a native module") else "transformers")


def test_a_mixture_says_its_shared_experts_and_dense_layers(tmp_path: Path) -> None:
    """Keeps out: shared experts that no key counts, left out; layers without experts that nobody tells."""
    shown = target_facts(save_mixture(tmp_path / "moe", "qwen2-moe-normed"))["target"]["experts"]
    assert shown == {"experts": 8, "of a token": 3, "size of one": 24, "size of shared ones": 28, "dense": "layer 0"}


def test_a_copy_of_tied_embeddings_is_no_parameter(tmp_path: Path) -> None:
    """Keeps out: an output layer that repeats the embeddings in the file, counted as weights of its own."""
    folder = save_target(tmp_path, "llama3-tied-dim8")
    before, tensors = target_facts(folder)["weights"], load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    after = target_facts(folder)["weights"]
    assert after["parameters"] == before["parameters"] and after["tensors"] == before["tensors"] + 1


@pytest.mark.parametrize("name", ["fp8 block", "w4a16 g32 asym in act order", "awq", "gptq4 v2 asym", "nvfp4", "mxfp4"])
def test_quantised_weights_count_as_the_parameters_that_they_stand_for(name: str, tmp_path: Path) -> None:
    """Keeps out: a model of 8 billion parameters that is told as one of 1.3, since eight values lie in an integer."""
    quantised, plain = save_quantised(tmp_path, SCHEMES[name])
    found, expected = target_facts(quantised)["weights"], target_facts(plain)["weights"]
    assert found["parameters"] == expected["parameters"] and found["bytes of the files"] < expected["bytes of the files"]
    assert found["stored as"] == plan_memory(quantised, None, None, EngineOptions(), 10**9).target_weights


def test_quantised_experts_count_too(tmp_path: Path) -> None:
    """Keeps out: gpt-oss's blocks and scales taken for numbers."""
    quantised, plain = save_gpt_oss(tmp_path)
    assert target_facts(quantised)["weights"]["parameters"] == target_facts(plain)["weights"]["parameters"]
    assert target_facts(quantised)["backend"] == "native" and target_facts(quantised)["target"]["sinks"]


def test_a_gguf_file_is_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: a target that can be run and not be looked at; bytes by the bits of values, without their scales."""
    folder = save_target(tmp_path / "t", "llama", hidden_size=64, intermediate_size=96)
    path = write_gguf(folder, tmp_path / "t.gguf", lambda name: "Q8_0")
    facts, whole = facts_of(capsys, path), target_facts(folder)
    assert facts["weights"]["parameters"] == whole["weights"]["parameters"]
    held = sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors)
    assert facts["weights"]["stored as"].startswith("30 x Q8_0, 9 x F32; ")
    assert facts["weights"]["bytes of the files"] == held and facts["why"] == "a GGUF file"
    same = ("layers", "hidden_size", "heads, kv heads, head_dim", "rope", "context")
    assert {key: facts["target"][key] for key in same} == {key: whole["target"][key] for key in same}


def test_ends_say_which_file_names_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: a chat that writes on after its turn, in which nobody can find out what ends it."""
    folder = save_target(tmp_path, "bytes", eos_token_id=[3, 7])
    tokenizer = byte_tokenizer(382)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    tokenizer.save_pretrained(folder)
    assert target_facts(folder)["text"]["texts end at"][-1] == "383 ('<|im_end|>', by the chat template)"
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    text = facts_of(capsys, folder)["text"]
    assert [end.split(" ")[0] for end in text["texts end at"]] == ["7", "383"]
    assert text["texts end at"][0].endswith("by config.json and generation_config.json)")
    assert text["named as ends, and not taken"] == [3] and text["chat template"] == "present"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 383}))  # the template's own end, in vain there
    text = facts_of(capsys, folder)["text"]
    assert (
        text["texts end at"][1].endswith("by config.json and the chat template)") and "named as ends, and not taken" not in text
    )
    assert target_facts(save_target(tmp_path / "bare", "llama"))["text"]["texts end at"].startswith("no token")


@pytest.mark.parametrize("family", ["llama", "diffllama", "gpt_oss"])
def test_what_a_config_does_not_say_is_what_its_family_takes(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keeps out: the defaults of one family told of another one, which has others."""
    absent = dict.fromkeys(("rms_norm_eps", "max_position_embeddings"), ABSENT)
    folder, _ = NativeZoo(tmp_path / "zoo").changed(family, absent, tmp_path)
    said, config = facts_of(capsys, folder)["meanings"], choose_target(folder).config
    assert float(said["rms_norm_eps"].removeprefix("absent: ")) == config.rms_norm_eps
    assert int(said["max_position_embeddings"].removeprefix("absent: ")) == config.max_position


def test_mtp_layers_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: layers that draft, counted as the target's own; and "yes" for layers that can't be read."""
    folder = save_mtp_target(tmp_path, "v3")
    facts = facts_of(capsys, folder)
    drafted = plan_memory(folder, "mtp", SpecConfig(2, 1), EngineOptions(dtype="float32"), 10**9).parts
    without = [name for name in load_file(folder / "model.safetensors") if "shared_head" in name or "embed_tokens" in name]
    assert facts["drafters"]["mtp"].startswith("yes") and without
    assert 4 * facts["weights"]["parameters of MTP layers"] >= drafted["weights of the draft head"] > 0
    assert 4 * facts["weights"]["parameters"] == drafted["weights of the target"]
    assert facts["target"]["attention"].startswith("latents of rank")
    mtp = facts_of(capsys, Path("mtp"), "--target", str(folder))
    assert (mtp["kind"], mtp["target_weights"], mtp["head"]["weights"]) == ("head", "float32", "float32")


def test_a_head_is_told_from_a_target(zoo: Zoo, tmp_path: Path) -> None:
    """Keeps out: a head of any layout that is described as a target, or the reverse."""
    for name, write in WRITERS.items():
        assert is_head(save(tmp_path / name, write(random_parts(Options(own_embeddings=True))))), name
    for name, write_block in BLOCK_WRITERS.items():
        copies = name == "deepspec"
        options = BlockOptions(own_embeddings=copies, own_lm_head=copies) if name == "z-lab" else BlockOptions("dspark", rank=6)
        assert is_head(save(tmp_path / f"block {name}", write_block(random_block_parts(options)))), name
    assert all(is_head(zoo.head("llama", kind)) for kind in HEADS) and is_head(shipped.draft_folder())
    for name in ("llama", "qwen3", "diffllama"):
        assert not is_head(zoo.target(name))


def test_a_head_stays_a_head(capsys: pytest.CaptureFixture[str], zoo: Zoo, tmp_path: Path) -> None:
    """Keeps out: a folder without a model that is described, and a flag about heads that a target ignores."""
    target, draft = shipped.target_folder(), shipped.draft_folder()
    assert facts_of(capsys, draft)["kind"] == "head" and facts_of(capsys, target)["kind"] == "target"
    for argv, said in (
        ([str(target), "--target", str(target)], "is the target itself, and a model does not draft for itself"),
        ([str(target), "--draft-format", "safeailab"], "expected a draft head, got a whole model's weights"),
        (["ngram"], "'ngram' is a drafter without files"),
        ([str(tmp_path)], "config.json does not exist; .* the folder is empty"),
    ):
        assert cli.main(["inspect", *argv]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and all(part in err for part in said.split(" .* ")), argv


def test_tables_say_what_the_facts_do(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a page for people that leaves out what a program is told."""
    monkeypatch.setenv("COLUMNS", "80")
    facts = facts_of(capsys, Path(shipped.target_folder()))
    assert cli.main(["inspect", str(shipped.target_folder())]) == 0
    out = capsys.readouterr().out
    said = " ".join(out.split())
    assert max(len(line.rstrip()) for line in out.splitlines()[1:]) <= 80 and len(out.splitlines()) <= 40
    for table in ("target", "weights", "text", "drafters"):
        assert all(key in said for key in facts[table]), table
    assert f"{facts['weights']['parameters']:,}" in said and "specdec's own module" in said
