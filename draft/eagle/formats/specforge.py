"""EAGLE-3 and EAGLE-3.1 heads of SpecForge: `midlayer.*` with `d2t` and `t2d`; flags say which norms there are.

Where runtimes read a key differently, this reader follows SpecForge's own trainer: `norm_output` says only whether the
language-model head reads the normed output, and what is recycled is the output before the norm.
"""

from __future__ import annotations

from specdec.draft.eagle.formats.common import AUX, DEFAULT, eagle3_reading, nested_config, refuse_bias, three_layers
from specdec.draft.eagle.formats.safeailab import NESTED_KEYS
from specdec.draft.formats.body import aux_layers_of, check_features, head_layers
from specdec.draft.formats.reading import HeadFiles, ParsedHead, PartNames
from specdec.models.checkpoints.config_values import flag
from specdec.models.config import ModelConfig

NAME = "specforge"
OWN_KEYS = frozenset(("draft_vocab_size", "eagle_config", "target_hidden_size", "fc_norm", "norm_output", "bias"))
NESTED = {key: NESTED_KEYS[key] for key in (AUX, "use_aux_hidden_state")}


def read(files: HeadFiles, target: ModelConfig | None) -> ParsedHead:
    raw, where = files.raw, files.where
    check_features(target, where)
    refuse_bias(raw, where)
    model = head_layers(raw, OWN_KEYS, target, where, expected=1)
    ids = nested_config(raw, NESTED, where).get(AUX)
    aux_layers = aux_layers_of(ids, target, where)
    three_layers(ids, aux_layers, where)
    has_fc_norm, norms_logits = flag(raw, "fc_norm", where), flag(raw, "norm_output", where, True)
    norms = tuple(f"fc_norm.{index}" for index in range(3)) if has_fc_norm else ()
    meanings = {
        AUX: f"absent: {DEFAULT}" if ids is None else f"{ids}: 0-based outputs of layers",
        "fc_norm": f"{has_fc_norm}: {'a norm of each feature' if has_fc_norm else 'no norm'} before fc",
        "norm_output": f"{norms_logits}: the head's logits read the {'normed' if norms_logits else 'raw'} output; what is "
        "recycled is raw, as in SpecForge's trainer (SGLang and vLLM recycle the normed output if it is true)",
    }
    names, norm = PartNames("midlayer", feature_norms=norms), "each" if has_fc_norm else "none"
    return eagle3_reading(
        files, model, target, aux_layers, names, meanings, t2d="must", full="must", format=NAME, feature_norm=norm,
        norms_logits=norms_logits,
    )  # fmt: skip
