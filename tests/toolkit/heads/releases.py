"""Heads as releases of speculators wrote them: their configs, the shapes of their tensors, and what they mean, by hand.

`tests/draft/formats/releases/0.N.json` holds what `save_pretrained` of that release's own classes wrote: speculators 0.1.0 with
transformers 4.53.3, 0.2.0 to 0.4.0 with 4.57.6, 0.5.0 with 5.6.2, 0.6.0 with 5.10.4, 0.7.0 with 5.14.1, 0.8.0 with 5.16.1, and
0.9.0 with 5.19.0; each was installed and run.  Only the verifier's name was changed.  Of tensors the shapes are kept; here they
are filled at random.  With such weights each forward pass was compared once with that of the release's own code, in float32: no
logit differs by more than 3e-6.  Left out of that: EAGLE-3 of 0.1, whose code has no rope, and of 0.2, whose code has no pass;
converted heads of later releases, whose class has none either; the drafted steps of EAGLE-3 with windows, which training counts
from another pair; DFlash2, of which 0.9's convolutions and selector alone were compared, and equal.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.heads.block_parts import BlockOptions, BlockParts
from toolkit.heads.parts import Options, Parts
from toolkit.heads.writers import Files
from toolkit.models import kept_ids

FOLDER = Path(__file__).parents[2] / "draft/formats/releases"
NULL_IDS = (1, 3, 4)  # 1, N//2 - 1 and N - 4 of a target of 8 layers
IDS = (0, 1, 2)  # [1, 2, 3] as states of a forward pass
SIZES: dict[str, Any] = dict(mlp=48, max_position=128)
EAGLE3: dict[str, Any] = dict(SIZES, aux=IDS, before_residual=True, own_embeddings=True)
BLOCK: dict[str, Any] = dict(SIZES, kind="dflash", aux=IDS, size=4, mask=7, draft_vocab=26, own_lm_head=True)
COPIES: dict[str, Any] = dict(BLOCK, own_embeddings=True)  # of the target's embeddings, until 0.8
PEAGLE: dict[str, Any] = dict(COPIES, kind="p-eagle", skips=False, before_residual=True)
DSPARK: dict[str, Any] = dict(BLOCK, kind="dspark", skips=False, rank=6, confidence="markov")
EAGLE1 = Options(**SIZES, aux=(), fc_bias=False)
# What each head is, by what its release's code does with its config.
MEANT: dict[str, Options | BlockOptions] = {
    "0.1 eagle-bias": Options(**SIZES, aux=()),
    "0.1 eagle3-converted": Options(**{**EAGLE3, "aux": NULL_IDS, "before_residual": False}),
    "0.2 eagle-plain": EAGLE1,
    "0.2 eagle3-converted-no-embeddings": Options(**SIZES, aux=NULL_IDS),
    "0.3 eagle3-converted": Options(**{**EAGLE3, "aux": NULL_IDS, "before_residual": False}),
    "0.3 eagle3-llama-2layers": Options(**{**EAGLE3, "aux": NULL_IDS}, layers=2),
    "0.4 eagle3-qwen3": Options(**{**EAGLE3, "aux": NULL_IDS}, qk_norm=True),
    "0.4 eagle3-full": Options(**{**EAGLE3, "aux": NULL_IDS}, draft_vocab=40),
    "0.5 eagle-plain": EAGLE1,
    "0.5 eagle3-norm-before-fc": Options(**EAGLE3, feature_norm="joint"),
    "0.5 eagle3-window": Options(**EAGLE3, layers=2, qk_norm=True),  # not obeyed yet
    "0.5 dflash-window": BlockOptions(**COPIES),  # not obeyed yet
    "0.6 eagle3-llama": Options(**EAGLE3),
    "0.6 dflash-window-non-causal": BlockOptions(**COPIES, windows=(4, None), rule="anchor"),
    "0.6 dflash-full": BlockOptions(**{**COPIES, "draft_vocab": 40}),
    "0.6 peagle-window": BlockOptions(**PEAGLE),  # not obeyed yet
    "0.7 eagle3-fc-norm": Options(**EAGLE3, qk_norm=True, feature_norm="each", recycles_normed=True),
    "0.7 eagle3-two-features": Options(**{**EAGLE3, "aux": (0, 1)}, qk_norm=True),
    "0.7 peagle": BlockOptions(**{**PEAGLE, "qk_norm": False}),
    "0.7 dflash": BlockOptions(**COPIES),
    "0.7 dspark-gated": BlockOptions(**DSPARK, own_embeddings=True, markov="gated"),
    "0.8 dspark-rnn": BlockOptions(**DSPARK, markov="rnn"),
    "0.8 dflash2": BlockOptions(
        **{**BLOCK, "kind": "dflash2", "draft_vocab": 40, "own_lm_head": False}, rank=6, taps=2, group=4, candidates=4
    ),
    "0.8 dflash-window": BlockOptions(**BLOCK, windows=(4, None), rule="anchor", causal=(True, False)),
    "0.8 peagle-full": BlockOptions(**{**PEAGLE, "draft_vocab": 40}, layers=1),
    "0.9 eagle3-qwen3": Options(**EAGLE3, qk_norm=True),
    "0.9 dflash-full": BlockOptions(**{**BLOCK, "draft_vocab": 40, "own_lm_head": False}),
    "0.9 dspark-vanilla": BlockOptions(**DSPARK, markov="vanilla"),
}
MIXED = ("0.7 eagle3-window",)  # layers with a window beside full ones, which `Options` does not have
REFUSED = {  # what no reader has
    "0.4 eagle-norms": "layernorms must be false",
    "0.6 mtp": "'mtp' is an MTP layer in a folder of its own",
    "0.9 xpress": "'xpress' is an XPress head",
}


def written(name: str) -> Files:
    """The head of that name: the config as it was written, and random tensors of those shapes."""
    release, head = name.split(" ")
    held = json.loads((FOLDER / f"{release}.json").read_text())[head]
    config, made = held["config"], torch.Generator().manual_seed(11)
    tensors = {key: _random(key, torch.randn(shape, generator=made)) for key, shape in held["tensors"].items()}
    if "d2t" in tensors:
        vocab, size = config["transformer_layer_config"]["vocab_size"], config["draft_vocab_size"]
        ids = kept_ids(vocab, size)
        tensors["d2t"] = ids - torch.arange(size)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    return config, tensors


def names() -> list[str]:
    """Every head of every release."""
    return [f"{path.stem} {head}" for path in sorted(FOLDER.glob("*.json")) for head in json.loads(path.read_text())]


def parts_of(name: str, tensors: dict[str, Tensor]) -> Parts | BlockParts:
    """The head as the definition of its kind has it."""
    options = MEANT[name]
    named = {_own_name(key): tensor.double() for key, tensor in tensors.items() if key not in ("d2t", "t2d")}
    draft_ids = tensors["d2t"] + torch.arange(len(tensors["d2t"])) if "d2t" in tensors else None
    if isinstance(options, Options):
        return Parts(options, named, draft_ids)
    if "mask_hidden" in named:
        named["mask_hidden"] = named["mask_hidden"].flatten()
    return BlockParts(options, named, draft_ids)


def _random(name: str, x: Tensor) -> Tensor:
    if "norm" in name:
        return 1 + 0.3 * x
    return 0.3 * x if x.dim() == 1 else x / x.shape[-1] ** 0.5


def _own_name(name: str) -> str:
    if "norm" in name:
        name = name.removesuffix(".weight").replace("input_norm", "feature_norm.0").replace("fc_norm", "feature_norm")
    for old, new in (
        ("fusion_fc", "fc"), ("transformer.", "layers.0."), ("markov_head.markov_", "markov."),
        ("markov_head.gate_proj", "markov.gate"), ("markov_head.joint_proj", "markov.joint"),
        ("confidence_head.proj", "confidence"), ("_conv.base_kernel", "_conv.base"),
        ("_conv.kernel_projection", "_conv.projection"), ("candidate_selector.hidden_projection", "selector.hidden"),
        ("candidate_selector.", "selector."), ("_codebook", ""),
    ):  # fmt: skip
        name = name.replace(old, new)
    return name
