"""Tiny random encoder-decoder targets of every family that can run, and what transformers' own greedy search makes of them.

The weights are such that the text depends on what the encoder read, and does not repeat itself.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForSeq2SeqLM, PreTrainedModel

from specdec.models.transformers_backend.encoder_parts import ENCODER_DECODERS
from toolkit.models import save_eagle3, scaled

LONGEST = 64
COMMON = dict(
    vocab_size=40, d_model=32, encoder_layers=2, decoder_layers=3, encoder_attention_heads=2, decoder_attention_heads=2,
    encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=LONGEST, pad_token_id=1, bos_token_id=0, eos_token_id=None,
    decoder_start_token_id=2, forced_eos_token_id=None, tie_word_embeddings=False,
)  # fmt: skip
MODULE = dict(
    vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, max_position_embeddings=LONGEST, sliding_window=5, query_pre_attn_scalar=10, attn_logit_softcapping=3.0,
    final_logit_softcapping=20.0, bos_token_id=2, eos_token_id=None, pad_token_id=1,
)  # fmt: skip
# Families whose configs are made of two others: an encoder that is wider than its decoder, and has windows in both directions.
OWN: dict[str, dict[str, Any]] = {
    "t5gemma": dict(
        encoder={**MODULE, "hidden_size": 64, "num_hidden_layers": 3}, decoder=MODULE, vocab_size=40, tie_word_embeddings=False,
        eos_token_id=None, pad_token_id=1, bos_token_id=2,
    ),
}  # fmt: skip
MARGIN = 1e-4  # between the best two logits; below, rounding could decide, and transformers is no oracle


def save_encoder_decoder(folder: Path, model_type: str, forced: int | None = None, **changes: Any) -> Path:
    """A random model of that type, as transformers saves it.  forced: the token after the decoder's first."""
    model = AutoModelForSeq2SeqLM.from_config(
        CONFIG_MAPPING[model_type](**{**OWN.get(model_type, COMMON), **changes}), dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(ENCODER_DECODERS.index(model_type))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(0.3 * noise if name.endswith("bias") else scaled(name, noise))
            if "encoder_attn" in name and weight.dim() > 1:
                weight.mul_(2)
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    model.generation_config.forced_bos_token_id = forced
    model.save_pretrained(folder)
    return folder


def save_head(folder: Path, target: Path) -> Path:
    """A random EAGLE-3 head for such a target, whose config.json has other names for sizes."""
    raw = json.loads((target / "config.json").read_text())
    sizes = dict(
        vocab_size=raw["vocab_size"], hidden_size=raw["d_model"], num_hidden_layers=raw["decoder_layers"],
        num_attention_heads=raw["decoder_attention_heads"], num_key_value_heads=raw["decoder_attention_heads"],
    )  # fmt: skip
    described = folder.parent / f"{folder.name}-sizes"
    described.mkdir(parents=True)
    (described / "config.json").write_text(json.dumps(sizes))
    return save_eagle3(folder, described)


def eager(folder: Path) -> PreTrainedModel:
    """The model in transformers, float32, eager attention."""
    return AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def greedy(model: PreTrainedModel, source: list[int], max_tokens: int, begin: int = 1) -> list[int]:
    """What transformers' own greedy search writes.  begin: tokens that the decoder's text begins with.  Refuses near-ties."""
    ids = torch.tensor([source])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=1, max_new_tokens=max_tokens + begin - 1,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    best, second = torch.stack(out.logits).topk(2).values.unbind(-1)
    assert (best - second).min() > MARGIN, "a near-tie: choose another seed for the model or the source"
    return out.sequences[0, begin:].tolist()
