"""Any decoder-only causal LM of transformers as a target: its own code computes all but attention, which is ours.

Prompts and trees come packed as one sequence of tokens; positions and our attention keep them apart, and a check at loading
makes sure that nothing else in the model mixes tokens.

Shapes: T tokens, H hidden or query heads, K kv heads, X = H + 2K, D head dim, V vocabulary, A captured states side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from specdec.attention.encoder.inputs import CrossInputs
from specdec.attention.inputs import AttentionFn, DenseHeads, HeadInputs, LayerInputs, QueryInputs, SplitInputs
from specdec.attention.kinds import PLAIN, Scoring
from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.config_values import one_line
from specdec.models.checkpoints.mtp_names import mtp_prefixes
from specdec.models.config import ModelConfig
from specdec.models.gpt_oss.config import GPT_OSS
from specdec.models.layers import Embedding
from specdec.models.linear import Linear
from specdec.models.making import making
from specdec.models.target import Target, TargetOutput
from specdec.models.transformers_backend.attention import AttentionCall, answering
from specdec.models.transformers_backend.config import load_hf_config
from specdec.models.transformers_backend.last_rows import Cut, LastRows
from specdec.models.transformers_backend.make import empty_model, filled_model, make_parts, usual_defaults
from specdec.ops.cuda_graph import GraphSet, on_device
from specdec.ops.rope import HeadPrep
from specdec.ops.rows import select_rows
from specdec.parallel.group import ALONE
from specdec.parallel.vocabulary import Vocabulary

CHECK_TOKENS = 8
MOST_MADE_UP = 4  # times the checkpoint's weights: what transformers may take memory for before missing ones are refused
MOST_MIXED = 1e-2  # of a hidden state, relative: rounding of one row among others stays far below


class TransformersTarget(Target):
    """Target of a transformers model that was built with our attention function.  config: as read from its folder."""

    def __init__(self, model: Any, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
        self.parts = make_parts(model)
        self.decoder, self.head = self.parts.decoder, self.parts.head  # so that they move and count as ours
        with making(torch.device("meta"), table.dtype):
            self.embed_tokens = Embedding(table.shape[0], table.shape[1])
        self.embed_tokens.weight, self.lm_head = table, Linear.of(head.weight, head.bias)
        self.vocabulary = Vocabulary.of(head.out_features, ALONE)
        self.captured: ContextVar[dict[int, Tensor]] = ContextVar("captured")
        self.parts.on_layers(self._see)
        self._prep, self._query_prep = HeadPrep(None, config.num_kv_heads), HeadPrep(None, 0)
        self._last_rows = LastRows(self.parts.layers, config.first_sharing_layer)
        self.cuts_rows = True  # whether layers that share keys may run some rows only; the check at loading may say no
        self._sinks: dict[int, Tensor] = {}
        self._counts_from_cache = any(getattr(module, "attn_temperature_tuning", False) for module in self.decoder.modules())

    def forward(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        attn: AttentionFn,
        aux_layers: Sequence[int] = (),
        rows_R: Tensor | None = None,
    ) -> TargetOutput:
        """See `Target`."""
        # Nodes after the last position can't be accepted, but a table of learnt positions must not be read there.
        positions_T = positions_T.clamp(max=self.config.max_position - 1)
        more = {"past_key_values": _CountedTokens(positions_T)} if self._counts_from_cache else {}
        wanted = dict.fromkeys(aux_layers)
        cut = None if rows_R is None else self._cut(len(ids_T), aux_layers, rows_R)
        token = self.captured.set(wanted)  # type: ignore[arg-type]  # filled by the layers
        keys: dict[int, Tensor] = {}
        try:
            with answering(lambda call: self._attend(call, attn, keys, cut)), self._last_rows.cutting(cut):
                hidden_TH = self.parts.hidden(ids_T, positions_T, **more)
        finally:
            self.captured.reset(token)
        aux = [state[0] for state in wanted.values() if state is not None]
        if rows_R is not None and cut is None:
            hidden_TH = select_rows(hidden_TH, rows_R)
        return TargetOutput(hidden_TH, torch.cat(aux, dim=-1) if aux else None)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V], as the model's own forward makes them."""
        return self.parts.logits(hidden.flatten(0, -2)).unflatten(0, hidden.shape[:-1])

    def _see(self, layer: int, state_1TH: Tensor) -> None:
        wanted = self.captured.get()
        if layer in wanted:
            wanted[layer] = state_1TH

    def _cut(self, tokens: int, aux_layers: Sequence[int], rows_R: Tensor) -> Cut | None:
        """From which layer on a pass has these rows only; None if it has all to its end."""
        first = self.config.first_of_rows(aux_layers)
        return (
            Cut(first, tokens, rows_R) if self.cuts_rows and first < self.config.num_layers and len(rows_R) < tokens else None
        )

    def _attend(self, call: AttentionCall, attn: AttentionFn, keys: dict[int, Tensor], cut: Cut | None) -> Tensor:
        """[1, T, H, D] of one layer's call.  keys: those of earlier layers of this pass, by layer."""
        layer: int = call.module.layer_idx  # type: ignore[assignment]
        kind = self.config.layer_kinds[layer]
        assert call.sliding_window == kind.window and call.extra["attention_mask"] is None, (layer, kind, call.extra)
        scoring = Scoring(call.scaling, call.softcap, self._sinks_of(layer, call.sinks_H))
        source = self.config.kv_source[layer]
        if source != layer:
            assert call.key is keys[source], f"layer {layer} was to read the keys of layer {source}"
            queries = QueryInputs(call.query[0].transpose(0, 1).contiguous(), self._query_prep)
            return attn(layer, queries, cut.rows_R if cut and layer >= cut.first else None, scoring)[None]
        keys[layer] = call.key
        heads = [x[0].transpose(0, 1) for x in (call.query, call.key, call.value)]
        inputs: LayerInputs = SplitInputs(DenseHeads(*heads))
        if not self.config.value_width:
            inputs = HeadInputs(torch.cat(heads, dim=1), self._prep)
        return attn(layer, inputs, None, scoring)[None]

    def _sinks_of(self, layer: int, sinks_H: Tensor | None) -> Tensor | None:
        """In float32; converted in the first pass, the check at loading."""
        if sinks_H is None or sinks_H.dtype == torch.float32:
            return sinks_H
        if layer not in self._sinks:
            self._sinks[layer] = sinks_H.float()
        return self._sinks[layer]


class _CountedTokens:
    """Says how many tokens came before, as transformers' caches do, and holds none.

    Llama 4 takes a token's position in the text to be that count plus its place in the pass: so the count differs by token.
    """

    def __init__(self, positions_T: Tensor) -> None:
        self.before_T = positions_T - torch.arange(positions_T.shape[0], dtype=torch.int64, device=positions_T.device)

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        return self.before_T

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        return key, value


def load_transformers_target(
    checkpoint: Checkpoint, config: ModelConfig, device: torch.device, dtype: torch.dtype, cuda_graphs: bool
) -> TransformersTarget:
    """The model of a folder.  ValueError names tensors missing, left over or of another shape, and what can't run here.

    checkpoint: its tensors, after `check_headers`.
    """
    folder = checkpoint.folder
    hf_config = load_hf_config(folder)
    try:
        model, report = filled_model(folder, hf_config, dtype)
    except Exception as error:  # of any kind: the code that loads is the model's own
        raise ValueError(f"{folder}: transformers can't load its weights: {one_line(error)}") from error
    _refuse_tensors(report, str(folder), mtp_prefixes(config))
    model = model.to(device).eval().requires_grad_(False)
    for name, weight in model.named_parameters():  # their names may be transformers' own, as for experts that it fuses
        checkpoint.landed(name, weight)
    checkpoint.refuse_not_finite()
    target = target_class(config)(model, config)
    with usual_defaults():
        check_tokens_are_apart(target, str(folder))
        target.cuts_rows = rows_are_enough(target)
        if cuda_graphs:
            check_capturable(target, str(folder))
    return target


def target_class(config: ModelConfig) -> type[TransformersTarget]:
    """The class of a target of that config."""
    if config.encoder is None:
        return TransformersTarget
    from specdec.models.transformers_backend.encoder_decoder import EncoderDecoderTarget

    return EncoderDecoderTarget


def check_headers(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """ValueError for what headers alone show to be wrong.

    Which tensors are missing or left over, transformers says as it loads them: it renames some, and fuses others.
    """
    coded = [name for name in checkpoint.names() if name.endswith("_proj_blocks")]
    if config.family in GPT_OSS and coded:
        raise ValueError(
            f"{checkpoint.folder}: {len(coded)} tensors hold experts in mxfp4 ({coded[0]}, ...), but config.json does not say "
            'so; nearest setting that works: "quantization_config": {"quant_method": "mxfp4"} in config.json, which gpt-oss\'s '
            "own checkpoints have"
        )
    expect_sizes(checkpoint, load_hf_config(checkpoint.folder))


def expect_sizes(checkpoint: Checkpoint, hf_config: Any) -> None:
    """ValueError if tensors or layers are of other numbers than the config's: transformers would take memory for its sizes.

    Tensors that transformers renames are not compared one by one, but all together.
    """
    shapes = {name: tuple(p.shape) for name, p in empty_model(hf_config, torch.bfloat16).named_parameters()}
    for name in checkpoint.names():
        if name in shapes:
            checkpoint.expect(name, shapes[name], "its sizes")
        if name in shapes or name.endswith(".weight"):  # others may be old masks, which are booleans
            checkpoint.expect_kind(name, "floating-point numbers")
    wanted, held = (sum(map(math.prod, sizes)) for sizes in (shapes.values(), map(checkpoint.shape, checkpoint.names())))
    if wanted > MOST_MADE_UP * held:
        raise ValueError(
            f"{checkpoint.folder / 'config.json'} describes a model of {wanted:,} weights, but the checkpoint holds {held:,}: "
            "expected sizes of one model"
        )


def _refuse_tensors(report: dict[str, Any], where: str, elsewhere: tuple[str, ...]) -> None:
    """What transformers would make up or leave out, with a warning.  elsewhere: how names of a drafter's tensors begin."""
    if wrong := sorted((name, tuple(got), tuple(wanted)) for name, got, wanted in report["mismatched_keys"]):
        name, got, wanted = wrong[0]
        raise ValueError(f"{where}: tensor {name!r} must have shape {wanted}, got {got} ({len(wrong)} tensors are wrong)")
    for key, what in (("missing_keys", "missing"), ("unexpected_keys", "not part of this architecture")):
        if names := sorted(name for name in report[key] if key == "missing_keys" or not name.startswith(elsewhere)):
            raise ValueError(f"{where}: {len(names)} tensors are {what}: {', '.join(names[:8])}")


@torch.inference_mode()
def check_tokens_are_apart(target: TransformersTarget, where: str) -> None:
    """ValueError if a token's state depends on other tokens but through attention: as a convolution's or a recurrence's does.

    Runs some tokens in two orders with an attention in which each token reads itself alone.
    """
    run, order = lone_pass(target)
    states = run(order)
    back = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), dtype=torch.int64, device=order.device))
    apart = run(torch.arange(len(order), dtype=torch.int64, device=order.device)).float()
    error = (states.index_select(0, back).float() - apart).norm() / apart.norm()
    if not error < MOST_MIXED:
        raise ValueError(
            f"{where}: this {target.config.family} model mixes tokens outside of attention (relative change {float(error):.2g} "
            "in another order), as convolutions and state-space layers do; expected a model that does so by attention alone"
        )


@torch.inference_mode()
def rows_are_enough(target: TransformersTarget) -> bool:
    """Whether layers that share keys give some tokens the states of a whole pass if they run these tokens alone."""
    if target.config.first_sharing_layer == target.config.num_layers:
        return False
    run, order = lone_pass(target)
    rows_R = order[1::2]
    whole = run(order).index_select(0, rows_R).float()
    try:
        some = run(order, rows_R).float()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError, AssertionError):  # a layer that takes its tokens in another way
        return False
    return some.shape == whole.shape and bool((some - whole).norm() / whole.norm() < MOST_MIXED)


@torch.inference_mode()
def check_capturable(target: TransformersTarget, where: str) -> None:
    """ValueError if the forward pass can't be recorded in a CUDA graph."""
    run, order = lone_pass(target)
    try:
        with on_device(order.device):
            GraphSet(True).run("check", lambda: run(order), [])
    except Exception as error:  # of any kind: the code is the model's own
        first = str(error.__context__ or error).partition("\n")[0]  # before the end of the capture failed too
        raise ValueError(
            f"{where}: this {target.config.family} model can't be captured in a CUDA graph ({first}); nearest setting that "
            "works: cuda_graphs=False"
        ) from error


def lone_pass(target: TransformersTarget) -> tuple[Callable[..., Tensor], Tensor]:
    """(hidden states [T, H] of a few tokens in an order, or of rows of them; an order), each token reading itself alone."""
    device, config, T = target.embed_tokens.weight.device, target.config, CHECK_TOKENS
    ids_T = torch.arange(1, T + 1, dtype=torch.int64, device=device) * 7919 % config.vocab_size
    positions_T = torch.arange(T, dtype=torch.int64, device=device) * 613 % config.max_position

    values: dict[int, Tensor] = {}

    def own_value(layer: int, inputs: LayerInputs, rows_R: Tensor | None = None, scoring: Scoring = PLAIN) -> Tensor:
        if isinstance(inputs, CrossInputs):
            return inputs.q_TQD
        source = config.kv_source[layer]
        if layer == source:
            values[layer] = inputs.dense().v_TKE
        own_TKE = values[source] if rows_R is None else values[source].index_select(0, rows_R)
        return own_TKE.repeat_interleave(config.num_heads // config.num_kv_heads, dim=1)

    def run(order_T: Tensor, rows_R: Tensor | None = None) -> Tensor:
        tokens = ids_T.index_select(0, order_T), positions_T.index_select(0, order_T)
        return target(*tokens, own_value, rows_R=rows_R).hidden_TH

    return run, torch.arange(T - 1, -1, -1, dtype=torch.int64, device=device)
