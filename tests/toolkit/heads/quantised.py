"""Heads in 8 and 4 bits: a head's files with matrices drawn anew in a format, and the twin of the numbers they stand for.

Layouts' writers (`writers.py`, `block_writers.py`) make the files; formats are written by plain loops (oracles/quantised.py).
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from specdec.attention.eager.dense import DenseAttention
from specdec.draft.block.head import BlockHead
from specdec.draft.eagle.head import EagleHead
from specdec.draft.head import DraftHead
from toolkit.heads.block_parts import BlockOptions, random_block_parts, with_copies
from toolkit.heads.block_writers import BLOCK_WRITERS
from toolkit.heads.parts import Options, random_parts
from toolkit.heads.writers import WRITERS, Files, save
from toolkit.models import Zoo
from toolkit.oracles.quantised import E2M1, SCHEMES, Scheme, Written, draw, scales, spread

WIDE: dict[str, Any] = dict(hidden_size=128, intermediate_size=256, head_dim=32)  # of targets, whose columns are whole groups
SIZES: dict[str, Any] = dict(hidden=128, mlp=256, head_dim=32, target_hidden=128)
PRUNED: dict[str, Any] = dict(draft_vocab=24)
PEAGLE: dict[str, Any] = dict(PRUNED, kind="p-eagle", skips=False, own_embeddings=True, own_lm_head=True, qk_norm=False)
DSPARK: dict[str, Any] = dict(kind="dspark", skips=False, size=5, rank=128)
MATRIX = re.compile(r"(_proj|fc|lm_head|kernel_projection|hidden_projection|markov_w2|confidence_head\.proj)\.weight$")
AROUND = r"fc|_conv\.|selector|markov|confidence"  # what runtimes leave dense of heads over context
KINDS: dict[str, tuple[str, dict[str, Any], str]] = {  # name: (layout, options, matrices that stay, by an expression)
    "eagle1": ("safeailab", dict(aux=(), layers=2), "fc"),
    "eagle1-all": ("safeailab", dict(aux=(), fc_bias=False), "^$"),
    "eagle1-window": ("safeailab", dict(aux=(), window=4, bias=True), "^$"),
    "eagle3": ("safeailab", dict(PRUNED), "lm_head|fc"),
    "eagle3-all": ("safeailab", dict(PRUNED, own_embeddings=True, before_residual=True), "^$"),
    "eagle3-specforge": ("specforge", dict(PRUNED, feature_norm="each"), "lm_head"),
    "eagle3-layers": ("speculators", dict(PRUNED, own_embeddings=True, layers=2, feature_norm="joint", qk_norm=True), "fc"),
    "eagle3-modelopt": ("modelopt", dict(PRUNED, layers=2), "lm_head"),
    "p-eagle": ("speculators", dict(PEAGLE, size=5), "lm_head"),
    "p-eagle-specforge": ("specforge", PEAGLE, "^$"),
    "dflash": ("z-lab", dict(size=6), "fc"),
    "dflash-all": ("z-lab", dict(size=6, windows=(6, None), more={"is_causal": False}), "^$"),
    "dflash-modelopt": ("modelopt", dict(size=6), "fc"),
    "dflash-pruned": ("speculators", dict(PRUNED, own_lm_head=True, size=6), "lm_head"),
    "dflash2": ("z-lab", dict(kind="dflash2", size=6, rank=32), AROUND),
    "dflash2-all": ("speculators", dict(kind="dflash2", size=5, rank=32, skips=False, taps=2, group=4), "^$"),
    "dspark": ("speculators", dict(DSPARK, **PRUNED, markov="vanilla", own_lm_head=True), "lm_head"),
    "dspark-gated": (
        "deepspec",
        dict(DSPARK, markov="gated", own_embeddings=True, own_lm_head=True),
        f"{AROUND}|lm_head",
    ),
    "dspark-rnn": ("modelopt", dict(DSPARK, markov="rnn", confidence="markov"), "confidence"),
}  # fmt: skip


def head_files(kind: str, zoo: Zoo, **sizes: Any) -> tuple[Files, str]:
    """(the files of an unquantised head for the zoo's llama, which matrices are to stay).  sizes: of its options."""
    layout, changes, left = KINDS[kind]
    is_block = "size" in changes or "kind" in changes
    if not is_block:
        options = {"aux": (0, 1, 2), "max_position": 256, **SIZES, **changes, **sizes}
        return WRITERS[layout](random_parts(Options(**options), seed=3)), left
    parts = random_block_parts(BlockOptions(**{"max_position": 256, **SIZES, **changes, **sizes}), seed=3)
    return BLOCK_WRITERS[layout](with_copies(parts, zoo.target("llama")) if layout == "deepspec" else parts), left


def in_few_bits(files: Files, scheme: Scheme, left: str = "^$", said: bool = True) -> tuple[Files, Files]:
    """(the files with matrices in that format, their twin of the same numbers).

    left: an expression for matrices that stay.  said: whether the config names these, each by its own key's kind of rule.
    """
    (config, tensors), generator = files, torch.Generator().manual_seed(1)
    stored, numbers, kept = dict(tensors), dict(tensors), list[str]()
    for name in sorted(tensors):
        if MATRIX.search(name) is None or "embed" in name:
            continue
        matrix = name.removesuffix(".weight")
        if re.search(left, name):
            kept.append(matrix)
            continue
        own, numbers[name] = scheme.write(*tensors[name].shape, generator)
        del stored[name]
        stored |= {f"{matrix}.{ending}": tensor.contiguous() for ending, tensor in own.items()}
    return (config | {"quantization_config": with_kept(scheme, kept if said else [])}, stored), (config, numbers)


def with_kept(scheme: Scheme, kept: list[str]) -> dict[str, Any]:
    """The scheme's config, which names these matrices as ones that stay."""
    config = copy.deepcopy(scheme.config)
    match config["quant_method"]:
        case "compressed-tensors" | "modelopt":
            config["ignore"] = kept
        case "fp8" | "awq":
            config["modules_to_not_convert"] = kept or None
        case "gptq":
            config |= {"lm_head": "lm_head" not in kept, "dynamic": {f"-:{re.escape(name)}$": {} for name in kept}}
    return config


def fast(scheme: str) -> Scheme:
    """The scheme, for matrices so large that plain loops would take minutes: values are packed by torch."""
    config, write = SCHEMES[scheme]
    if scheme == "fp8 channel":
        return SCHEMES[scheme]

    def int4(N: int, K: int, generator: torch.Generator) -> Written:
        qvalues, scale = draw(16, N, K, generator=generator), scales(N, K // 128, generator=generator)
        packed = (qvalues.unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)).sum(-1).to(torch.int32)
        tensors = {"weight_packed": packed, "weight_scale": scale, "weight_shape": torch.tensor([N, K])}
        return tensors, (qvalues - 8).float() * spread(scale, K)

    def nvfp4(N: int, K: int, generator: torch.Generator) -> Written:
        qvalues = draw(16, N, K, generator=generator)
        dense = torch.tensor(E2M1 + tuple(-value for value in E2M1))[qvalues]
        scale, whole = (100 * torch.rand(N, K // 16, generator=generator) + 1).to(torch.float8_e4m3fn), torch.tensor([6000.0])
        packed = (qvalues[:, ::2] | qvalues[:, 1::2] << 4).to(torch.uint8)
        tensors = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": whole}
        return tensors, dense * spread(scale.float() / whole, K)

    return Scheme(config, {"w4a16 g128": int4, "nvfp4": nvfp4}[scheme])


def draft_scores(head: DraftHead, walks: bool = True) -> torch.Tensor:
    """Logits of some drafts, by random features, in float32 or more on the CPU.

    walks: whether those of a block are along a text, with what the head adds for the token before.
    """
    weight = head.embed_tokens.weight
    generator, at = torch.Generator().manual_seed(5), {"device": weight.device}
    ids = torch.randint(40, (9,), generator=generator).to(**at)
    features = torch.randn(9, head.feature_size, generator=generator).to(weight.dtype).to(**at)
    if isinstance(head, BlockHead):
        hidden = head.drafts(features[None], ids[None], torch.tensor([[3, 8]], **at), 4)
        before = torch.randint(40, hidden.shape[:-1], generator=generator).to(**at)
        found = head.walk(hidden, before) if walks else head.logits(hidden)
    else:
        assert isinstance(head, EagleHead)
        fused, attn = head.fuse(features), DenseAttention(head.config.model.layer_kinds)
        hidden, first = head.level(ids, fused, torch.arange(9, **at), attn)
        found = torch.stack((first, head.logits(head(ids, hidden, torch.arange(9, **at), attn))))
    return found.to(torch.promote_types(found.dtype, torch.float32)).cpu()


def save_both(root: Path, kind: str, scheme: Scheme, zoo: Zoo, said: bool = True) -> tuple[Path, Path]:
    """(a head of that kind in the format, its unquantised twin)."""
    files, left = head_files(kind, zoo)
    quantised, twin = in_few_bits(files, scheme, left, said)
    return save(root / "quantised", quantised), save(root / "twin", twin)


def rewritten(folder: Path, into: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> Path:
    """The folder's files, changed."""
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(config, tensors)
    into.mkdir(parents=True, exist_ok=True)
    (into / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, into / "model.safetensors")
    return into
