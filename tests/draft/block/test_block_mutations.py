"""Every layout of heads of one pass, broken in every way: each break is an error, changes nothing, or is one that files can't
tell from another sound head; such a one computes something else, which the look at a text is for.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from toolkit.checkpoints.load import load_target, read_target_config
from toolkit.heads.block_parts import BlockOptions, random_block_parts, with_copies
from toolkit.heads.block_writers import BLOCK_WRITERS
from toolkit.heads.writers import Files
from toolkit.models import Zoo
from torch import Tensor

from specdec.draft.block.dflash import DFlashHead, DSparkHead
from specdec.draft.block.dflash2.head import DFlash2Head
from specdec.draft.block.peagle import PEagleHead
from specdec.draft.formats.open import HowToRead, open_head
from specdec.draft.load import build_head
from specdec.models.target import Target

CPU = torch.device("cpu")
PRUNED: dict[str, Any] = dict(draft_vocab=26, own_lm_head=True)
DSPARK: dict[str, Any] = dict(kind="dspark", skips=False, rank=6, markov="gated", confidence="markov")
DFLASH2: dict[str, Any] = dict(kind="dflash2", rank=6, candidates=5)
CASES: list[tuple[str, dict[str, Any]]] = [
    ("speculators", dict(PRUNED, kind="p-eagle", skips=False, own_embeddings=True, qk_norm=False)),
    ("specforge", dict(PRUNED, kind="p-eagle", skips=False, own_embeddings=True, qk_norm=False)),
    ("z-lab", dict(windows=(6, None), more={"is_causal": False})),
    ("z-lab", dict(DFLASH2, more={"is_causal": False}, embedding_scale=1.5, logit_scale=0.5, softcap=3.0)),
    ("speculators", dict(DFLASH2, windows=(5, None), rule="anchor")),
    ("speculators", dict(PRUNED, windows=(5, None), rule="anchor", causal=(True, False))),
    ("deepspec", dict(DSPARK, own_embeddings=True, own_lm_head=True)),
    ("specforge", dict(DSPARK, markov="rnn")),
    ("modelopt", dict(DSPARK, causal=(True, True), windows=(5, 5))),
]
# What a sound head's files could say as well.
SOUND = {
    "rms_norm_eps", "rope_theta", "mask_token_id", "block_size", "sliding_window", "swa_window_size", "sample_from_anchor",
    "sliding_window_non_causal", "causal", "norm_before_residual", "speculative_tokens", "max_position_embeddings",
    "layer ids", "target_layer_ids", "eagle_aux_hidden_state_layer_ids", "is_causal", "input_embedding_scale",
    "output_multiplier", "final_logit_softcapping", "selector_top_k",
}  # fmt: skip
UNSEEN = {  # too little to be seen in a short text, or nothing without windows
    "max_position_embeddings", "speculative_tokens", "rms_norm_eps", "sliding_window", "swa_window_size",
    "sliding_window_non_causal",
}  # fmt: skip


def changes(files: Files) -> Iterator[tuple[str, str, Files]]:
    """(what, the key or tensor, the files)."""
    config, tensors = files
    for name, tensor in tensors.items():
        if name.startswith("layers.1."):
            continue  # as those of the first layer
        rest = {other: x for other, x in tensors.items() if other != name}
        yield "dropped", name, (config, rest)
        yield "renamed", name, (config, {**rest, f"{name}s": tensor})
        yield "of another type", name, (config, {**rest, name: tensor.float() if "2" in name[:3] else tensor.int()})
        yield "twice", name, (config, {**tensors, f"copy.{name}": tensor.clone()})
        if tensor.dim() == 2 and tensor.shape[0] != tensor.shape[1]:
            yield "transposed", name, (config, {**rest, name: tensor.T})
        if tensor.is_floating_point():
            broken = tensor.clone()
            broken.flatten()[0] = torch.nan
            yield "with NaN", name, (config, {**rest, name: broken})
    for path in paths(config):
        key, broken_config = path[-1], copy.deepcopy(config)
        part = inner(broken_config, path)
        value = part.pop(key)
        yield "removed", key, (copy.deepcopy(broken_config), tensors)
        part[f"{key}s"] = value
        yield "misspelt", key, (copy.deepcopy(broken_config), tensors)
        del part[f"{key}s"]
        part[key] = [1] if isinstance(value, str) else {"a": 1} if value is None else "x"
        yield "of another type", key, (copy.deepcopy(broken_config), tensors)
        if isinstance(value, bool) or type(value) in (int, float):
            part[key] = not value if isinstance(value, bool) else value * 2
            yield "of another value", key, (broken_config, tensors)
        if "layer_ids" in key:
            for ids in ([i + 1 for i in value], value[::-1], [0, 1, 1], [1, 2, 40], [-1, 0, 1], value[:2]):
                part[key] = ids
                yield f"{ids}", "layer ids", (copy.deepcopy(broken_config), tensors)


def paths(part: dict[str, Any], at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in part.items():
        yield (*at, key)
        if isinstance(value, dict):
            yield from paths(value, (*at, key))


def inner(config: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    for key in path[:-1]:
        config = config[key]
    return config


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(("layout", "options"), CASES, ids=lambda v: str(v)[:60])
def test_no_broken_head_loads_quietly(
    zoo: Zoo, tmp_path: Path, layout: str, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    parts, where = random_block_parts(BlockOptions(**options), seed=3), zoo.target("llama")
    files = BLOCK_WRITERS[layout](with_copies(parts, where) if layout == "deepspec" else parts)
    target = load_target(where, read_target_config(where), 64, CPU, torch.float32)
    right, count = drawn(tmp_path, files, target), Counter[str]()
    assert right is not None
    for what, name, broken in changes(files):
        got = drawn(tmp_path, broken, target)
        is_same = got is not None and got.shape == right.shape and torch.equal(got, right)
        end = "error" if got is None else "no change" if is_same else "another head"
        count[end] += 1
        if name in files[1] or (name == "layer ids" and what != f"{[i + 1 for i in options.get('aux', (0, 1, 2))]}"):
            assert end == "error", (what, name)
        if end == "another head":
            assert name in SOUND, (what, name)
        if what == "of another value" and name in SOUND - UNSEEN:
            assert end != "no change", (what, name)
    with capsys.disabled():
        print(f"\n{layout}: {count.total()} breaks: {dict(count)}", end=" ")
    assert count["error"] > 80 and count["another head"] < 20


def drawn(folder: Path, files: Files, target: Target) -> Tensor | None:
    """What the head drafts along a text; None if it is refused."""
    write(folder, files)
    try:
        opened = open_head(folder, target.config, HowToRead("auto"))
        head = build_head(opened, target, 64, CPU, torch.float32)
    except ValueError as error:
        assert len(str(error)) > 20
        return None
    assert isinstance(head, PEagleHead | DFlashHead)
    generator = torch.Generator().manual_seed(5)
    ids_T = torch.randint(40, (15,), generator=generator)
    features_TF = torch.randn(15, head.config.feature_size, generator=generator)
    anchors_A = torch.tensor([2, 9, 14])
    with torch.inference_mode():
        (hidden_ASH,) = head.drafts(features_TF[None], ids_T[None], anchors_A[None], 2)
        if isinstance(head, DFlash2Head):
            return head.walk(hidden_ASH, ids_T[anchors_A][:, None].expand(-1, 2))
        if isinstance(head, DSparkHead):
            logits = head.walk(hidden_ASH, ids_T[anchors_A][:, None].expand(-1, 2))
            sure = head.confidences(hidden_ASH, head.markov.embed(ids_T[anchors_A][:, None].expand(-1, 2)))
            return torch.cat((logits, sure[..., None]), dim=-1)
        return head.logits(hidden_ASH)


def write(folder: Path, files: Files) -> None:
    """The sound tensors are written once, and stay until others were."""
    (folder / "config.json").write_text(json.dumps(files[0]))
    if _written.get(folder) is not files[1]:
        save_file({name: tensor.contiguous() for name, tensor in files[1].items()}, folder / "model.safetensors")
        _written[folder] = files[1]


_written: dict[Path, dict[str, Tensor]] = {}


def test_copies_that_differ_are_refused(zoo: Zoo, tmp_path: Path) -> None:
    """Keeps out: a head for another target of the same sizes."""
    where = zoo.target("llama")
    target = load_target(where, read_target_config(where), 64, CPU, torch.float32)
    options = BlockOptions(**DSPARK, own_embeddings=True, own_lm_head=True)
    write(tmp_path, BLOCK_WRITERS["deepspec"](random_block_parts(options)))
    with pytest.raises(ValueError, match=r"embed_tokens.weight must be a copy of the target's .* is the head for this target"):
        build_head(open_head(tmp_path, target.config), target, 64, CPU, torch.float32)


def test_what_says_too_little_is_refused_by_name(zoo: Zoo, tmp_path: Path) -> None:
    """Keeps out: a guess where layouts disagree."""
    config, tensors = BLOCK_WRITERS["z-lab"](random_block_parts(BlockOptions(windows=(6, None))))
    where = zoo.target("llama")
    target = read_target_config(where)

    def said(changed: dict[str, Any], how: str = "auto") -> str:
        (tmp_path / "config.json").write_text(json.dumps(changed))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError) as error:
            open_head(tmp_path, target, HowToRead(how))
        return str(error.value)

    nested = config["dflash_config"]
    for key, value, message in (
        ("target_layer_ids", [0, 1, 3], "names the last layer"), ("target_layer_ids", [-1, 0, 1], "names the embeddings by -1"),
        ("attention_sink_bias", True, "attention_sink_bias must be"), ("causal_head", True, "causal_head must be"),
        ("gru_hidden_dim", 3, "unknown key dflash_config.gru_hidden_dim"), ("block_size", 5, "must be equal, got"),
        ("mask_token_id", 40, "mask_token_id must be at most 39"), ("selector_rank", 6, "is a key of a DFlash2 head, but the"),
        ("output_multiplier", 0, "output_multiplier must be a finite number above 0"),
        ("final_logit_softcapping", -1.0, "final_logit_softcapping must be a finite number of at least 0"),
    ):  # fmt: skip
        assert message in said({**config, "is_causal": False, "dflash_config": {**nested, key: value}})
    assert "is_causal must be false" in said({**config, "is_causal": True}, "specforge")
    assert "is_causal must be false" in said({**config, "is_causal": True, "architectures": ["Qwen3DFlashDraftModel"]})
    assert "mask_token_id and dflash_config.mask_token_id must be equal" in said({**config, "mask_token_id": 8})
    narrow = {**config, "is_causal": False, "sliding_window": 3}
    assert "sliding_window must be at least the block's 4 rows, got 3" in said(narrow)
    for key, name, causal in (
        ("is_causal", "specforge", (True, False)), ("is_causal", "auto", (True, False)), ("none", "auto", (False, False)),
    ):  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps({**config, **({"is_causal": False} if key == "none" else {})}))
        parsed = open_head(tmp_path, target, HowToRead(name)).parsed
        assert parsed.spec.block is not None and parsed.spec.block.causal == causal
        assert ("is_causal" in parsed.meanings) == (key == "is_causal")


def test_keys_at_the_top_of_the_config(zoo: Zoo, tmp_path: Path) -> None:
    """z-lab's classes look there too; SGLang and NeMo do not.  Keeps out: a key that is passed over, or read in one place only
    where both have one."""
    config, tensors = BLOCK_WRITERS["z-lab"](random_block_parts(BlockOptions(**DFLASH2, softcap=3.0, logit_scale=0.5)))
    nested, target = config["dflash_config"], read_target_config(zoo.target("llama"))
    flat = {**config, **nested}
    del flat["dflash_config"]
    write(tmp_path, (config, tensors))
    wanted = open_head(tmp_path, target).parsed.spec
    write(tmp_path, (flat, tensors))
    assert open_head(tmp_path, target).parsed.spec == wanted
    for name in ("MiniMaxDFlash2DraftModel", "Qwen3DFlash2DraftModel"):
        write(tmp_path, ({**flat, "architectures": [name]}, tensors))
        with pytest.raises(ValueError, match="unknown config key"):
            open_head(tmp_path, target)
    for key in nested:
        value = [0, 1, 3] if key == "target_layer_ids" else nested[key] + 1
        write(tmp_path, ({**config, key: value}, tensors))
        with pytest.raises(ValueError, match=rf"{key} and dflash_config.{key} must be equal"):
            open_head(tmp_path, target)


def test_dflash2_is_refused_by_name(zoo: Zoo, tmp_path: Path) -> None:
    """Keeps out: SGLang's silence about tables that are called otherwise, which turns a DFlash2 head into a DFlash head."""
    config, tensors = BLOCK_WRITERS["z-lab"](random_block_parts(BlockOptions(**DFLASH2)))
    target, nested = read_target_config(zoo.target("llama")), config["dflash_config"]

    def said(changed: dict[str, Any], others: dict[str, Tensor] | None = None, drop: str = "") -> str:
        held = {name: each for name, each in {**tensors, **(others or {})}.items() if name != drop}
        write(tmp_path, (changed, held))
        with pytest.raises(ValueError) as error:
            open_head(tmp_path, target)
        return str(error.value)

    table = "candidate_selector.predecessor_codebook"
    assert f"'{table}.weight' must be called '{table}'" in said(config, {f"{table}.weight": tensors[table]}, table)
    assert f"tensor '{table}' is missing" in said(config, {"candidate_selector.predecesor": tensors[table]}, table)
    assert "layers.0.mlp_conv.base_kernel' is missing" in said(config, drop="layers.0.mlp_conv.base_kernel")
    assert "belong to one of DFlash2DraftModel" in said({**config, "architectures": ["DFlashDraftModel"]})
    for key, value, message in (
        ("conv_kernel_size", None, "lacks dflash_config.conv_kernel_size"), ("selector_top_k", None, "lacks dflash_config.sel"),
        ("conv_group_size", 0, "must both be above 0, or both be 0"), ("selector_rank", 7, "and selector_rank"),
        ("conv_group_size", 12, "must divide hidden_size 32, got 12"), ("selector_top_k", 41, "vocabulary, 40, got 41"),
        ("conv_kernel_size", 5, "at most the block's 4 rows, got 5; nearest: 4"), ("conv_group_size", 4, "by conv_kernel_size"),
        ("conv_kernel_size", 3, "by conv_kernel_size"),
    ):  # fmt: skip
        assert message in said({**config, "dflash_config": {**nested, key: value}}), key
    off = {**nested, "conv_kernel_size": 0, "conv_group_size": 0}
    assert "8 tensors are not part of this architecture" in said({**config, "dflash_config": off})
    config, tensors = BLOCK_WRITERS["speculators"](random_block_parts(BlockOptions(**DFLASH2)))
    assert "must be the whole vocabulary, 40, got 26" in said({**config, "draft_vocab_size": 26})
    assert "unknown config key" in said({**config, "speculators_model_type": "dflash"})
    assert "'dflash2' began with speculators 0.8" in said({**config, "speculators_version": "0.7.0"})
