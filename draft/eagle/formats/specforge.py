"""EAGLE-3 and EAGLE-3.1 heads of SpecForge: `midlayer.*` with `d2t` and `t2d`; flags say which norms there are.

Where runtimes read a key differently, this reader follows SpecForge's own trainer: `norm_output` says only whether the
language-model head reads the normed output, and what is recycled is the output before the norm.
"""

from __future__ import annotations

from dataclasses import replace

from specdec.draft.eagle.formats.safeailab import AUX, NESTED_KEYS, nested_config, own_lm_head, vocabulary_tensors
from specdec.draft.formats.body import (
    aux_layers_of,
    check_features,
    layer_count,
    parse_body,
    parse_head_rope,
    width_of_features,
    windows_of,
)
from specdec.draft.formats.reading import HeadFiles, Names, Reading
from specdec.draft.formats.spec import HeadSpec
from specdec.draft.formats.vocabulary import read_draft_ids
from specdec.models.checkpoints.config_values import flag, whole
from specdec.models.config import ModelConfig

NAME, FEATURES = "specforge", 3
OWN_KEYS = frozenset(("draft_vocab_size", "eagle_config", "target_hidden_size", "fc_norm", "norm_output", "bias"))
NESTED = {key: NESTED_KEYS[key] for key in (AUX, "use_aux_hidden_state")}


def read(files: HeadFiles, target: ModelConfig | None) -> Reading:
    raw, where, checkpoint = files.raw, files.where, files.checkpoint
    check_features(target, where)
    layer_count(raw, where, 1)
    if flag(raw, "bias", where):
        raise ValueError(f"{where}: bias must be absent or false: fc has none in an EAGLE-3 head")
    model = parse_body(raw, OWN_KEYS, target, where)
    rope = parse_head_rope(raw, target, where, silent=False)
    model = replace(model, rope=rope, layer_kinds=windows_of(raw, 1, where))
    ids = nested_config(raw, NESTED, where).get(AUX)
    aux_layers = aux_layers_of(ids, target, where)
    if aux_layers and len(aux_layers) != FEATURES:
        raise ValueError(f"{where}: {AUX} must name {FEATURES} layers, got {ids}")
    has_fc_norm, norms_logits = flag(raw, "fc_norm", where), flag(raw, "norm_output", where, True)
    draft_size = whole(raw, "draft_vocab_size", where, most=model.vocab_size)
    spec = HeadSpec(
        model,
        "eagle3",
        aux_layers,
        width_of_features(raw, model.hidden_size, target, where),
        draft_size,
        feature_norm="each" if has_fc_norm else "none",
        norms_logits=norms_logits,
        own_embeddings="embed_tokens.weight" in checkpoint,
        own_lm_head=own_lm_head(files, draft_size, model.vocab_size),
        draft_ids=read_draft_ids(files, draft_size, model.vocab_size, t2d="must", full="must"),
        format=NAME,
    )
    norms = tuple(f"fc_norm.{index}" for index in range(FEATURES)) if has_fc_norm else ()
    meanings = {
        AUX: "absent: 1, N//2 - 1 and N - 4" if ids is None else f"{ids}: 0-based outputs of layers",
        "fc_norm": f"{has_fc_norm}: {'a norm of each feature' if has_fc_norm else 'no norm'} before fc",
        "norm_output": f"{norms_logits}: the head's logits read the {'normed' if norms_logits else 'raw'} output; what is "
        "recycled is raw, as in SpecForge's trainer (SGLang and vLLM recycle the normed output if it is true)",
    }
    return Reading(spec, Names("midlayer", feature_norms=norms), vocabulary_tensors(files), meanings)
