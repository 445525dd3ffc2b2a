"""What users are told of MTP layers: `inspect`, `plan`, `doctor`, and what is refused by name before anything is loaded."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from toolkit.checkpoints.plans import plan_memory
from toolkit.families import save_family
from toolkit.models import Zoo
from toolkit.mtp_layers.targets import COUNT, TARGETS, MtpZoo, save_mtp_target
from toolkit.oracles.quantised import SCHEMES, as_quantised

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.cli.entry import main
from specdec.loading.about.doctor import drafter_rows
from specdec.loading.plan import scratch_values
from specdec.models.checkpoints.frame import open_target
from specdec.models.checkpoints.mtp_names import mtp_prefixes
from specdec.models.layers import Rotary
from specdec.models.linear import Linear
from specdec.models.registry import choose_target, load_chosen
from specdec.options import EngineOptions


@pytest.mark.parametrize("name", ["v3-two", "v32", "glm4", "mimo", "hy3-biased-two", "ernie", "mimo-v2-three"])
def test_inspect(mtp_zoo: MtpZoo, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: a table that leaves out a tensor or a rule."""
    folder = mtp_zoo.target(name)
    capsys.readouterr()
    assert main(["inspect", "mtp", "--target", str(folder), "--json"]) == 0
    facts, raw = json.loads(capsys.readouterr().out), json.loads((folder / "config.json").read_text())
    own = [key for key in load_file(folder / "model.safetensors") if is_mtp(key, raw)]
    shared = ["model.norm.weight"] if name == "ernie" else []
    assert set(facts["tensors"]) | set(facts["beside"]) == {*own, *shared}
    assert facts["head"]["layers"] == TARGETS[name][1].get(COUNT, 1) and facts["format"] == raw["model_type"]
    assert main(["inspect", "mtp", "--target", str(folder)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert ("join hidden state, embedding" if name == "mimo" else "join embedding, hidden state") in said


def is_mtp(name: str, raw: dict[str, Any]) -> bool:
    if "mtp_" in name or "mtp." in name:
        return True
    number = name.removeprefix("model.layers.").partition(".")[0]
    return number.isdecimal() and int(number) >= raw["num_hidden_layers"]


@pytest.mark.parametrize("name", ["v3-two", "mimo", "mimo-v2-three"])
def test_plan_counts_each_weight_once(mtp_zoo: MtpZoo, name: str) -> None:
    folder = mtp_zoo.target(name)
    plan = plan_memory(folder, "mtp", SpecConfig(3, 1, 4), EngineOptions(dtype="float32"), 10**10)
    decoder = mtp_zoo.decoder(name, "mtp", SpecConfig(3, 1, 4))
    model, head = decoder.model, decoder.head
    assert head is not None
    sizes = {x.data_ptr(): x.nbytes for x in (*model.parameters(), *model.buffers())}
    more = {x.data_ptr(): x.nbytes for x in (*head.parameters(), *head.buffers()) if x.data_ptr() not in sizes}
    rotaries = [each for module in (model, head) for each in module.modules() if isinstance(each, Rotary)]
    tables = sum(rotary.table.nbytes for rotary in rotaries)  # which no checkpoint holds
    target, layers = (plan.parts[key] for key in ("weights of the target", "weights of the draft head"))
    assert target + layers == sum(sizes.values()) + sum(more.values()) - tables
    assert len(plan.kv_token) == 2 and plan.kv_token[1] <= plan.kv_token[0]


def test_doctor_names_the_kind() -> None:
    assert "deepseek_v3" in dict(drafter_rows())["mtp"] and "glm4_moe" in dict(drafter_rows())["mtp"]


NAMED_OTHERWISE: dict[str, dict[str, Any]] = {  # targets whose layers have names of their own
    "hy_v3": dict(head_dim=8, num_experts=8, num_experts_per_tok=3, num_shared_experts=1, moe_intermediate_size=24),
    "ernie4_5_moe": dict(moe_num_experts=8, moe_k=3, moe_intermediate_size=24, moe_num_shared_experts=1),
}  # fmt: skip


def changed(folder: Path, to: Path, **keys: Any) -> Path:
    """The same model with other keys in its config; None leaves one out."""
    to.mkdir()
    raw = json.loads((folder / "config.json").read_text()) | keys
    (to / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
    (to / "model.safetensors").hardlink_to(folder / "model.safetensors")
    return to


def test_refused_by_name(mtp_zoo: MtpZoo, zoo: Zoo, tmp_path: Path) -> None:
    """Keeps out: layers that are counted wrongly, or of a family whose rules are not known here."""
    v3, v32 = mtp_zoo.target("v3"), mtp_zoo.target("v32")
    next_like = dict(
        layer_types=["linear_attention", "full_attention"] * 2, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=8, linear_value_head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )  # fmt: skip
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (zoo.target("llama"), {}, "draft='mtp' runs the MTP layers of deepseek_v3, .* got a llama target .* draft='ngram'"),
        (
            changed(mtp_zoo.target("mimo"), tmp_path / "none", **{COUNT: None}),
            {},
            "tensors are not part of this architecture: model.mtp_layers",
        ),
        (changed(v3, tmp_path / "two", **{COUNT: 2}), {}, r"layers\.4\..*is missing .* counts 2 MTP layers"),
        (changed(v32, tmp_path / "sparse", **{COUNT: 2}), {}, "one MTP layer with an indexer, got num_nextn_predict_layers 2"),
        (
            changed(mtp_zoo.target("ernie"), tmp_path / "deep", **{COUNT: 2}),
            {},
            "runs one MTP layer of an ernie4_5_moe target, got num_nextn_predict_layers 2",
        ),
        (save_family(tmp_path / "next", "qwen3_next", 0, **next_like), {}, "'mtp.fc.weight' is missing"),
        (
            changed(mtp_zoo.target("mimo-v2-three"), tmp_path / "uncounted", **{COUNT: 1}),
            {},
            "num_nextn_predict_layers must be 3, the MTP layers that are there, or absent, got 1",
        ),
        (v3, {"draft_format": "specforge"}, "draft_format='specforge' would do nothing with draft='mtp'"),
        (v3, {"beyond_trained": "stop"}, "beyond_trained='stop' would do nothing with draft='mtp'"),
    ]
    for folder, options, said in cases:
        with pytest.raises(ValueError, match=said):
            SpecDecoder.from_pretrained(folder, "mtp", SpecConfig(2, 1, 3), device="cpu", max_seq_len=64, **options)
    with pytest.raises(ValueError, match="topk must be at most the draft vocabulary, 40, got 41"):
        mtp_zoo.decoder("v3", "mtp", SpecConfig(2, 41, 42))
    with pytest.raises(ValueError, match="topk must be at most the draft vocabulary, 40, got 41"):
        plan_memory(v3, "mtp", SpecConfig(2, 41, 42), EngineOptions(dtype="float32"), 10**9)
    assert main(["inspect", "mtp"]) == 2 and main(["inspect", "mtp", "--target", str(zoo.target("llama"))]) == 2


def test_plan_counts_the_largest_quantised_matrix(tmp_path: Path) -> None:
    """Keeps out: prompts that take memory for numbers which the plan forgot; fused parts are one matrix.

    Experts' numbers are computed nowhere on a GPU.
    """
    folder = as_quantised(save_mtp_target(tmp_path / "plain", "v3"), tmp_path / "quantised", SCHEMES["fp8 channel"])
    chosen = choose_target(folder)
    model = load_chosen(chosen, folder, 64, torch.device("cpu"), torch.float32, False)
    qvalues = [
        module.quantised.weight.qweight_NJ for module in model.modules() if isinstance(module, Linear) and module.quantised
    ]
    own = {name for name in open_target(folder, chosen.config).names() if not name.startswith(mtp_prefixes(chosen.config))}
    files = open_target(folder, chosen.config)
    assert scratch_values(files, set(files.names()) - own) == max(matrix.numel() for matrix in qvalues)
    assert scratch_values(open_target(tmp_path / "plain", choose_target(tmp_path / "plain").config), set()) == 0


def test_targets_load_without_their_layers(mtp_zoo: MtpZoo, tmp_path: Path) -> None:
    """Keeps out: a target that needs the layers, and a count of 0 beside their tensors that nobody reads."""
    for name in ("v3", "mimo", "glm4", "mimo-v2"):
        folder = mtp_zoo.target(name)
        raw = json.loads((folder / "config.json").read_text())
        own = {key: x for key, x in load_file(folder / "model.safetensors").items() if not is_mtp(key, raw)}
        (bare := tmp_path / name).mkdir()
        (bare / "config.json").write_text(json.dumps(raw))
        save_file(own, bare / "model.safetensors", metadata={"format": "pt"})
        decoder = SpecDecoder.from_pretrained(bare, device="cpu", max_seq_len=64)
        assert decoder.generate([[1, 2, 3]], SamplingParams(max_tokens=2))[0].token_ids
        with pytest.raises(ValueError, match="is missing for draft='mtp'"):
            SpecDecoder.from_pretrained(bare, "mtp", SpecConfig(2, 1, 3), device="cpu", max_seq_len=64)
        if name == "mimo-v2":  # whose tensors say how many layers there are
            continue
        none = changed(folder, tmp_path / f"{name}-none", **{COUNT: 0})
        with pytest.raises(ValueError, match="tensors are not part of this architecture"):
            SpecDecoder.from_pretrained(none, device="cpu", max_seq_len=64)


def test_copies_of_the_target_s_tables_must_be_equal(mtp_zoo: MtpZoo, tmp_path: Path) -> None:
    """Keeps out: a head that drafts from another table than the one it was trained with."""
    folder = mtp_zoo.target("v3")
    tensors = load_file(folder / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    for key in [key for key in tensors if "layers.3.embed_tokens" in key or "shared_head.head" in key]:
        broken = {**tensors, key: tensors[key] + torch.eye(*tensors[key].shape) * 1e-3}
        save_file(broken, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match="must repeat the target's"):
            SpecDecoder.from_pretrained(tmp_path, "mtp", SpecConfig(2, 1, 3), device="cpu", max_seq_len=64)


def test_a_target_through_transformers_leaves_its_layers_out(mtp_zoo: MtpZoo, caplog: pytest.LogCaptureFixture) -> None:
    """Keeps out: a published DeepSeek checkpoint that loads by specdec's own code alone; a page of transformers' about tensors
    that are left out on purpose; an assertion where its layers are asked for all the same."""
    options: dict[str, Any] = dict(device="cpu", dtype="float32", max_seq_len=64)
    sampling, transformers = SamplingParams(max_tokens=8), logging.getLogger("transformers")
    folder = mtp_zoo.target("v3")
    transformers.addHandler(caplog.handler)
    try:
        decoders = [SpecDecoder.from_pretrained(folder, backend=backend, **options) for backend in ("native", "transformers")]
    finally:
        transformers.removeHandler(caplog.handler)
    texts = [decoder.generate([[1, 2, 3]], sampling)[0].token_ids for decoder in decoders]
    assert texts[0] == texts[1] and "LOAD REPORT" not in caplog.text
    with pytest.raises(ValueError, match="got a target through transformers' code; nearest .* backend='native'"):
        SpecDecoder.from_pretrained(folder, "mtp", SpecConfig(2, 1, 3), backend="transformers", **options)


@pytest.mark.parametrize("family", NAMED_OTHERWISE)
def test_targets_whose_layers_are_left_out_load(tmp_path: Path, family: str) -> None:
    """Keeps out: published Hy3 and ERNIE 4.5 refused for the key that counts their MTP layers, or for their
    tensors; another text than without both; layers that lack tensors."""
    folder = save_family(tmp_path / "plain", family, 5, num_hidden_layers=3, **NAMED_OTHERWISE[family])
    own = load_file(folder / "model.safetensors")
    count, H = changed(folder, tmp_path / "counted", **{COUNT: 1}), own["model.norm.weight"].shape[0]
    if family == "ernie4_5_moe":
        layer = {f"model.mtp_{part}.0.weight": torch.ones(H) for part in ("emb_norm", "hidden_norm", "linear_proj")}
        layer["model.mtp_block.0.mlp.up_proj.weight"] = torch.ones(4, H)
    else:
        layer = {name.replace("layers.2.", "layers.3."): x.clone() for name, x in own.items() if ".layers.2." in name}
        layer |= {"model.layers.3.enorm.weight": torch.ones(H), "model.layers.3.eh_proj.weight": torch.ones(H, 2 * H)}
    (count / "model.safetensors").unlink()
    save_file(own | layer, count / "model.safetensors", metadata={"format": "pt"})
    options: dict[str, Any] = dict(device="cpu", dtype="float32", max_seq_len=64)
    texts = []
    for place in (folder, count):
        with SpecDecoder.from_pretrained(place, **options) as decoder:
            texts.append(decoder.generate([[1, 2, 3]], SamplingParams(max_tokens=8))[0].token_ids)
    assert texts[0] == texts[1]
    with pytest.raises(ValueError, match="is missing for draft='mtp'"):
        SpecDecoder.from_pretrained(count, "mtp", SpecConfig(2, 1, 3), **options)
    with pytest.raises(ValueError, match="is the target itself, .* nearest thing that works: draft='ngram'"):
        SpecDecoder.from_pretrained(count, count, SpecConfig(2, 1, 3), **options)
    plans = [plan_memory(place, None, SpecConfig(2, 1, 3), EngineOptions(dtype="float32"), 10**9) for place in (folder, count)]
    assert plans[0].parts == plans[1].parts


@pytest.mark.parametrize("target", ["v32", "mimo"])
def test_a_target_that_transformers_does_not_run_names_the_backend_that_does(
    mtp_zoo: MtpZoo, target: str, tmp_path: Path
) -> None:
    """Keeps out: advice to take keys out of a published config, where specdec's own module runs it as it is."""
    folder = mtp_zoo.target(target)
    with pytest.raises(ValueError, match="; or backend='native', which computes this target$"):
        SpecDecoder.from_pretrained(folder, backend="transformers", device="cpu")
    raw = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "odd": 1}))
    with pytest.raises(ValueError) as info:
        choose_target(tmp_path, "transformers")
    assert "backend='native'" not in str(info.value), "which would refuse this one, too"
