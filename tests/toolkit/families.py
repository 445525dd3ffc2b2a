"""Tiny random targets of families that run through transformers' code, and what transformers itself makes of them.

Windows and chunks are small, so that prompts and outputs cross them many times.  head_dim is 16, the least our kernels take.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from specdec.generation import Generation
from toolkit.models import scaled

COMMON = dict(
    vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, max_position_embeddings=256, bos_token_id=0, eos_token_id=None, pad_token_id=None, tie_word_embeddings=False,
)  # fmt: skip
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.1] * 8, "long_factor": [3.0] * 8}
# name: (model_type, what differs from COMMON)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", dict(sliding_window=8)),
    "qwen2": ("qwen2", dict(use_sliding_window=True, sliding_window=8, max_window_layers=2)),
    "qwen3": ("qwen3", {}),
    "gemma2": (
        "gemma2",
        dict(sliding_window=8, query_pre_attn_scalar=10, attn_logit_softcapping=3.0, final_logit_softcapping=20.0,
             tie_word_embeddings=True),
    ),
    "gemma3": (
        "gemma3_text",
        dict(sliding_window=8, query_pre_attn_scalar=10, layer_types=["sliding_attention", "full_attention"] * 2,
             tie_word_embeddings=True),
    ),
    "gpt-oss": ("gpt_oss", dict(sliding_window=8, num_local_experts=4, num_experts_per_tok=2)),
    "llama4": (
        "llama4_text",
        dict(attention_chunk_size=16, no_rope_layer_interval=2, interleave_moe_layer_step=2, num_local_experts=2,
             intermediate_size_mlp=40, floor_scale=4, attn_scale=0.5),
    ),
    "phi3": ("phi3", dict(sliding_window=8, hidden_size=64)),
    "phi3-longrope": (
        "phi3",
        dict(original_max_position_embeddings=64, rope_parameters=LONGROPE, hidden_size=64),
    ),
    "qwen3-moe": (
        "qwen3_moe",
        dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, mlp_only_layers=[1], norm_topk_prob=True),
    ),
    "gemma3n": (
        "gemma3n_text",
        dict(num_hidden_layers=6, layer_types=["sliding_attention", "full_attention"] * 3, num_kv_shared_layers=3,
             sliding_window=8, hidden_size_per_layer_input=8, vocab_size_per_layer_input=40, laurel_rank=4, altup_num_inputs=3,
             activation_sparsity_pattern=[0.8] * 2 + [0.0] * 4, pad_token_id=0, tie_word_embeddings=True),
    ),
    "gemma4": (
        "gemma4_text",
        dict(num_hidden_layers=6, layer_types=["sliding_attention", "full_attention"] * 3, num_kv_shared_layers=3,
             sliding_window=8, hidden_size_per_layer_input=8, vocab_size_per_layer_input=40, global_head_dim=16,
             attention_k_eq_v=True, use_double_wide_mlp=True, pad_token_id=0, tie_word_embeddings=True),
    ),
    "mixtral": ("mixtral", dict(sliding_window=8, num_local_experts=4, num_experts_per_tok=2)),
}  # fmt: skip
NO_FEATURES = ("gemma3n",)  # whose layers hand on several streams, so that only heads of the final hidden state fit
NATIVE = ("llama", "mistral", "qwen2", "qwen3")
MARGIN = 1e-4  # between the best two logits; below, rounding could decide, and transformers is no oracle


def save_family(folder: Path, model_type: str, seed: int, **changes: Any) -> Path:
    """A random model of that type, as transformers saves it."""
    config = CONFIG_MAPPING[model_type](**{**COMMON, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(2 * noise if "sinks" in name else scaled(name, noise))
    model.save_pretrained(folder)
    return folder


def shallow(own: dict[str, Any]) -> dict[str, Any]:
    """What differs from COMMON in a target of as few layers as have one of each kind: tracing takes a second a layer."""
    layers = 4 if "num_kv_shared_layers" in own else 2  # one of each kind that owns keys, and one that reads them
    lists = {key: own[key][:layers] for key in ("layer_types", "activation_sparsity_pattern") if key in own}
    shared = {"num_kv_shared_layers": 2} if "num_kv_shared_layers" in own else {}
    return {**own, "num_hidden_layers": layers, **lists, **shared}


class Families:
    """Folders and transformers models by name, made once."""

    def __init__(self, root: Path, *, is_shallow: bool = False) -> None:
        self.root, self._is_shallow = root, is_shallow
        self._models: dict[str, PreTrainedModel] = {}

    def target(self, name: str) -> Path:
        model_type, own = FAMILIES[name]
        own = shallow(own) if self._is_shallow else own
        folder = self.root / name
        return folder if folder.is_dir() else save_family(folder, model_type, list(FAMILIES).index(name), **own)

    def hf(self, name: str) -> PreTrainedModel:
        """In float32, with transformers' own eager attention and experts."""
        if name not in self._models:
            self._models[name] = eager(self.target(name))
        return self._models[name]


def eager(folder: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    return model.eval()


@torch.no_grad()
def assert_greedy(model: PreTrainedModel, out: Generation) -> None:
    """Asserts that each token is the best one after all tokens before it.

    transformers computes the whole text in one pass without a cache.  By induction the text is what greedy search writes.
    """
    prompt, text = out.prompt_token_ids, out.token_ids
    logits = model(torch.tensor([prompt + text]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    best, second = logits.topk(2).values.unbind(-1)
    assert (best - second).min() > MARGIN, "a near-tie: choose another seed"
    assert text == logits.argmax(-1).tolist(), prompt


@torch.no_grad()
def full_pass_greedy(model: PreTrainedModel, prompt: list[int], max_tokens: int) -> list[int]:
    """transformers' own greedy search, without its caches (which are not exact for chunks)."""
    out: Tensor = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
        max_new_tokens=max_tokens, use_cache=False,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()
