"""Files of EAGLE-3 heads with latent attention: what is refused, what is said of them, and what else meets such heads.

Keeps out: a latent head that loads with a tensor or a key misread.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from toolkit.checkpoints.load import load_target, read_target_config
from toolkit.heads.kinds.latent_heads import LATENT_HEADS, LATENT_YARN
from toolkit.heads.mutations import Change, id_changes, key_changes, tensor_changes, vocabulary_changes
from toolkit.heads.parts import Latents, Options, random_parts
from toolkit.heads.writers import modelopt_latent, save, torchspec
from toolkit.models import Zoo

from specdec.cli.entry import main
from specdec.draft.eagle.head import Eagle3Head
from specdec.draft.formats.open import open_head
from specdec.draft.formats.parts import tensors_of
from specdec.draft.formats.spec import HeadSpec
from specdec.draft.load import build_head, load_head
from specdec.models.latent.attention import LatentAttention
from specdec.models.layers import SelfAttention
from specdec.train.heads.fresh import new_head
from specdec.train.settings import HeadRun

CPU = torch.device("cpu")
WRITERS = {"modelopt": modelopt_latent, "torchspec": torchspec, "torchspec for vLLM": partial(torchspec, for_vllm=True)}
# What nothing in the files contradicts: numbers and flags that leave every tensor's shape as it is.
UNCHECKED = {
    "ids one higher", "ids one lower", "ids other", "rms_norm_eps of another value", "rope_theta of another value",
    "norm_output of another value", "norm_before_residual of another value", "max_position_embeddings of another value",
    *(f"{key} of another value" for key in ("factor", "mscale", "mscale_all_dim", "original_max_position_embeddings")),
    "rope_scaling removed", "mscale removed", "mscale_all_dim removed", "target_hidden_size removed",
    "architectures removed", "fc_norm removed", "norm_output removed", "norm_before_residual removed",
    "eagle_config removed", "eagle_aux_hidden_state_layer_ids removed",
}  # fmt: skip


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", WRITERS)
def test_no_broken_head_loads_quietly(name: str, zoo: Zoo, tmp_path: Path) -> None:
    """Each missing, misnamed or broken tensor and key is an error or changes nothing, or files can't contradict it."""
    where = zoo.target("llama-linear-8-layers")
    target = load_target(where, read_target_config(where), 64, CPU, torch.float32)
    parts = random_parts(Options(aux=(1, 3, 4), latent=Latents(value=6), rope=LATENT_YARN), seed=4)
    files = WRITERS[name](parts)
    sound = save(tmp_path / "sound", files)
    opened = open_head(sound, target.config)
    weights = build_head(opened, target, 64, CPU, torch.float32).state_dict()
    (broken := tmp_path / "broken").mkdir()
    count, quiet = {"error": 0, "no change": 0}, list[str]()
    for what, config, tensors in changes_of(files):
        (broken / "config.json").write_text(json.dumps(files[0] if config is None else config))
        held = files[1] if tensors is None else tensors
        save_file({key: x.contiguous() for key, x in held.items()}, broken / "model.safetensors")
        try:
            found = open_head(broken, target.config)
            head = build_head(found, target, 64, CPU, torch.float32)
        except (ValueError, TypeError) as error:
            assert len(str(error)) > 20
            count["error"] += 1
            continue
        same = all(torch.equal(tensor, weights[key]) for key, tensor in head.state_dict().items())
        if same and computed(found.parsed.spec) == computed(opened.parsed.spec):
            count["no change"] += 1
        else:
            quiet.append(what.rpartition(".")[2] if "." in what else what)
    assert set(quiet) <= UNCHECKED, sorted(set(quiet) - UNCHECKED)
    assert count["error"] > 120 and len(quiet) < 30, (count, quiet)


def computed(spec: HeadSpec) -> HeadSpec:
    """The part of the spec from which logits follow, given the weights."""
    return replace(spec, model=replace(spec.model, dtype=None))


def changes_of(files: tuple[dict[str, Any], dict[str, torch.Tensor]]) -> list[Change]:
    config, tensors = files
    found = [*tensor_changes(tensors), *vocabulary_changes(tensors)]
    for make in (lambda copy: key_changes(copy, copy, ""), id_changes):
        found += [(what, json.loads(json.dumps(changed)), None) for what, changed, _ in make(json.loads(json.dumps(config)))]
    return found


REFUSED = [  # a key of TorchSpec's config, its value, what is said
    ("mla_use_nope", True, "mla_use_nope must be absent or false"),
    ("tie_word_embeddings", True, "tie_word_embeddings must be absent or false"),
    ("attention_bias", True, "attention_bias must be absent or false"),
    ("kv_lora_rank", None, "lacks kv_lora_rank"),
    ("hidden_act", "gelu", "hidden_act must be 'silu'"),
    ("num_hidden_layers", 2, "num_hidden_layers is 2, but the checkpoint holds one layer"),
    ("v_head_dim", 16, "v_head_dim must be at most"),
    ("kv_lora_rank", 24, "kv_lora_rank"),
    ("q_lora_rank", None, "'midlayer.self_attn.q_proj.weight' is missing"),
    ("sliding_window", 8, "unknown config keys sliding_window"),
    ("architectures", ["DeepseekV3Eagle3DraftModel"], "NeMo"),
]


@pytest.mark.parametrize(("key", "value", "said"), REFUSED, ids=lambda v: str(v)[:30])
def test_what_is_not_computed_is_refused(key: str, value: Any, said: str, tmp_path: Path) -> None:
    config, tensors = torchspec(random_parts(Options(latent=Latents())))
    with pytest.raises(ValueError, match=said):
        open_head(save(tmp_path, ({**config, key: value}, tensors)), None)


def test_a_class_and_its_keys_must_agree(tmp_path: Path) -> None:
    """Keeps out: ordinary heads read as latent ones, because a config was copied."""
    config, tensors = modelopt_latent(random_parts(Options(latent=Latents())))
    config["architectures"] = ["LlamaForCausalLMEagle3"]
    with pytest.raises(ValueError, match="has no kv_lora_rank"):
        open_head(save(tmp_path, (config, tensors)), None)


@pytest.mark.parametrize("kind", LATENT_HEADS)
def test_tensors_are_written_as_they_were_read(kind: str, zoo: Zoo) -> None:
    """Keeps out: rotated pairs that a head of ours would write in another order than files have them."""
    where = zoo.target("llama")
    target, folder = load_target(where, read_target_config(where), 64, CPU, torch.float32), zoo.head("llama", kind)
    opened = open_head(folder, target.config)
    head = build_head(opened, target, 64, CPU, torch.float32)
    written, held = tensors_of(head.parts(opened.parsed.names)), opened.files.checkpoint
    assert written.keys() == {
        name for name in held.names() if name not in ("d2t", "t2d", "embed_tokens.weight", "lm_head.weight")
    }
    for name, tensor in written.items():
        torch.testing.assert_close(tensor, held.take(name), rtol=0, atol=0)


@pytest.mark.parametrize(("target", "kind"), [("llama", "latent"), ("v3", "latent-31")])
def test_inspect_and_plan(target: str, kind: str, zoo: Zoo, capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: a cache of a head that `plan` counts by heads, and a table without what a token keeps."""
    folders = [str(zoo.head(target, kind)), str(zoo.target(target))]
    assert main(["inspect", folders[0], "--target", folders[1], "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["head"]["latents"] == "rank 16, 4 rotated" and "rope_interleave" in facts["meanings"]
    assert (
        main(["plan", "--target", folders[1], "--draft", folders[0], "--dtype", "float32", "--gpu-memory", "16GB", "--json"])
        == 0
    )
    assert capsys.readouterr().out


def test_the_look_at_a_head_sees_a_misread_one(zoo: Zoo) -> None:
    """Keeps out: a look that can't run latent attention along a text."""
    where = zoo.target("llama")
    target = load_target(where, read_target_config(where), 64, CPU, torch.float32)
    head = load_head(zoo.head("llama", "latent"), target, 64, CPU, torch.float32)
    said = head.smoke(target, torch.randint(40, (60,), generator=torch.Generator().manual_seed(1)))
    assert said.first is not None and 0 <= said.first < 0.5


def test_fresh_heads_of_a_target_with_latents_have_ordinary_heads(zoo: Zoo) -> None:
    """Keeps out: a head that training makes with latent attention, and writes in a layout that has none."""
    target = zoo.decoder("v3").model
    run = HeadRun(kind="eagle3", width=32)
    head = new_head(target, (0, 1, 2), torch.arange(40), run)
    assert isinstance(head, Eagle3Head) and isinstance(head.self_attn, SelfAttention)
    assert not any(isinstance(module, LatentAttention) for module in head.modules())
