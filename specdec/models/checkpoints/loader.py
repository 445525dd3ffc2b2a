"""Fills our fused modules from Hugging Face tensor names.  Knows names and fusing; files are `checkpoint.py`'s."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from specdec.models.causal_lm import TargetLayer
from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.config_values import DTYPE_NAMES
from specdec.models.checkpoints.kv_scales import take_kv_scale
from specdec.models.config import ModelConfig
from specdec.models.layers import MLP, HeadsRMSNorm, NoNorm, RMSNorm, SelfAttention
from specdec.models.linear import ONLY, Linear, LinearStack, Stored
from specdec.models.making import making
from specdec.models.schemes.formats import RoundToNearest
from specdec.models.schemes.rows import QuantisedRows
from specdec.models.schemes.source import WeightFormat
from specdec.ops.rope import by_halves

M = TypeVar("M", bound=nn.Module)
Arrange = Callable[[Tensor], Tensor]
Parts = Mapping[type[nn.Module], Callable[[Any, Checkpoint, str], None]]  # how each kind of module is filled, below a prefix
Names = Mapping[str, tuple[str, ...]]  # what checkpoints call something that we call otherwise; of several names one is there
OUR_NAMES: Names = {}

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}


def build(make: Callable[[], M], device: torch.device, dtype: torch.dtype, late: bool = False) -> M:
    """A module with empty weights of that dtype on the device, ready to be filled; rotary tables are real.

    late: whether matrices take memory as they are filled: of a checkpoint in fewer bits.
    """
    with making(device, dtype, late):
        module = make()
    return module.to(dtype).eval().requires_grad_(False)


def expect_attention(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """ValueError if a config's sizes are not those of the first layer's attention, by the headers."""
    attention, D, H = "model.layers.0.self_attn", config.head_dim, config.hidden_size
    q_shape, k_shape = (config.num_heads * D, H), (config.num_kv_heads * D, H)
    checkpoint.expect_matrix(f"{attention}.q_proj", q_shape, "num_attention_heads, head_dim and hidden_size")
    checkpoint.expect_matrix(f"{attention}.k_proj", k_shape, "num_key_value_heads, head_dim and hidden_size")


def copy_(target: Tensor, checkpoint: Checkpoint, name: str, arrange: Arrange | None = None) -> None:
    """Copies one tensor, in the target's dtype and onto its device, where `checkpoint.finish` refuses values not finite.

    arrange: brings its rows into our order.
    """
    copy_run(Stored(target, tuple(target.shape)), checkpoint, name, arrange)


def copy_run(stored: Stored, checkpoint: Checkpoint, name: str, arrange: Arrange | None = None) -> None:
    """Copies what this rank holds of one tensor.  See `copy_`.

    Tensors of safetensors are maps of the file: of rows that other ranks hold, nothing is read.
    """
    whole = checkpoint.take(name, stored.shape)
    if checkpoint.has_data:
        with torch.no_grad():
            stored.tensor.copy_(stored.run(whole if arrange is None else arrange(whole)))
        checkpoint.landed(name, stored.tensor)


def fill_float32(
    empty: Tensor, checkpoint: Checkpoint, name: str, own: slice = slice(None), whole: int | None = None, flat: bool = False
) -> nn.Buffer:  # fmt: skip
    """A tensor that is kept in float32 in a model of any dtype, on the device of the empty one.

    own: the rows that this rank has, of `whole`.  flat: whether it has one dimension in memory, however many in the file.
    """
    rows = checkpoint.take(name, (empty.shape[0] if whole is None else whole, *empty.shape[1:]))[own]
    kept = nn.Buffer((rows.flatten() if flat else rows).to(empty.device, torch.float32))
    checkpoint.landed(name, kept)
    return kept


def fill_linear(
    linear: Linear,
    checkpoint: Checkpoint,
    names: str | Mapping[str, str],
    arrange: Arrange | Mapping[str, Arrange] | None = None,
    without_bias: Collection[str] = (),
) -> None:
    """Fills a matrix without parts from the tensors of that name, or parts from the tensors of each part's name.

    arrange: brings the rows of each part, or of these parts, into our order, those of the weight and of the bias.
    without_bias: parts whose bias is 0 and not in the checkpoint.
    ValueError if the checkpoint stores parts of one matrix in unlike ways.
    """
    named = {ONLY: names} if isinstance(names, str) else names
    formats = {name: checkpoint.format_of(name) for name in named.values()}
    _expect_alike(checkpoint, "parts of one matrix", formats)
    for part, name in named.items():
        own = arrange.get(part) if isinstance(arrange, Mapping) else arrange
        if (format := formats[name]) is None:
            copy_run(linear.tensors(part)["weight"], checkpoint, f"{name}.weight", own)
        else:
            has_bias = bool(linear.unread) or (linear.bias is not None and part not in without_bias)
            put = partial(_put, linear, part, own)
            _fill_quantised(put, checkpoint, name, format, linear.shape(part), linear.device, has_bias=has_bias)
        for ending, stored in linear.bias_tensors(part).items():
            if part in without_bias:
                stored.tensor.zero_()
            else:
                copy_run(stored, checkpoint, f"{name}.{ending}", own)
        for ending in linear.unread:
            checkpoint.ignore(f"{name}.{ending}")


def _put(linear: Linear, part: str, arrange: Arrange | None, rows: QuantisedRows) -> None:
    linear.fill(part, rows if arrange is None else rows.arranged(arrange))


def _expect_alike(checkpoint: Checkpoint, what: str, formats: Mapping[str, WeightFormat | None]) -> None:
    """ValueError, with one name for each way to store a matrix, if there are several."""
    ways = {format: name for name, format in formats.items()}
    if len(ways) > 1:
        found = ", ".join(f"{name} is {format.describe() if format else 'unquantised'}" for format, name in ways.items())
        raise ValueError(f"{checkpoint.folder}: {what} must be stored alike, but {found}")


def _fill_quantised(
    put: Callable[[QuantisedRows], None],
    checkpoint: Checkpoint,
    name: str,
    format: WeightFormat,
    shape: tuple[int, int],
    device: torch.device,
    *,
    has_bias: bool = False,
) -> None:
    """Hands the rows of a quantised matrix to `put`, if the checkpoint has data.

    has_bias: whether the model has a bias that the checkpoint may have too, which is not looked at here.
    ValueError if the tensors are not in its format, or if `put` can't take them.
    """
    expect_quantised(checkpoint, name, format)
    if not has_bias:
        _expect_no_bias(checkpoint, name, format, shape[0])
    if (rows := format.read(checkpoint, name, shape, device)) is None:
        return
    try:
        put(rows)
    except ValueError as error:
        raise ValueError(f"{checkpoint.folder}: {name}: {error}") from error


def expect_quantised(checkpoint: Checkpoint, name: str, format: WeightFormat) -> None:
    """ValueError if a matrix is not quantised where the config says that it is."""
    own = f"{name}.weight"
    if own not in checkpoint or format.has(checkpoint, name):
        return
    if (found := checkpoint.dtype(own)) in ("F64", "F32", "F16", "BF16"):
        assert checkpoint.quantization is not None
        raise checkpoint.refuse(
            own, f"is not quantised ({found}), but by config.json this matrix is in {format.describe()}; expected it "
            f"quantised, or named in {checkpoint.quantization.kept_by}"
        )  # fmt: skip


def _expect_no_bias(checkpoint: Checkpoint, name: str, format: WeightFormat, rows: int) -> None:
    """ValueError if a matrix that has no bias has one in the checkpoint which is not 0, or which its format never writes."""
    own = f"{name}.bias"
    if own not in checkpoint or "bias" not in format.may_end:
        return
    bias = checkpoint.take(own, (rows,))
    if checkpoint.has_data and bool(bias.any()):
        raise checkpoint.refuse(
            own, "must hold zeros alone, or be left out: by config.json (attention_bias, mlp_bias) this matrix has no bias, "
            f"got numbers up to {bias.abs().max():g}"
        )  # fmt: skip


def fill_dense(linear: Linear, checkpoint: Checkpoint, name: str, arrange: Arrange | None = None) -> None:
    """Fills a dense matrix without parts and bias, however the checkpoint stores it.  See `copy_`."""
    stored, format = linear.tensors()["weight"], checkpoint.format_of(name)
    if format is None or isinstance(format, RoundToNearest):
        copy_run(stored, checkpoint, f"{name}.weight", arrange)
        return

    def put(rows: QuantisedRows) -> None:
        dense = rows.dense(stored.tensor.dtype)
        with torch.no_grad():
            stored.tensor.copy_(stored.run(dense if arrange is None else arrange(dense)))

    _fill_quantised(put, checkpoint, name, format, linear.shape(), stored.tensor.device)


def fill_stack(stack: LinearStack, checkpoint: Checkpoint, prefix: str, called: Mapping[str, str] = {}) -> None:
    """Fills matrices whose names are a number below the prefix, and then the name of a part.

    called: the checkpoint's names of parts, where they are others.
    """
    parts = {part: called.get(part, part) for part in stack.parts.sizes}
    numbered = enumerate(stack.numbers)
    names = {(index, part): f"{prefix}.{number}.{name}" for index, number in numbered for part, name in parts.items()}
    formats = {name: checkpoint.format_of(name) for name in names.values()}
    _expect_alike(checkpoint, "all experts of a layer", formats)
    if any(format is not None and format.in_act_order for format in formats.values()):
        raise ValueError(
            f"{checkpoint.folder}: {prefix}: experts in act order (desc_act, actorder) can't be computed; nearest thing that "
            "works: a checkpoint without act order"
        )
    for (index, part), name in names.items():
        if (format := formats[name]) is None:
            for ending, stored in stack.tensors(index, part).items():
                copy_run(stored, checkpoint, f"{name}.{ending}")
        else:
            _fill_quantised(partial(stack.fill, index, part), checkpoint, name, format, stack.shape(part), stack.device)


def fill_parts(linear: Linear, checkpoint: Checkpoint, prefix: str, arrange: Arrange | None = None) -> None:
    """Fills a matrix whose parts have the checkpoint's own names, below the prefix."""
    fill_linear(linear, checkpoint, {part: f"{prefix}.{part}" for part in linear.parts.sizes}, arrange)


def named(checkpoint: Checkpoint, prefix: str, name: str, names: Names) -> str:
    """What the checkpoint calls something below the prefix, whose weight's name shows it."""
    known = [f"{prefix}.{each}" for each in names.get(name, (name,))]
    return next((each for each in known if f"{each}.weight" in checkpoint), known[0])


def fill_norm(norm: RMSNorm, checkpoint: Checkpoint, prefix: str) -> None:
    if not norm.zero_centred:
        copy_(norm.weight, checkpoint, f"{prefix}.weight")
        return
    norm.weight = widened(norm.weight)
    copy_(norm.weight, checkpoint, f"{prefix}.weight")
    norm.weight.add_(1)


def widened(weight: Tensor) -> nn.Buffer:
    """An empty weight of a zero-centred norm as it is kept: in float32, or in a wider model's dtype."""
    return nn.Buffer(weight.to(torch.promote_types(weight.dtype, torch.float32)))


def pairs_of(attention: SelfAttention) -> Arrange | None:
    """What brings rows of queries and keys into our order of rotated pairs; None: they lie so."""
    rope, D = attention.rope, attention.head_dim
    if not (rope.rotated or rope.interleaved):
        return None
    return partial(by_halves, head_dim=D, rotated=rope.rotated or D, interleaved=rope.interleaved)


def fill_attention(
    attention: SelfAttention, checkpoint: Checkpoint, prefix: str, own_order: Mapping[str, Arrange] = {},
    called: Mapping[str, str] = {},
) -> None:  # fmt: skip
    """Stacks the rows of q, k and v in one weight, repeats q/k norms for each head, and takes fp8 KV scales, if any.

    Attention that reads another layer's keys and values has queries only.  Where a part of each head is rotated, or pairs lie
    side by side, rows of queries and keys are brought into our order.  own_order: of parts whose rows a family orders itself.
    called: the checkpoint's names of o_proj, q_norm and k_norm, where they are others.
    """
    D, turned = attention.head_dim, pairs_of(attention)
    if not attention.shares_kv:
        start, whole = attention.qkv_proj.rows_of("k_proj")
        own = slice(start // D, start // D + attention.num_kv_heads)
        attention.kv_scale_2K = take_kv_scale(checkpoint, prefix, whole // D, own)
    names = {part: f"{prefix}.{part}" for part in attention.qkv_proj.parts.sizes}
    arrange = {} if turned is None else {part: turned for part in names if part != "v_proj"}
    fill_linear(attention.qkv_proj, checkpoint, names, arrange | dict(own_order))
    fill_linear(attention.o_proj, checkpoint, f"{prefix}.{called.get('o_proj', 'o_proj')}")
    if attention.qk_norm is not None:
        _fill_head_norms(attention, attention.qk_norm, checkpoint, prefix, called)


def _fill_head_norms(
    attention: SelfAttention, norm: HeadsRMSNorm, checkpoint: Checkpoint, prefix: str, called: Mapping[str, str]
) -> None:
    """A row for each head: files have one for all queries, and one for all keys."""
    norm.weight = widened(norm.weight) if norm.zero_centred else norm.weight
    Q, turned = attention.num_heads, pairs_of(attention)
    for own, heads in (("q_norm", norm.weight[:Q]), ("k_norm", norm.weight[Q:])):
        if not len(heads):
            continue
        name = f"{prefix}.{called.get(own, own)}.weight"
        norm_D = checkpoint.take(name, (attention.head_dim,))
        with torch.no_grad():
            heads.copy_((norm_D if turned is None else turned(norm_D)).expand_as(heads))
        checkpoint.landed(name, heads)
    if norm.zero_centred:
        norm.weight.add_(1)


def fill_mlp(mlp: MLP, checkpoint: Checkpoint, prefix: str, called: Mapping[str, str] = {}) -> None:
    """called: the checkpoint's names of gate_proj, up_proj and down_proj, where they are others."""
    fill_linear(mlp.gate_up_proj, checkpoint, {own: f"{prefix}.{called.get(own, own)}" for own in mlp.gate_up_proj.parts.sizes})
    fill_linear(mlp.down_proj, checkpoint, f"{prefix}.{called.get('down_proj', 'down_proj')}")


LLAMA_PARTS: Parts = {SelfAttention: fill_attention, MLP: fill_mlp}  # the kinds of the Llama family, and of EAGLE heads


def fill_layer(
    layer: nn.Module, checkpoint: Checkpoint, prefix: str, parts: Parts = LLAMA_PARTS, norms: Names = OUR_NAMES
) -> None:  # fmt: skip
    """A decoder layer: its norms, and what `parts` fills, by the names of the layer's modules.

    norms: what checkpoints call norms, where these names are others.
    """
    assert isinstance(layer, TargetLayer)
    for name, part in layer.named_children():
        if isinstance(part, NoNorm):
            continue
        if isinstance(part, RMSNorm):
            fill_norm(part, checkpoint, named(checkpoint, prefix, name, norms))
        else:
            fill = next(fill for kind, fill in parts.items() if isinstance(part, kind))
            fill(part, checkpoint, f"{prefix}.{name}")
