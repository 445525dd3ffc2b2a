"""Tiny random targets of every family, written to disk by transformers itself, and random EAGLE heads for them.

The targets' greedy text comes from transformers too: it is the oracle of every losslessness test.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from specdec import SpecConfig, SpecDecoder
from specdec.draft.kinds import KINDS
from toolkit.checkpoints.tokenizers import byte_tokenizer, word_tokenizer

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
COMMON = dict(
    vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, bos_token_id=0, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
# name: (config class, model class, what differs from COMMON)
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama3-tied-dim8": (
        LlamaConfig,
        LlamaForCausalLM,
        dict(head_dim=8, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True),
    ),
    "llama-dim80-biases": (
        LlamaConfig,
        LlamaForCausalLM,
        dict(head_dim=80, num_attention_heads=2, num_key_value_heads=1, attention_bias=True, mlp_bias=True),
    ),
    "llama-linear-8-layers": (
        LlamaConfig,
        LlamaForCausalLM,
        dict(num_hidden_layers=8, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}),
    ),
    "mistral": (
        MistralConfig,
        MistralForCausalLM,
        dict(head_dim=16, num_key_value_heads=1, sliding_window=11, tie_word_embeddings=False),
    ),
    "qwen2": (
        Qwen2Config,
        Qwen2ForCausalLM,
        dict(hidden_size=48, tie_word_embeddings=True, use_sliding_window=True, sliding_window=6, max_window_layers=2),
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, dict(head_dim=24, tie_word_embeddings=False)),
    # not families of their own: a vocabulary small enough for statistics, and large ones that have a tokenizer
    "tiny-vocab": (LlamaConfig, LlamaForCausalLM, dict(vocab_size=12, num_hidden_layers=3, hidden_size=16)),
    "words": (LlamaConfig, LlamaForCausalLM, dict(vocab_size=512)),
    "bytes": (LlamaConfig, LlamaForCausalLM, dict(vocab_size=384)),
    # differential attention: one pair of key heads; each query head its own; groups, biases, tied embeddings
    "diffllama": (DiffLlamaConfig, DiffLlamaForCausalLM, {}),
    "diffllama-mha": (DiffLlamaConfig, DiffLlamaForCausalLM, dict(num_key_value_heads=4, lambda_std_dev=0.3)),
    "diffllama-gqa": (
        DiffLlamaConfig,
        DiffLlamaForCausalLM,
        dict(
            num_attention_heads=12, num_key_value_heads=4, head_dim=10, attention_bias=True, tie_word_embeddings=True,
            rope_parameters=LLAMA3_ROPE,
        ),
    ),
    # a window below the depth of trees
    "narrow": (MistralConfig, MistralForCausalLM, dict(head_dim=16, num_key_value_heads=1, sliding_window=2)),
}  # fmt: skip
TARGETS = list(FAMILIES)[:7]
SEEDS = {"qwen3": 100}  # where the position in FAMILIES gives near-ties
TOKENIZERS = {"words": word_tokenizer, "bytes": byte_tokenizer}


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Weights that make every part matter: norms off 1, biases off 0, attention and MLP as large as the residual."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(scaled(name, noise))


def save_random(model: PreTrainedModel, folder: Path, seed: int) -> Path:
    """The model with random weights, and random corrections of its routers, as transformers saves it."""
    randomise(model, seed)
    generator = torch.Generator().manual_seed(seed)
    for buffer in (b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")):
        buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


def scaled(name: str, noise: Tensor) -> Tensor:
    """Noise made into a weight of that name."""
    if "norm" in name:
        return 1 + 0.2 * noise
    if noise.dim() == 1:
        return 0.3 * noise
    if "embed" in name:
        return noise
    return noise * (2.0 if "q_proj" in name or "k_proj" in name else 1.5) / noise.shape[-1] ** 0.5


def save_target(folder: Path, name: str, **changes: Any) -> Path:
    """A random model of that name, as transformers saves it, with a tokenizer where the name says so."""
    config_class, model_class, own = FAMILIES[name]
    model = model_class(config_class(**{**COMMON, **own, **changes}))
    randomise(model, SEEDS.get(name, list(FAMILIES).index(name)))
    model.save_pretrained(folder)
    if name in TOKENIZERS:
        TOKENIZERS[name](model.config.vocab_size).save_pretrained(folder)
    return folder


def layer_shapes(config: dict[str, Any], in_features: int, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of one Llama decoder layer, its input norm left out."""
    H, D, I = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    Q, K = config["num_attention_heads"], config["num_key_value_heads"]
    for letter, heads in (("q", Q), ("k", K), ("v", K)):
        yield f"{prefix}.self_attn.{letter}_proj.weight", (heads * D, in_features)
    yield f"{prefix}.self_attn.o_proj.weight", (H, Q * D)
    yield f"{prefix}.mlp.gate_proj.weight", (I, H)
    yield f"{prefix}.mlp.up_proj.weight", (I, H)
    yield f"{prefix}.mlp.down_proj.weight", (H, I)
    yield f"{prefix}.post_attention_layernorm.weight", (H,)


def head_config(target: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A head's config.json for a target's; it says nothing of rope, so it follows the target."""
    heads = target["num_attention_heads"]
    config = {key: target[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")}
    head_dim = target.get("head_dim") or target["hidden_size"] // heads
    return {
        **config, "model_type": "llama", "intermediate_size": 40, "num_hidden_layers": 1, "head_dim": head_dim,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "tie_word_embeddings": False, **changes,
    }  # fmt: skip


def kept_ids(vocab_size: int, draft_vocab_size: int) -> Tensor:
    """Which target ids a pruned vocabulary keeps: ascending, and neither the first ones nor evenly spread."""
    generator = torch.Generator().manual_seed(vocab_size)
    return torch.randperm(vocab_size, generator=generator)[:draft_vocab_size].sort().values


def write_head(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def save_eagle3(
    folder: Path, target: Path, *, pruned: bool = True, own_embeddings: bool = False, seed: int = 0, **changes: Any
) -> Path:
    """A random EAGLE-3 head; pruned: over two thirds of the vocabulary, with d2t and t2d."""
    raw = json.loads((target / "config.json").read_text())
    V, N = raw["vocab_size"], raw.get("num_hidden_layers") or len(raw["layers_block_type"])
    Vd = 2 * V // 3 if pruned else V
    config = head_config(raw, draft_vocab_size=Vd, **changes)
    if N < 8:  # too few layers for the defaults
        config.setdefault("eagle_config", {"eagle_aux_hidden_state_layer_ids": [N - 1, 0, 1]})  # unsorted on purpose
    H, Ht = config["hidden_size"], raw["hidden_size"]
    shapes = dict(layer_shapes(config, 2 * H, "midlayer"))
    shapes |= {"midlayer.input_layernorm.weight": (H,), "midlayer.hidden_norm.weight": (H,)}
    shapes |= {"norm.weight": (H,), "fc.weight": (H, 3 * Ht), "lm_head.weight": (Vd, H)}
    if own_embeddings:
        shapes["embed_tokens.weight"] = (V, H)
    tensors = random_tensors(shapes, seed)
    if pruned:
        ids = kept_ids(V, Vd)
        tensors["d2t"] = ids - torch.arange(Vd)
        tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill_(0, ids, True)
    return write_head(folder, config, tensors)


def save_eagle1(folder: Path, target: Path, *, layers: int = 1, bias: bool = True, seed: int = 1, **changes: Any) -> Path:
    """A random EAGLE-1/2 head of one or more layers."""
    raw = json.loads((target / "config.json").read_text())
    config = head_config(raw, num_hidden_layers=layers, bias=bias, **changes)
    H = config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, 2 * H)} | ({"fc.bias": (H,)} if bias else {})
    for index in range(layers):
        shapes |= dict(layer_shapes(config, H, f"layers.{index}"))
        if index:
            shapes[f"layers.{index}.input_layernorm.weight"] = (H,)
    tensors = random_tensors(shapes, seed)
    tensors["fc.weight"] *= 0.4  # no norm tames what a step feeds to the next
    return write_head(folder, config, tensors)


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: scaled(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


HEADS = {
    "eagle3": lambda folder, target: save_eagle3(folder, target),
    "eagle3-full": lambda folder, target: save_eagle3(folder, target, pruned=False, own_embeddings=True, seed=2),
    "eagle3-window": lambda folder, target: save_eagle3(folder, target, sliding_window=3, seed=4),
    "eagle1": lambda folder, target: save_eagle1(folder, target),
    "eagle1-window": lambda folder, target: save_eagle1(folder, target, layers=2, sliding_window=4, seed=5),
    "eagle1-two-layers": lambda folder, target: save_eagle1(folder, target, layers=2, bias=False, seed=3),
}
MORE_HEADS: dict[str, Any] = {}  # of other kinds, which the files that make them add
MORE_TARGETS: dict[str, Callable[[Path], Path]] = {}  # of other families, likewise


class Zoo:
    """Folders of models by name, made once; and what transformers makes of them.  changes: of each target's config."""

    def __init__(self, root: Path, **changes: Any) -> None:
        self.root, self.changes = root, changes
        self._models: dict[str, PreTrainedModel] = {}
        self._greedy: dict[tuple[str, tuple[int, ...]], list[int]] = {}

    def target(self, name: str) -> Path:
        folder = self.root / name
        if folder.is_dir():
            return folder
        return MORE_TARGETS[name](folder) if name in MORE_TARGETS else save_target(folder, name, **self.changes)

    def head(self, target: str, kind: str) -> Path:
        folder = self.root / f"{target}--{kind}"
        return folder if folder.is_dir() else (HEADS | MORE_HEADS)[kind](folder, self.target(target))

    def hf(self, name: str) -> PreTrainedModel:
        """The target in transformers, float32, eager attention."""
        if name not in self._models:
            model = AutoModelForCausalLM.from_pretrained(self.target(name), dtype=torch.float32)
            self._models[name] = model.eval()
        return self._models[name]

    def greedy(self, name: str, prompt: list[int], max_tokens: int) -> "Greedy":
        """What transformers' own greedy search writes, without an end."""
        known = self._greedy.setdefault((name, tuple(prompt)), [])
        return Greedy(lambda: self.hf(name), prompt, max_tokens, known)

    def decoder(self, target: str, kind: str | None = None, spec: SpecConfig | None = None, **settings: Any) -> SpecDecoder:
        """A decoder on the CPU, in float32 if nothing else is said.  kind: with the names of other sources after "+"."""
        kind, *sources = [None] if kind is None else kind.split("+")
        head: Any = kind if kind is None or kind in KINDS else self.head(target, kind)
        head = [head, *sources] if sources else head
        return SpecDecoder.from_pretrained(
            self.target(target),
            head,
            spec,
            **{"device": "cpu", "dtype": "float32", "max_seq_len": 128, "smoke": False, **settings},
        )


class Greedy(Sequence[int]):
    """The text of greedy search in transformers, which is searched for only if somebody reads it.

    Whether another text equals it takes one pass: each token must be the best one after all tokens before it.
    """

    def __init__(self, model: Callable[[], PreTrainedModel], prompt: list[int], length: int, known: list[int]) -> None:
        self._model, self._prompt, self._length, self._known = model, prompt, length, known

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice) and key.start is None and key.step is None and (key.stop or 0) >= 0:
            shorter = self._length if key.stop is None else min(self._length, key.stop)
            return Greedy(self._model, self._prompt, shorter, self._known)
        return self.tokens[key]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Greedy):
            return self.tokens == other.tokens
        if not isinstance(other, list) or len(other) != self._length:
            return False
        if len(other) > len(self._known) and is_greedy(self._model(), self._prompt, other):
            self._known[:] = other
        return other == self._known[: self._length] if len(other) <= len(self._known) else False

    def __add__(self, other: list[int]) -> list[int]:
        return self.tokens + other

    def __radd__(self, other: list[int]) -> list[int]:
        return other + self.tokens

    def __repr__(self) -> str:
        return repr(self.tokens)

    __hash__ = None  # type: ignore[assignment]

    @property
    def tokens(self) -> list[int]:
        if len(self._known) < self._length:
            self._known[:] = hf_greedy(self._model(), self._prompt, self._length)
        return self._known[: self._length]


@torch.no_grad()
def is_greedy(model: PreTrainedModel, prompt: list[int], text: list[int]) -> bool:
    """Whether transformers' greedy search writes that text, by one pass over it.  Refuses near-ties, as `hf_greedy` does."""
    logits = model(torch.tensor([prompt + text]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    best, second = logits.topk(2).values.unbind(-1)
    same = logits.argmax(-1) == torch.tensor(text)
    right = int(same.int().cumprod(0).sum())  # tokens before the first that differs; later ones follow another text
    assert not right or (best - second)[:right].min() > 1e-4, "a near-tie: choose another seed for the model or the prompt"
    return right == len(text)


def hf_greedy(model: PreTrainedModel, prompt: list[int], max_tokens: int) -> list[int]:
    """transformers' own greedy search.  Refuses near-ties, which rounding could decide: there it is no oracle."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    best, second = torch.stack(out.scores).topk(2).values.unbind(-1)
    assert (best - second).min() > 1e-4, "a near-tie: choose another seed for the model or the prompt"
    return out.sequences[0, len(prompt) :].tolist()


def ragged_prompts(vocab_size: int, count: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of 1, 2 and then random lengths."""
    generator = torch.Generator().manual_seed(seed)
    lens = [1, 2, *torch.randint(3, 36, (count,), generator=generator).tolist()][:count]
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lens]
