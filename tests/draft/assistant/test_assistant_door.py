"""What an assistant's files must be, what is said of them, and what users are told where they won't do."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from toolkit.checkpoints.plans import plan_memory
from toolkit.heads.kinds.assistants import ASSISTANTS, AloneAssistant, save_assistant
from toolkit.models import Zoo, ragged_prompts
from toolkit.unlike.targets import TARGETS

from specdec import SpecConfig, SpecDecoder
from specdec.bench.byte_limit import byte_limit
from specdec.cli.entry import main
from specdec.draft.assistant.head import Assistant
from specdec.draft.assistant.load import OpenAssistant
from specdec.draft.assistant.smoke import AssistantLook
from specdec.draft.smoke import TargetPass, layers_of
from specdec.loading.about.doctor import drafter_rows
from specdec.loading.about.inspect_head import head_facts
from specdec.loading.about.inspect_target import target_facts
from specdec.loading.load import check_pair
from specdec.models.kv import cache_layout
from specdec.options import EngineOptions

assert ASSISTANTS and TARGETS  # which these imports give the zoo
OPTIONS = EngineOptions(device="cpu", dtype="float32", max_seq_len=64, smoke=False)
SPEC = SpecConfig(3, 2, 6)


def refused(target: Path, draft: Path, said: str, spec: SpecConfig = SPEC, **changes: Any) -> None:
    with pytest.raises(ValueError, match=said):
        check_pair(target, draft, spec, EngineOptions(device="cpu", dtype="float32", **changes))


def test_what_is_said_of_it(zoo: Zoo, capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: a folder taken for a small model's or a head's; layers of the target that are not those it reads."""
    target, draft = zoo.target("gemma-small"), zoo.head("gemma-small", "assistant-ordered")
    pair = check_pair(target, draft, SPEC, OPTIONS)
    assert isinstance(pair.drafter, OpenAssistant) and pair.drafter.model.needs.features == ()
    facts = head_facts(draft, target, EngineOptions())
    assert facts["format"] == "assistant" and facts["head"]["target layers read"] == [2, 1, 2, 1]  # the last that store keys
    assert facts["head"]["lm_head"] == "own, of the tokens of 4 of 10 lists" and "pre_projection.weight" in facts["tensors"]
    assert main(["inspect", str(draft), "--target", str(target)]) == 0
    assert "layout assistant (detected)" in " ".join(capsys.readouterr().out.split())
    assert main(["inspect", str(draft)]) == 2 and "needs --target" in capsys.readouterr().err
    offers = target_facts(target)["drafters"], target_facts(zoo.target("llama"))["drafters"]
    assert offers[0]["a Gemma 4 assistant's folder"] == "one of backbone_hidden_size 32 and 40 tokens"
    assert offers[1]["a Gemma 4 assistant's folder"].startswith("no: it reads keys and values of a gemma4_text target")
    assert dict(drafter_rows())["assistant"].startswith("Gemma 4's assistants")


def test_the_plan_and_the_byte_limit_count_it(zoo: Zoo) -> None:
    """Keeps out: keys and values that it is said to keep; weights or borrowed keys that nobody counted."""
    target, draft = zoo.target("gemma"), zoo.head("gemma", "assistant")
    plan, alone = (plan_memory(target, each, SPEC, EngineOptions(dtype="float32"), 10**9) for each in (draft, None))
    with SpecDecoder.from_pretrained(target, draft, SPEC, options=OPTIONS) as decoder:
        head = decoder.head
        assert isinstance(head, Assistant)
        own = sum(weight.nbytes for name, weight in head.named_parameters() if not name.startswith("embed_tokens"))
        limit = byte_limit(decoder.model, head, SPEC, 2, 50)
        layout = cache_layout(decoder.model.config, "auto", torch.float32)
    assert plan.parts["weights of the draft head"] == own + sum(b.nbytes for n, b in head.named_buffers() if "scalar" in n)
    assert plan.kv_token == alone.kv_token
    assert limit.draft_kv == 3 * 2 * 50 * sum(map(layout.layer_bytes, (4, 5, 4, 5)))
    assert limit.draft_passes == 3 and limit.draft > 3 * own


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"backbone_hidden_size": 48}, "backbone_hidden_size must be the target's hidden_size 32, got 48"),
        ({"vocab_size": 48}, "vocab_size must be the target's 40, got 48"),
        ({"sliding_window": 5}, "layer 0 is window 5, and the target has no such layer; it has window 6, full"),
        ({"global_head_dim": 32}, "layers that are full read 1 key/value heads of 32, and the target's have 1 of 24"),
        ({"num_key_value_heads": 2}, "read 2 key/value heads of 16, and the target's have 4 of 16"),
    ],
    ids=str,
)
def test_an_assistant_of_another_target_is_refused(zoo: Zoo, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    """Keeps out: keys read as another number of heads, or as wider ones, than lie there."""
    refused(zoo.target("gemma"), save_assistant(tmp_path / "other", zoo.target("gemma"), **changes), re.escape(said))


def test_combinations_that_are_refused(zoo: Zoo) -> None:
    target, draft = zoo.target("gemma"), zoo.head("gemma", "assistant")
    refused(
        zoo.target("llama"),
        draft,
        "values of a gemma4_text target that specdec's own modules compute, got llama",
    )
    refused(target, draft, "got draft_quantize='fp8'; nearest setting that works: draft_quantize='none'", draft_quantize="fp8")
    refused(target, draft, "got draft_pickle=True; .* draft_pickle=False", draft_pickle=True)
    refused(target, draft, "beyond_trained='window'; .* beyond_trained='draft'", beyond_trained="window")
    refused(target, draft, "topk must be at most the draft vocabulary, 40, got 41", SpecConfig(2, 41, 50))
    ordered = zoo.target("gemma-small"), zoo.head("gemma-small", "assistant-ordered")
    refused(*ordered, "topk must be at most the tokens that get logits, 16, got 17; .* topk=16", SpecConfig(2, 17, 30))
    refused(*ordered, "got tensor_parallel_size=2; .* tensor_parallel_size=1", tensor_parallel_size=2)
    refused(draft, zoo.target("gemma"), r"expected a target, got a draft head's config \(model_type gemma4_assistant\)")


def without(tensors: dict[str, Any], raw: dict[str, Any]) -> None:
    del tensors["model.layers.1.self_attn.q_norm.weight"]


def with_keys(tensors: dict[str, Any], raw: dict[str, Any]) -> None:
    tensors["model.layers.1.self_attn.w_proj.weight"] = torch.zeros(2, 2)


def cut(tensors: dict[str, Any], raw: dict[str, Any]) -> None:
    tensors["post_projection.weight"] = tensors["post_projection.weight"][:-1].clone()


def other_table(tensors: dict[str, Any], raw: dict[str, Any]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1


def twice(tensors: dict[str, Any], raw: dict[str, Any]) -> None:
    tensors["masked_embedding.token_ordering"][0] = tensors["masked_embedding.token_ordering"][1]


def not_finite(tensors: dict[str, Any], raw: dict[str, Any]) -> None:
    tensors["pre_projection.weight"][0, 0] = torch.nan


def unknown_key(tensors: dict[str, Any], raw: dict[str, Any]) -> None:
    raw["draft_temperature"] = 2.0


def own_keys(tensors: dict[str, Any], raw: dict[str, Any]) -> None:
    raw["text_config"]["num_kv_shared_layers"] = 2


def inputs_by_layer(tensors: dict[str, Any], raw: dict[str, Any]) -> None:
    raw["text_config"]["hidden_size_per_layer_input"] = 8


def mixture(tensors: dict[str, Any], raw: dict[str, Any]) -> None:
    raw["text_config"]["enable_moe_block"] = True


def lists(tensors: dict[str, Any], raw: dict[str, Any]) -> None:
    raw["num_centroids"] = 7


def no_layers(tensors: dict[str, Any], raw: dict[str, Any]) -> None:
    del raw["text_config"]


DAMAGE: list[tuple[Callable[[dict[str, Any], dict[str, Any]], None], str]] = [
    (without, "model.layers.1.self_attn.q_norm.weight"),
    (with_keys, "model.layers.1.self_attn.w_proj.weight"),
    (cut, r"'post_projection.weight' must have shape \(32, 24\), .* backbone_hidden_size"),
    (other_table, "'lm_head.weight' must repeat 'model.embed_tokens.weight'"),
    (twice, "'masked_embedding.token_ordering' must name every token once"),
    (not_finite, "pre_projection.weight"),
    (unknown_key, "unknown config keys draft_temperature"),
    (own_keys, "num_kv_shared_layers must be num_hidden_layers 4, or 0, .* got 2"),
    (inputs_by_layer, "hidden_size_per_layer_input must be 0"),
    (mixture, "enable_moe_block must be False"),
    (lists, "num_centroids must divide vocab_size 40, got 7"),
    (no_layers, "lacks text_config"),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGE, ids=lambda it: getattr(it, "__name__", ""))
def test_damaged_files_are_refused(zoo: Zoo, tmp_path: Path, damage: Any, said: str) -> None:
    """Keeps out: a tensor that is left out, passed over or cut, and a key that nobody reads."""
    target, folder = zoo.target("gemma-small"), tmp_path / "assistant"
    shutil.copytree(zoo.head("gemma-small", "assistant-ordered"), folder)
    tensors, raw = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    damage(tensors, raw)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=said):
        SpecDecoder.from_pretrained(target, folder, SPEC, options=OPTIONS)


def test_the_look_at_it(zoo: Zoo) -> None:
    """Keeps out: a look that runs it from other places or keys than rounds do: what it drafts is what it drafts alone."""
    target, draft = zoo.target("gemma"), zoo.head("gemma", "assistant")
    with SpecDecoder.from_pretrained(target, draft, SPEC, options=OPTIONS) as decoder:
        head, ids = decoder.head, ragged_prompts(40, 1)[0] * 3 + list(range(30))
        assert isinstance(head, Assistant)
        look, seen = AssistantLook(), TargetPass(head, decoder.model, torch.tensor(ids))
        with torch.inference_mode():
            rights = [each.tolist() for each in look.rights(seen, head, layers_of(head))]
            names = [each.name for each in look.misreadings(head, decoder.model)]
    for begin in range(0, len(rights[0]), 5):
        alone, known = AloneAssistant.of(zoo, "gemma", "assistant", ids[: begin + 2]), seen.chosen_P.tolist()
        for step, right_C in enumerate(rights):
            logp = alone.log_probs(tuple(ids[begin + 2 : begin + 2 + step]))
            assert right_C[begin] == (max(logp, key=lambda token: logp[token]) == known[begin + step])
    assert sum(map(sum, rights)) and len(names) == 3
