"""A head's parts under a layout's names for them: one list, by which headers are checked, and weights are read and saved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.loader import Parts, copy_, fill_attention, fill_linear, fill_mlp, fill_norm
from specdec.models.latent.attention import LatentAttention
from specdec.models.latent.weights import fill_latents, latents_of
from specdec.models.layers import MLP, Embedding, RMSNorm, SelfAttention
from specdec.models.linear import Linear

# A tensor: numbers that no module with a name of its own holds.  Files hold them as they are, but vectors as [1, 1, size].
Part = tuple[str, nn.Module | Tensor]
FILLERS: Parts = {
    Linear: fill_linear, SelfAttention: fill_attention, LatentAttention: fill_latents, MLP: fill_mlp, RMSNorm: fill_norm,
}  # fmt: skip


def layer_parts(layer: nn.Module, name: str, input_norm: str = "input_layernorm") -> Iterator[Part]:
    """A decoder layer, or a head that is one.  An input norm that is no norm (EAGLE-1's first) has no tensor."""
    if isinstance(layer.input_layernorm, RMSNorm):
        yield f"{name}.{input_norm}", layer.input_layernorm
    for part in ("self_attn", "mlp", "post_attention_layernorm"):
        yield f"{name}.{part}", getattr(layer, part)


def tensors_of(parts: Iterable[Part]) -> dict[str, Tensor]:
    """Every tensor of the parts, as files hold it; the ranks' shares of a head can't be written."""
    named: dict[str, Tensor] = {}
    for name, part in parts:
        if isinstance(part, Linear):
            for row in part.parts.sizes:
                at = f"{name}.{row}" if row else name
                named |= {f"{at}.{ending}": stored.tensor for ending, stored in part.tensors(row).items()}
        elif isinstance(part, SelfAttention):
            named |= tensors_of(((name, part.qkv_proj), (f"{name}.o_proj", part.o_proj)))
            if part.qk_norm is not None:  # a row for each head; files have one for all
                weight, Q = part.qk_norm.weight, part.num_heads
                named |= {f"{name}.q_norm.weight": weight[0], f"{name}.k_norm.weight": weight[Q]}
        elif isinstance(part, LatentAttention):
            named |= {f"{name}.{own}": tensor for own, tensor in latents_of(part).items()}
        elif isinstance(part, MLP):
            named |= tensors_of(((name, part.gate_up_proj), (f"{name}.down_proj", part.down_proj)))
        elif isinstance(part, Tensor):
            named[name] = part[None, None] if part.dim() == 1 else part
        else:
            assert isinstance(part, RMSNorm | Embedding)
            named[f"{name}.weight"] = part.weight
    return named


def matrices_of(parts: Iterable[Part]) -> Iterator[str]:
    """The matrices of the parts, which files may hold in 8 or 4 bits, as files call them, without an ending."""
    for name, part in parts:
        if isinstance(part, Linear):
            yield from (f"{name}.{row}" if row else name for row in part.parts.sizes)
        elif isinstance(part, SelfAttention):
            yield from matrices_of(((name, part.qkv_proj), (f"{name}.o_proj", part.o_proj)))
        elif isinstance(part, MLP):
            yield from matrices_of(((name, part.gate_up_proj), (f"{name}.down_proj", part.down_proj)))


def fill(parts: Iterable[Part], checkpoint: Checkpoint) -> None:
    """Fills the parts from the tensors of a checkpoint."""
    for name, part in parts:
        if isinstance(part, Tensor) and part.dim() == 1:
            with torch.no_grad():
                part.copy_(checkpoint.take(name).flatten())
            checkpoint.landed(name, part)
        elif isinstance(part, Tensor):
            copy_(part, checkpoint, name)
        elif isinstance(part, Embedding):
            copy_(part.weight, checkpoint, f"{name}.weight")
        else:
            FILLERS[type(part)](part, checkpoint, name)
