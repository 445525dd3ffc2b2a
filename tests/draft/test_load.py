"""Heads load whole or not at all, and use their target as their config says.

Keeps out: features of the wrong layers, absolute ids taken for offsets, config keys that other runtimes obey and we don't.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from toolkit.checkpoints.load import load_target, read_target_config
from toolkit.heads import block_zoo  # noqa: F401  which the zoo then has
from toolkit.models import HEADS, Zoo, kept_ids, save_eagle1, save_eagle3
from torch import Tensor

from specdec.draft.eagle.head import EagleHead
from specdec.draft.formats.body import default_aux_layers
from specdec.draft.formats.open import HowToRead
from specdec.draft.load import HeadDrafter, load_head
from specdec.ops.topk import with_offsets

Tensors = dict[str, Tensor]
AUX = "eagle_aux_hidden_state_layer_ids"
CPU = torch.device("cpu")


def load(zoo: Zoo, folder: Path, target: str = "llama") -> EagleHead:
    where = zoo.target(target)
    model = load_target(where, read_target_config(where), 64, CPU, torch.float32)
    return load_head(folder, model, 64, CPU, torch.float32)


def changed(folder: Path, change: Callable[[Tensors], Any] | None = None, **config: Any) -> Path:
    """The folder with other tensors or config keys; "absent" takes one out."""
    raw = {**json.loads((folder / "config.json").read_text()), **config}
    (folder / "config.json").write_text(json.dumps({key: v for key, v in raw.items() if v != "absent"}))
    if change:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
    return folder


def absolute_ids(t: Tensors) -> None:
    t["d2t"] += torch.arange(len(t["d2t"]))


def unmarked(t: Tensors) -> None:
    t["t2d"] = t["t2d"].logical_not()


EAGLE3_ERRORS: list[tuple[Callable[[Tensors], Any] | None, dict[str, Any], str]] = [
    (None, dict(mystery=1), "unknown config keys mystery"),
    (None, {AUX: [0, 1, 3], "eagle_config": {AUX: [0, 1, 2]}}, r"is \[0, 1, 3\] at the top and \[0, 1, 2\] in eagle_config"),
    (None, dict(eagle_config={AUX: [0, 1, 2], "fc_norm": True}), "unknown key eagle_config.fc_norm"),
    (None, dict(eagle_config={AUX: [0, 1, 2], "norm_output": True}), "eagle_config.norm_output must be False"),
    (None, dict(eagle_config={AUX: [0, 1, 4]}), r"must lie in \[0, 3\], got \[0, 1, 4\]"),
    (None, dict(eagle_config={AUX: [-1, 1, 2]}), r"must lie in \[0, 3\]"),
    (None, dict(eagle_config={AUX: [1, 1, 2]}), "must be a list of distinct layer numbers"),
    (None, dict(eagle_config={AUX: [0, True, 2]}), "must be a list of distinct layer numbers"),
    (None, dict(eagle_config="x"), "eagle_config must be an object of keys and values, got 'x'"),
    (None, dict(eagle_config=[AUX]), "eagle_config must be an object"),
    (None, dict(use_sliding_window="no", sliding_window=4), "use_sliding_window must be true or false, got 'no'"),
    (None, dict(use_sliding_window=True), "use_sliding_window is true, so sliding_window must be .* got None"),
    (None, dict(target_hidden_size="32"), "target_hidden_size must be a whole number of at least 1, got '32'"),
    (None, dict(draft_vocab_size=0), "draft_vocab_size must be a whole number of at least 1, got 0"),
    (None, dict(rope_scaling={"type": "dynamic"}), "test_eagle3.*: rope type must be .* got 'dynamic'"),
    (None, dict(eagle_config={}), "a target of 4 layers has no default aux layers"),
    (None, dict(eagle_config={AUX: [0, 1]}), r"'fc.weight' must have shape \(32, 64\), got \(32, 96\)"),
    (None, dict(speculators_model_type="eagle3"), "unknown config keys eagle_config, head_dim, hidden_size"),
    (None, dict(vocab_size=41), "vocab_size must be the target's 40, got 41"),
    (None, dict(target_hidden_size=64), "target_hidden_size must be the target's 32, got 64"),
    (None, dict(num_hidden_layers=2), "an EAGLE-3 head must have num_hidden_layers 1, got 2"),
    (None, dict(quantization_config={"quant_method": "fp8"}), "'fc.weight' is not quantised .F32., but by config.json"),
    (None, dict(draft_vocab_size=25), r"'d2t' must have shape \(25,\), got \(26,\)"),
    (None, dict(draft_vocab_size="absent"), r"'d2t' must have shape \(40,\), got \(26,\)"),
    (lambda t: t.pop("d2t"), {}, "needs a d2t tensor"),
    (absolute_ids, {}, "d2t must hold offsets .*absolute ids"),
    (unmarked, {}, "t2d does not mark"),
    (lambda t: t.pop("lm_head.weight"), {}, "needs an lm_head.weight of 26 rows"),
    (lambda t: t.pop("norm.weight"), {}, "'norm.weight' is missing"),
    (lambda t: t.pop("midlayer.input_layernorm.weight"), {}, "'midlayer.input_layernorm.weight' is missing"),
    (lambda t: t.update({"fc.bias": torch.ones(32)}), {}, "not part of this architecture: fc.bias"),
    (lambda t: t.update({"fc_norm.0.weight": torch.ones(32)}), {}, "not part of this architecture: fc_norm.0.weight"),
]


@pytest.mark.slow_cases
@pytest.mark.parametrize(("change", "config", "match"), EAGLE3_ERRORS)
def test_eagle3(zoo: Zoo, tmp_path: Path, change: Callable[[Tensors], Any] | None, config: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        load(zoo, changed(save_eagle3(tmp_path, zoo.target("llama")), change, **config))


EAGLE1_ERRORS: list[tuple[Callable[[Tensors], Any] | None, dict[str, Any], str]] = [
    (lambda t: t.pop("fc.bias"), {}, "'fc.bias' is missing"),
    (None, dict(bias="no"), "bias must be true or false, got 'no'"),
    (None, dict(bias=False), "not part of this architecture: fc.bias"),
    (None, dict(num_hidden_layers=2), "layers.1.* is missing"),
    (lambda t: t.update({"layers.0.input_layernorm.weight": torch.ones(32)}), {}, "not part .* layers.0.input_layernorm"),
    (None, dict(rope_scaling={"type": "yarn", "factor": 2.0}), "rope type 'yarn' needs original_max_position_embeddings"),
]


@pytest.mark.parametrize(("change", "config", "match"), EAGLE1_ERRORS)
def test_eagle1(zoo: Zoo, tmp_path: Path, change: Callable[[Tensors], Any] | None, config: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        load(zoo, changed(save_eagle1(tmp_path, zoo.target("llama")), change, **config))


@pytest.mark.parametrize("kind", [kind for kind in HEADS if kind.startswith("eagle")])
@pytest.mark.parametrize("target", ["llama", "qwen3", "llama3-tied-dim8"])
def test_what_is_shared_and_what_is_owned(zoo: Zoo, target: str, kind: str) -> None:
    where = zoo.target(target)
    model = load_target(where, read_target_config(where), 64, CPU, torch.float32)
    head = load_head(zoo.head(target, kind), model, 64, CPU, torch.float32)
    assert (head.embed_tokens.weight is model.embed_tokens.weight) == (kind != "eagle3-full")
    assert (head.lm_head.weight is model.lm_head.weight) == kind.startswith("eagle1")
    assert head.config.model.rope == model.config.rope  # the head's config is silent
    assert head.config.aux_layers == ((0, 1, 3) if kind.startswith("eagle3") else ())  # sorted; the file is not


def test_draft_ids_are_mapped_once(zoo: Zoo) -> None:
    """Keeps out: d2t added twice, or added to a vocabulary that is not pruned."""
    head = load(zoo, zoo.head("llama", "eagle3"))
    assert head.d2t_V is not None and torch.equal(with_offsets(torch.arange(26), head.d2t_V), kept_ids(40, 26))
    assert load(zoo, zoo.head("llama", "eagle3-full")).d2t_V is None


def test_pickles_are_opened_on_request_alone(zoo: Zoo, tmp_path: Path) -> None:
    """Keeps out: a format that can hold code, opened because a folder holds nothing else; and tensors that two files hold."""
    folder = save_eagle3(tmp_path, zoo.target("llama"))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model.bin is a pickle, .* or draft_pickle=True \(--draft-pickle\)"):
        load(zoo, folder)
    where = zoo.target("llama")
    model = load_target(where, read_target_config(where), 64, CPU, torch.float32)
    head = load_head(folder, model, 64, CPU, torch.float32, HowToRead(pickles=True))
    assert torch.equal(head.norm.weight, tensors["norm.weight"])  # type: ignore[attr-defined]
    (folder / "pytorch_model.bin").unlink()
    for name in ("a", "b"):
        save_file(tensors, folder / f"{name}.safetensors")
    with pytest.raises(ValueError, match="tensor '.*' stands in a.safetensors too; expected each once"):
        load(zoo, folder)


def test_eagle1_by_the_class_that_others_name(zoo: Zoo, tmp_path: Path) -> None:
    """Keeps out: a class that two publishers use, taken for the layout of one that can't be read."""
    folder = save_eagle1(tmp_path, zoo.target("llama"), architectures=["LlamaForCausalLMEagle"])
    assert load(zoo, folder).config.kind == "eagle1"


def test_two_spellings_of_rope_must_agree(zoo: Zoo, tmp_path: Path) -> None:
    """Keeps out: one of two different ropes, taken by chance."""
    rope = {"rope_type": "default", "rope_theta": 500.0}
    folder = save_eagle3(tmp_path, zoo.target("llama"), rope_parameters=rope, rope_theta=500.0, rope_scaling=None)
    assert load(zoo, folder).config.model.rope.theta == 500.0
    for other in (dict(rope_theta=600.0), dict(rope_scaling={"type": "linear", "factor": 2.0})):
        with pytest.raises(ValueError, match="rope_theta must be the same|rope_parameters and rope_scaling must say the same"):
            load(zoo, changed(save_eagle3(tmp_path, zoo.target("llama"), rope_parameters=rope), **other))


def test_default_aux_layers(zoo: Zoo) -> None:
    """Outputs of layers 1, N // 2 - 1 and N - 4, 0-based: what enters layers 2, N // 2 and N - 3."""
    assert [default_aux_layers(n) for n in (8, 32, 36)] == [(1, 3, 4), (1, 15, 28), (1, 17, 32)]
    head = load(zoo, zoo.head("llama-linear-8-layers", "eagle3"), "llama-linear-8-layers")
    assert head.config.aux_layers == (1, 3, 4)


@pytest.mark.parametrize("in_bits", [True, False])
def test_a_copy_beside_a_matrix_in_few_bits_counts(zoo: Zoo, in_bits: bool) -> None:
    """Keeps out: a plan of memory without the head's copy of the target's last matrix, which stays where that has few bits."""

    class FewBits:
        def format_of(self, name: str) -> object:
            return object() if in_bits and name == "lm_head" else None

    drafter = HeadDrafter(zoo.head("llama", "dspark-gated"), read_target_config(zoo.target("llama")), HowToRead())
    assert drafter.opened.parsed.copies
    assert ("lm_head.weight" in drafter.unkept(FewBits())) != in_bits  # type: ignore[arg-type]
