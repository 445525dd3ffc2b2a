"""Reads from a target's config.json what its MTP layers are, family by family.  Knows keys, names and layers, no weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from specdec.attention.kinds import FULL, LayerKind
from specdec.draft.mtp.spec import MtpBlock, MtpNames, MtpRules, MtpSpec
from specdec.models.checkpoints.checkpoint import config_path
from specdec.models.checkpoints.loader import LLAMA_PARTS
from specdec.models.checkpoints.mtp_names import count_key, mtp_prefixes
from specdec.models.config import ModelConfig
from specdec.models.deepseek.config import parse_experts, said
from specdec.models.deepseek.loader import PARTS
from specdec.models.described import target_json
from specdec.models.keys.shared import MTP_COUNT
from specdec.models.latent.attention import LatentLayer
from specdec.models.mimo_v2.loader import PARTS as MIMO_PARTS
from specdec.models.mimo_v2.modules import mimo_layer
from specdec.models.mixtures.families.ernie4_5_moe import parse_ernie4_5_moe
from specdec.models.mixtures.families.glm4_moe import parse_glm4_moe
from specdec.models.mixtures.families.hy_v3 import parse_hy_v3
from specdec.models.mixtures.loader import FAMILIES as MIXTURES
from specdec.models.mixtures.loader import mixture_layer
from specdec.models.nemotron_h.config import MTP_WORDS, mtp_words
from specdec.models.nemotron_h.loader import MTP_PARTS
from specdec.models.nemotron_h.modules import mtp_layer
from specdec.models.qwen_hybrid.config import FAMILIES as HYBRIDS
from specdec.models.qwen_hybrid.loader import PARTS as HYBRID_PARTS
from specdec.models.qwen_hybrid.modules import hybrid_layer


class _Family(NamedTuple):
    """read: the config of one layer, from the config.json's object, the target's config and the path.

    windowed: whether the layers are like the target's windowed ones; else they read all keys.
    """

    names: MtpNames
    rules: MtpRules
    block: MtpBlock
    read: Callable[[dict[str, Any], ModelConfig, str], ModelConfig]
    windowed: bool = False


def read_mtp(folder: Path, target: ModelConfig) -> MtpSpec:
    """The MTP layers of the target in the folder.  ValueError says why there are none, or what can't be computed."""
    path = config_path(folder)
    family, where = FAMILIES.get(target.family), str(path)
    if family is None:
        raise ValueError(
            f"draft='mtp' runs the MTP layers of {', '.join(FAMILIES)} targets, got a {target.family} target ({where}); "
            "nearest setting that works: draft='ngram', or the folder of a draft head"
        )
    if target.mtp_layers == 0:
        raise ValueError(
            f"{where}: draft='mtp' needs a target with MTP layers, got {count_key(target.family)} 0 or none; nearest setting "
            "that works: draft='ngram', or the folder of a draft head"
        )
    if family.block is _LATENT and not target.keeps_latents:
        raise ValueError(
            f"{where}: draft='mtp' runs the MTP layers of a {target.family} target that specdec's own code runs, got a target "
            "through transformers' code; nearest setting that works: backend='native' (--backend native), or draft='ngram'"
        )
    layer = family.read(target_json(folder), target, where)
    window = next(kind.window for kind in target.key_kinds if kind.window) if family.windowed else None
    kinds = tuple(LayerKind(window, skip=index) for index in range(target.mtp_layers))  # see MtpHead
    model = replace(layer, num_layers=target.mtp_layers, layer_kinds=kinds, kv_source=(), mtp_layers=0)
    if model.experts is not None and target.experts is not None:
        model = replace(model, experts=replace(model.experts, divided=target.experts.divided))
    prefixes = [prefix.removesuffix(".") for prefix in mtp_prefixes(target)]
    each = len(prefixes) // target.mtp_layers
    by_layer = tuple(tuple(prefixes[first : first + each]) for first in range(0, len(prefixes), each))
    return MtpSpec(target.family, model, by_layer, family.names, family.rules, family.block)


def _deepseek(raw: dict[str, Any], target: ModelConfig, where: str) -> ModelConfig:
    """Latent attention, always with experts; with sparse attention each layer has an indexer of its own."""
    experts = target.experts or parse_experts(said(raw, where), where)
    experts = replace(experts, dense_layers=frozenset())
    index = target.indexer
    if index is not None and target.mtp_layers > 1:
        raise ValueError(
            f"{where}: draft='mtp' runs one MTP layer with an indexer, got {MTP_COUNT} {target.mtp_layers}: an indexer chooses "
            "among all keys, and later layers have none of the first tokens; nearest setting that works: draft='ngram'"
        )
    if index is not None:
        index = replace(index, sources=tuple(range(target.mtp_layers)))
    return replace(target, experts=experts, has_experts=True, indexer=index)


def _glm4(raw: dict[str, Any], target: ModelConfig, where: str) -> ModelConfig:
    """Ordinary heads, always with experts, also where the target itself runs through transformers' code."""
    return replace(parse_glm4_moe({**raw, "first_k_dense_replace": 0}, where), quantization=target.quantization)


def _hy_v3(raw: dict[str, Any], target: ModelConfig, where: str) -> ModelConfig:
    """Ordinary heads, always with experts."""
    sparse = {"mlp_layer_types": ["sparse"] * target.num_layers, "first_k_dense_replace": 0}
    return replace(parse_hy_v3({**raw, **sparse}, where), quantization=target.quantization)


def _ernie(raw: dict[str, Any], target: ModelConfig, where: str) -> ModelConfig:
    """Ordinary heads, never with experts."""
    if target.mtp_layers > 1:
        raise ValueError(
            f"{where}: draft='mtp' runs one MTP layer of an {target.family} target, got {MTP_COUNT} {target.mtp_layers}: what "
            "more of them read is not known; nearest setting that works: draft='ngram'"
        )
    return replace(parse_ernie4_5_moe(raw, where), experts=None, has_experts=False, quantization=target.quantization)


def _hybrid(raw: dict[str, Any], target: ModelConfig, where: str) -> ModelConfig:
    """A layer as the target's own of gated attention; with experts if the target has some."""
    if target.mtp_layers > 1:
        raise ValueError(
            f"{where}: draft='mtp' runs one MTP layer of a {target.family} target, got {count_key(target.family)} "
            f"{target.mtp_layers}: more of them share their join and norms; nearest setting that works: draft='ngram'"
        )
    return replace(target, experts=target.experts and replace(target.experts, dense_layers=frozenset()))


def _dense(raw: dict[str, Any], target: ModelConfig, where: str) -> ModelConfig:
    """A layer as the target's own."""
    if set(target.key_kinds) != {FULL}:
        raise ValueError(
            f"{where}: draft='mtp' needs a target without windows, got {', '.join(sorted(map(str, set(target.key_kinds))))} "
            "layers: which of them the MTP layers are is not known"
        )
    return target


def _one_blocks(raw: dict[str, Any], target: ModelConfig, where: str) -> ModelConfig:
    """Two layers of one block each, attention and a mixture, which are one ordinary layer together."""
    if target.mtp_layers > 1:
        raise ValueError(
            f"{where}: draft='mtp' runs one MTP layer of a {target.family} target, got {MTP_COUNT} {target.mtp_layers}; "
            "nearest setting that works: draft='ngram'"
        )
    if (words := mtp_words(raw, where)) != MTP_WORDS or target.experts is None:
        raise ValueError(
            f"{where}: draft='mtp' runs an MTP layer of {' and '.join(MTP_WORDS)}, got {', '.join(words)}; nearest setting "
            "that works: draft='ngram'"
        )
    return replace(target, experts=replace(target.experts, dense_layers=frozenset()), one_block=False)


def _windowed(raw: dict[str, Any], target: ModelConfig, where: str) -> ModelConfig:
    """A layer with the heads of the target's windowed layers, and never with experts."""
    layer = next((index for index, kind in enumerate(target.layer_kinds) if kind.window), None)
    if layer is None:
        raise ValueError(
            f"{where}: draft='mtp' runs MTP layers like the target's windowed ones, got a {target.family} target without any; "
            "nearest setting that works: draft='ngram'"
        )
    return replace(target.with_heads_of(layer), experts=None, has_experts=False)


_PLAIN, _LATENT = MtpBlock(mixture_layer, {**PARTS, **LLAMA_PARTS}), MtpBlock(LatentLayer, PARTS)
_HY3, _HYBRID = MtpBlock(mixture_layer, MIXTURES["hy_v3"].parts), MtpBlock(hybrid_layer, HYBRID_PARTS)
_WINDOWED = MtpBlock(mimo_layer, MIMO_PARTS, {"post_attention_layernorm": ("pre_mlp_layernorm",)})
_ONE_BLOCKS = MtpBlock(mtp_layer, MTP_PARTS, {"input_layernorm": ("0.norm",), "post_attention_layernorm": ("1.norm",)})
_EH_COPIES = (("{0}.embed_tokens.weight", "model.embed_tokens.weight"), ("{0}.shared_head.head.weight", "lm_head.weight"))
_EH = MtpNames("{0}.enorm", "{0}.hnorm", "{0}.eh_proj", "{0}.shared_head.norm", copies=_EH_COPIES)
_EH_FINAL = MtpNames("{0}.enorm", "{0}.hnorm", "{0}.eh_proj", "{0}.final_layernorm")
_EH_BLOCKS = MtpNames(
    "{0}.layers.0.enorm", "{0}.layers.0.hnorm", "{0}.layers.0.eh_proj", "{0}.layers.1.final_layernorm", "{0}.layers"
)  # fmt: skip
_MIMO = MtpNames("{0}.token_layernorm", "{0}.hidden_layernorm", "{0}.input_proj", "{0}.final_layernorm")
_ERNIE = MtpNames("{0}", "{1}", "{2}", "model.norm", "{3}")
_MTP = MtpNames("{0}.pre_fc_norm_embedding", "{0}.pre_fc_norm_hidden", "{0}.fc", "{0}.norm", "{0}.layers.0")
# transformers' MTP path is the reference of DeepSeek and GLM.  It has none for the others.  MiMo: vLLM and SGLang agree, whose
# code came from the publisher.  Hy3: SGLang's code, which Tencent signed; vLLM's zeroes the first embedding, and is the same
# otherwise.  Qwen's hybrids: LMDeploy and SGLang agree; Nemotron: vLLM and SGLang.  ERNIE: Baidu's FastDeploy; vLLM and SGLang
# zero the first embedding and leave the target's norm out.  MiMo-V2: SGLang's code, which has all layers; vLLM's has the first.
_USUAL = MtpRules(hidden_first=False, zeroes_first=False)
LATENTS = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite")
FAMILIES = {
    **dict.fromkeys(LATENTS, _Family(_EH, _USUAL, _LATENT, _deepseek)),
    "glm4_moe": _Family(_EH, _USUAL, _PLAIN, _glm4),
    "mimo": _Family(_MIMO, MtpRules(hidden_first=True, zeroes_first=True), _PLAIN, _dense),
    "mimo_v2_flash": _Family(_EH_FINAL, replace(_USUAL, chains=False), _WINDOWED, _windowed, windowed=True),
    "hy_v3": _Family(_EH_FINAL, _USUAL, _HY3, _hy_v3),
    "ernie4_5_moe": _Family(_ERNIE, _USUAL, _PLAIN, _ernie),
    "nemotron_h": _Family(_EH_BLOCKS, _USUAL, _ONE_BLOCKS, _one_blocks),
    **dict.fromkeys(HYBRIDS, _Family(_MTP, _USUAL, _HYBRID, _hybrid)),
}
