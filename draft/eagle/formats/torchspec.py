"""EAGLE-3 and EAGLE-3.1 heads with latent attention of TorchSpec (LightSeek), which SGLang and vLLM read.

`midlayer.*` in its own exports, `layers.0.*` in those that it makes for vLLM.  Flags say which norms there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec.draft.eagle.formats.common import AUX, DEFAULT, eagle3_reading, nested_config, refuse_bias
from specdec.draft.eagle.formats.latent import ARCHITECTURE, latent_layers, latent_meanings
from specdec.draft.formats.body import aux_layers_of, check_features
from specdec.draft.formats.reading import HeadFiles, HeadFormat, ParsedHead, PartNames
from specdec.models.checkpoints.config_values import flag
from specdec.models.config import ModelConfig

NAME = "torchspec"
ARCHITECTURES = (ARCHITECTURE, "Eagle3DeepseekV3ForCausalLM", "DeepSeekForCausalLMEagle3")
KIMI = ("kimi_k2", "kimi_k25")  # the model_types for which its exporter counts layers as vLLM does
OWN_KEYS = frozenset(
    ("draft_vocab_size", "eagle_config", "target_hidden_size", "fc_norm", "use_aux_norm", "norm_output", "bias", AUX)
    + ("norm_before_residual", "mla_use_nope")
)
NESTED: Mapping[str, Sequence[Any]] = {
    AUX: (),
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
}


def read(files: HeadFiles, target: ModelConfig | None) -> ParsedHead:
    where = files.where
    raw = {key: value for key, value in files.raw.items() if value is not None}
    check_features(target, where)
    refuse_bias(raw, where)
    for key, what in (("tie_word_embeddings", "its language-model head is its own or the target's"),
                      ("mla_use_nope", "heads without positions are those of another family")):  # fmt: skip
        if flag(raw, key, where):
            raise ValueError(f"{where}: {key} must be absent or false: {what}")
    model = latent_layers(raw, OWN_KEYS, target, where)
    is_own, names = _layer_names(files, model.num_layers)
    ids = _layer_ids(raw, where)
    by_vllm = not is_own and raw["model_type"] in KIMI
    aux_layers = aux_layers_of(ids, target, where, one_based=by_vllm)
    has_norms = flag(raw, "fc_norm", where) or flag(raw, "use_aux_norm", where)
    norms = tuple(f"fc_norm.{index}" for index in range(len(aux_layers) or 3)) if has_norms else ()
    before, recycles = flag(raw, "norm_before_residual", where), flag(raw, "norm_output", where)
    counted = "counted from 1, as in its exports for vLLM" if by_vllm else "0-based outputs of layers"
    meanings = {
        AUX: f"absent: {DEFAULT}" if ids is None else f"{ids}: {counted}",
        "fc_norm": f"{has_norms}: {'a norm of each feature' if has_norms else 'no norm'} before fc",
        "norm_output": f"{recycles}: what is recycled is the output {'after' if recycles else 'before'} the final norm",
        **latent_meanings(model),
    }
    return eagle3_reading(
        files, model, target, aux_layers, PartNames(*names, feature_norms=norms), meanings, draft_size=model.vocab_size,
        format=NAME, feature_norm="each" if has_norms else "none", norm_before_residual=before, recycles_normed=recycles,
    )  # fmt: skip


def _layer_names(files: HeadFiles, count: int) -> tuple[bool, tuple[str, tuple[str, ...]]]:
    """Whether the layer has TorchSpec's own name, and the names of the first and of later layers."""
    held = files.checkpoint.names()
    is_own, is_vllm = (any(name.startswith(mark) for name in held) for mark in ("midlayer.", "layers.0."))
    if is_own == is_vllm:
        raise ValueError(
            f"{files.folder}: the layers must be called midlayer.* or layers.0.*, got {'both' if is_own else 'neither'}"
        )
    if is_own and count != 1:
        raise ValueError(f"{files.where}: num_hidden_layers is {count}, but the checkpoint holds one layer, midlayer")
    return is_own, ("midlayer", ()) if is_own else ("layers.0", tuple(f"layers.{index}" for index in range(1, count)))


def _layer_ids(raw: dict[str, Any], where: str) -> Any:
    """The list of layers, which either place may hold; None: neither does."""
    top, nested = raw.get(AUX), nested_config(raw, NESTED, where).get(AUX)
    if top is not None and nested is not None and top != nested:
        raise ValueError(f"{where}: {AUX} is {top} at the top and {nested} in eagle_config; expected one list")
    return top if nested is None else nested


FORMAT = HeadFormat(NAME, "TorchSpec (LightSeek), SGLang", "EAGLE-3, EAGLE-3.1, both with latent attention", read)
