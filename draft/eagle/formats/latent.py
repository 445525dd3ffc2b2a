"""The layers of an EAGLE-3 head with latent attention (MLA): the keys that its layouts share, which are DeepSeek V3's.

Its MLPs are dense, whatever a config that was copied from the target says of experts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from specdec.draft.formats.body import layer_count, only_keys, parse_head_rope
from specdec.models.checkpoints.config_values import mapping, text
from specdec.models.config import ModelConfig
from specdec.models.deepseek.config import parse_deepseek
from specdec.models.keys.shared import require
from specdec.models.latent.config import LatentConfig
from specdec.models.schemes.config import scheme_of

ARCHITECTURE = "Eagle3DeepseekV2ForCausalLM"
RANK = "kv_lora_rank"  # the key that a config of latent attention has
_READ = frozenset(
    "attention_bias hidden_act hidden_size intermediate_size kv_lora_rank max_position_embeddings mlp_bias "
    "num_attention_heads num_hidden_layers num_key_value_heads qk_head_dim qk_nope_head_dim qk_rope_head_dim rms_norm_eps "
    "rope_interleave rope_parameters rope_scaling rope_theta torch_dtype dtype v_head_dim vocab_size".split()
)
# Of the target's experts, and what says nothing of a forward pass.
_ASIDE = frozenset(
    "architectures attention_dropout auto_map aux_loss_alpha bos_token_id do_sample eos_token_id ep_size "
    "first_k_dense_replace initializer_range max_length model_type moe_intermediate_size moe_layer_freq n_group "
    "n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok num_nextn_predict_layers output_attentions "
    "output_hidden_states pad_token_id pretraining_tp q_lora_rank return_dict routed_scaling_factor scoring_func sep_token_id "
    "seq_aux temperature tie_word_embeddings tokenizer_class top_k top_p topk_group topk_method torchscript "
    "transformers_version unk_token_id use_bfloat16 use_cache".split()
)
_SCHEMES = frozenset(("quantization_config", "compression_config"))


def latent_layers(
    raw: dict[str, Any], own: Iterable[str], target: ModelConfig | None, where: str, expected: int | None = None
) -> LatentConfig:
    """The head's own layers.  own: the keys that the layout's reader reads itself.  expected: as of `layer_count`.

    ValueError for any other key that is neither of latent attention nor harmless.
    """
    require(raw, ("model_type", "rms_norm_eps", "max_position_embeddings"), where)
    text(raw, "model_type", where)
    only_keys(raw, _READ | _ASIDE | _SCHEMES | frozenset(own), where)
    scheme, said = scheme_of(raw, where)
    if scheme:
        raise ValueError(
            f"{said} must be absent: draft heads are read unquantised; nearest thing that works: an unquantised "
            "head, with draft_quantize='fp8' or 'int4' (--draft-quantize)"
        )
    plain = {key: value for key, value in raw.items() if key in _READ}
    count = layer_count(raw, where, expected)
    dense = {"model_type": "deepseek_v3", "q_lora_rank": raw.get("q_lora_rank"), "first_k_dense_replace": count}
    model = parse_deepseek({**plain, **dense}, where)
    if model.qkv_bias:
        raise ValueError(f"{where}: attention_bias must be absent or false: no runtime's latent attention of a head has one")
    if target is not None and model.vocab_size != target.vocab_size:
        raise ValueError(f"{where}: vocab_size must be the target's {target.vocab_size}, got {model.vocab_size}")
    if all(said.get("rope_theta") is None for said in (raw, mapping(raw, "rope_parameters", where))):
        raise ValueError(f"{where} lacks rope_theta (or rope_parameters); expected the head's own")
    rope = parse_head_rope(raw, target, where, silent=False)
    return replace(model, rope=rope, tie_embeddings=False, latent_eps=model.rms_norm_eps)


def latent_meanings(model: LatentConfig) -> dict[str, str]:
    """What keys of latent attention were taken to mean."""
    queries = "each head's from the input" if model.q_rank is None else f"from a latent of {model.q_rank} numbers"
    pairs = "side by side" if model.interleaved else "half a head apart"
    said = {
        "q_lora_rank": f"{'absent' if model.q_rank is None else model.q_rank}: queries come {queries}",
        "rope_interleave": f"{model.interleaved}: rotated pairs of the files lie {pairs}",
        "rms_norm_eps": f"{model.rms_norm_eps}: of the norms of latents, too",
    }
    if model.rope.kind == "yarn":
        said["yarn"] = "as written, its mscale in the softmax's scale as in DeepSeek's; NeMo's trainer leaves that out"
    return said
