"""Every tensor of a target's MTP layers, with its shape: for strict reading before memory is taken, and for `inspect`."""

from __future__ import annotations

import torch

from specdec.draft.formats.parts import tensors_of
from specdec.draft.formats.reading import Shapes, may_be_read
from specdec.draft.mtp.spec import MtpSpec
from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.loader import build
from specdec.models.checkpoints.stored import SAFE_DTYPES
from specdec.models.config import ModelConfig
from specdec.models.deepseek.config import DeepseekConfig
from specdec.models.experts import ExpertsConfig
from specdec.models.layers import SelfAttention
from specdec.models.schemes.source import Format


def wanted_tensors(spec: MtpSpec) -> Shapes:
    """All that the layers need."""
    model, names, H = spec.model, spec.names, spec.model.hidden_size
    norms = (names.embed_norm, names.hidden_norm, names.norm, "input_layernorm", "post_attention_layernorm")
    layer: Shapes = {f"{name}.weight": (H,) for name in norms}
    layer[f"{names.join}.weight"] = (H, 2 * H)
    attention = _latent(model) if isinstance(model, DeepseekConfig) else _heads(model)
    layer |= {f"self_attn.{name}": shape for name, shape in attention.items()}
    mlp = _mlp(H, model.intermediate_size, model.mlp_bias) if spec.experts is None else _experts(H, spec.experts)
    layer |= {f"mlp.{name}": shape for name, shape in mlp.items()}
    return {f"{prefix}.{name}": shape for prefix in spec.prefixes for name, shape in layer.items()}


def copies(spec: MtpSpec) -> dict[str, str]:
    """Tensors that may be there too and repeat one of the target's: by name, the target's."""
    return {f"{prefix}.{name}": own for prefix in spec.prefixes for name, own in spec.names.copies}


def stored_tensors(checkpoint: Checkpoint, spec: MtpSpec) -> Shapes:
    """All that the layers need, as the checkpoint stores it: a matrix in 8 or 4 bits is several tensors.

    The shape of a tensor of codes or scales is its own, by the header; nobody has compared it with the matrix's.
    """
    stored: Shapes = {}
    for name, shape in wanted_tensors(spec).items():
        matrix, format = name.removesuffix(".weight"), _format(checkpoint, name, shape)
        for tensor in (name,) if format is None else (f"{matrix}.{ending}" for ending in format.endings(checkpoint, matrix)):
            stored[tensor] = shape if tensor == name or tensor not in checkpoint else checkpoint.shape(tensor)
    return stored


def check_tensors(checkpoint: Checkpoint, spec: MtpSpec) -> None:
    """ValueError for a tensor of the layers that is missing, unknown, of another shape, or of the wrong kind of numbers.

    Reads headers alone: nothing was allocated yet.  Shapes of codes and of scales are checked as they are read.
    """
    wanted, may = stored_tensors(checkpoint, spec), {*copies(spec), *_beside_codes(checkpoint, spec)}
    own = tuple(f"{prefix}." for prefix in spec.prefixes)
    held = [name for name in checkpoint.names() if name.startswith(own)]
    spare = [name for name in held if name not in wanted and name not in may and not may_be_read(name)]
    missing = sorted(set(wanted) - set(held))
    if missing:
        instead = f"; the layers hold {', '.join(spare[:4])}, which no part of them is called" if spare else ""
        raise ValueError(
            f"{checkpoint.folder}: tensor {missing[0]!r} is missing for draft='mtp': config.json counts "
            f"{spec.model.num_layers} MTP layers ({len(missing)} of {len(wanted)} tensors are missing){instead}"
        )
    if spare:
        raise ValueError(
            f"{checkpoint.folder}: {len(spare)} tensors are not part of a {spec.family} target's MTP layers: "
            f"{', '.join(spare[:8])}"
        )
    for name, shape in wanted_tensors(spec).items():
        if name in wanted:
            checkpoint.expect(name, shape, "the target's sizes")
            checkpoint.expect_kind(name, "floating-point numbers")


def how_stored(checkpoint: Checkpoint, spec: MtpSpec) -> str:
    """How the layers' matrices lie in the checkpoint, in words."""
    ways = []
    for name, shape in wanted_tensors(spec).items():
        if len(shape) == 2:
            format = _format(checkpoint, name, shape)
            ways.append(format.describe() if format else str(SAFE_DTYPES[checkpoint.dtype(name)]).removeprefix("torch."))
    return ", ".join(dict.fromkeys(ways))


def _format(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> Format | None:
    """How a matrix is stored in 8 or 4 bits.  The router, which decides between experts, is always ordinary numbers."""
    is_matrix = len(shape) == 2 and not name.endswith("mlp.gate.weight")
    return checkpoint.format_of(name.removesuffix(".weight")) if is_matrix else None


def _beside_codes(checkpoint: Checkpoint, spec: MtpSpec) -> set[str]:
    """Tensors that may lie beside the codes of a matrix."""
    matrices = {name: _format(checkpoint, name, shape) for name, shape in wanted_tensors(spec).items()}
    return {
        f"{name.removesuffix('.weight')}.{ending}" for name, format in matrices.items() if format for ending in format.may_end
    }


def _heads(model: ModelConfig) -> Shapes:
    attention = build(lambda: SelfAttention(model, model.hidden_size), torch.device("meta"), torch.float32)
    return {name.removeprefix("."): tuple(tensor.shape) for name, tensor in tensors_of([("", attention)]).items()}


def _latent(model: DeepseekConfig) -> Shapes:
    hidden, H, C, R, N, V = (
        model.hidden_size, model.num_heads, model.rank, model.head_dim, model.nope_dim, model.value_dim
    )  # fmt: skip
    shapes: Shapes = {
        "kv_a_proj_with_mqa.weight": (C + R, hidden),
        "kv_a_layernorm.weight": (C,),
        "kv_b_proj.weight": (H * (N + V), C),
        "o_proj.weight": (hidden, H * V),
    }
    if (q := model.q_rank) is None:
        shapes["q_proj.weight"] = (H * (N + R), hidden)
    else:
        shapes |= {"q_a_proj.weight": (q, hidden), "q_a_layernorm.weight": (q,), "q_b_proj.weight": (H * (N + R), q)}
    if model.qkv_bias:
        shapes |= {"kv_a_proj_with_mqa.bias": (C + R,), **({"q_a_proj.bias": (q,)} if q is not None else {})}
    shapes |= {"o_proj.bias": (hidden,)} if model.o_bias else {}
    if (index := model.indexer) is not None:
        assert q is not None
        J, I = index.heads, index.head_dim
        shapes |= {
            "indexer.wq_b.weight": (J * I, q),
            "indexer.wk.weight": (I, hidden),
            "indexer.weights_proj.weight": (J, hidden),
            "indexer.k_norm.weight": (I,),
            "indexer.k_norm.bias": (I,),
        }
    return shapes


def _mlp(hidden: int, size: int, bias: bool) -> Shapes:
    shapes: Shapes = {f"{name}_proj.weight": (size, hidden) for name in ("gate", "up")}
    shapes["down_proj.weight"] = (hidden, size)
    return shapes | ({"gate_proj.bias": (size,), "up_proj.bias": (size,), "down_proj.bias": (hidden,)} if bias else {})


def _experts(hidden: int, experts: ExpertsConfig) -> Shapes:
    shapes: Shapes = {"gate.weight": (experts.count, hidden), "gate.e_score_correction_bias": (experts.count,)}
    for number in range(experts.count):
        one = _mlp(hidden, experts.intermediate_size, False)
        shapes |= {f"experts.{number}.{name}": shape for name, shape in one.items()}
    shared = _mlp(hidden, experts.shared * experts.intermediate_size, False)
    return shapes | {f"shared_experts.{name}": shape for name, shape in shared.items()}
