"""A target's decode pass as a module, for torch.export and torch.compile.

What changes between calls are inputs, the cache's tensors among them.  The module's graph consists of operators and of torch's
own operations.  This file knows no engine: neither requests, nor who owns which page.

Shapes: B sequences, N new tokens of each, W pages of each, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from specdec.attention.backend import Backend
from specdec.attention.caches.quant_cache import QuantLayout
from specdec.attention.inputs import LayerCall, LayerInputs, PreparedPlan
from specdec.attention.kinds import PLAIN, Scoring
from specdec.attention.latent.limits import LIMITS
from specdec.attention.operators.backend import OperatorBackend
from specdec.attention.operators.heads import backend_for
from specdec.attention.pages import PageTable
from specdec.attention.segment import AttentionPlan, Segment
from specdec.checks import require_choice, require_int
from specdec.models.causal_lm import CausalLM
from specdec.models.checkpoints.checkpoint import resolve_target
from specdec.models.checkpoints.config_values import one_line
from specdec.models.checkpoints.kv_scales import kv_scales
from specdec.models.checkpoints.loader import DTYPES
from specdec.models.config import ModelConfig
from specdec.models.kv import cache_layout
from specdec.models.registry import choose_target, load_chosen
from specdec.models.target import Target
from specdec.operators.given_cache import (
    LAYOUTS,
    SCALE,
    GivenCache,
    LayerTensors,
    check_cache_dtype,
    layouts_in,
    new_layers,
)


class DecodePass(nn.Module):
    """The next N tokens of B sequences through a target: one token of each to decode, more for a prompt or its chunks.

    target: a model on its device.  One that runs through transformers' code can be exported, and compiled afterwards;
        torch.compile alone refuses it (`_by_transformers`).
    page_size: tokens of a page.
    kv_cache_dtype: "auto" (the target's own dtype); "fp8" or "int8" for keys and values; "fp8_ds_mla" for latents.
    """

    def __init__(self, target: Target, page_size: int = 1, kv_cache_dtype: str = "auto") -> None:
        super().__init__()
        if not isinstance(target, Target):
            raise TypeError(f"target must be a Target, as load_chosen returns it, got {type(target).__name__}")
        if target.config.encoder is not None:
            raise ValueError(
                f"target must be a decoder alone, got family {target.config.family!r} with an encoder; nearest setting that "
                "works: run it by SpecDecoder"
            )
        if target.config.recurrent is not None:
            raise ValueError(
                f"target must keep nothing but keys and values, got family {target.config.family!r} with recurrent layers; "
                "nearest setting that works: run it by SpecDecoder"
            )
        self.target, self.page_size = target, require_int("page_size", page_size, 1)
        self.kv_cache_dtype, weight = kv_cache_dtype, target.embed_tokens.weight
        check_cache_dtype(target.config, kv_cache_dtype, weight.device)
        scales = kv_scales(target, target.config.layer_kinds)
        self.layout = cache_layout(target.config, kv_cache_dtype, weight.dtype, weight.device, scales)
        self.backend = OperatorBackend()
        if unread := [type(each).__name__ for each in layouts_in(self.layout) if type(each) not in LAYOUTS]:
            got = f"family {target.config.family!r} with {unread[0]}"
            raise ValueError(
                "target must keep keys and values or latents in a cache that operators read (HeadsLayout or LatentLayout), got "
                f"{got}; nearest setting that works: run it by SpecDecoder"
            )

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path,
        page_size: int = 1,
        kv_cache_dtype: str = "auto",
        *,
        max_positions: int = 2048,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        backend: str = "auto",
    ) -> DecodePass:
        """The pass of a target that is loaded from a folder or a hub id.

        max_positions: the longest sequence that it reads.
        backend: "native" (specdec's own modules), "transformers", or "auto": own modules where there are some.
        """
        folder = resolve_target(target, "target")
        require_int("max_positions", max_positions, 1)
        require_choice("dtype", dtype, tuple(DTYPES), "float32")
        chosen = choose_target(folder, backend)
        return cls(load_chosen(chosen, folder, max_positions, torch.device(device), dtype, False), page_size, kv_cache_dtype)

    def new_cache(self, num_slots: int) -> list[LayerTensors]:
        """Memory for what so many tokens keep: one dict for each layer that stores something of its own.

        What the memory holds is arbitrary until a pass stores something there.  With kv_cache_dtype="fp8" each dict holds the
        layer's scales as well: those of the checkpoint, or NaN until `set_scales` has set them.
        """
        require_int("num_slots", num_slots, self.page_size)
        return new_layers(self.layout, self.target.config.kv_source, num_slots, self.target.embed_tokens.weight.device)

    @torch.no_grad()
    def set_scales(self, tokens_BN: Tensor, page_table_BW: Tensor, lens_B: Tensor, cache: Sequence[LayerTensors]) -> Tensor:
        """The same as a call, by kernels instead of operators; and it sets the scales of keys and values in fp8 that the
        checkpoint lacks, from the keys and values of these tokens.

        Call this once, with the first tokens, before anything else is stored: what was stored under other scales is misread.
        """
        if not (isinstance(layouts_in(self.layout)[0], QuantLayout) and self.kv_cache_dtype == "fp8"):
            raise ValueError(
                f"set_scales needs kv_cache_dtype='fp8', got {self.kv_cache_dtype!r}: no other cache has such scales"
            )
        given = self.given_cache(cache, sets_scales=True)
        return self._pass(tokens_BN, page_table_BW, lens_B, given, None, backend_for(self.target.embed_tokens.weight))

    def forward(
        self,
        tokens_BN: Tensor,
        page_table_BW: Tensor,
        lens_B: Tensor,
        cache: Sequence[LayerTensors],
        mask_BNN: Tensor | None = None,
    ) -> Tensor:
        """The logits [B, N, V] after each of the tokens, whose keys and values are stored in `cache`.

        tokens_BN: int64.
        page_table_BW: int32; the token at position p of sequence b lies in page page_table_BW[b, p // page_size].
        lens_B: int32, how many tokens of each sequence are stored already; the new ones come right after them.
        cache: as `new_cache` makes it.
        mask_BNN: bool, for N tokens that are the nodes of a tree: whether node i sees node j, which is one of its ancestors or
            itself.  Node i is stored where the token i places after the stored ones belongs; its position is its depth after
            them.  None: the tokens follow one another.
        """
        return self._pass(tokens_BN, page_table_BW, lens_B, self.given_cache(cache), mask_BNN, self.backend)

    def _pass(
        self,
        tokens_BN: Tensor,
        page_table_BW: Tensor,
        lens_B: Tensor,
        given: GivenCache,
        mask_BNN: Tensor | None,
        backend: Backend,
    ) -> Tensor:
        if mask_BNN is None:
            refuse_long(self.target.config, tokens_BN.shape[1])
        shape, pages = tokens_BN.shape, PageTable(page_table_BW, self.page_size)
        slots_BN = pages.next_tokens(lens_B, shape[1]).slots
        plan = chain_plan(pages, lens_B, shape[1]) if mask_BNN is None else tree_plan(pages, lens_B, slots_BN, mask_BNN)
        prepared, slots_T = PreparedPlan(plan), slots_BN.flatten()
        handed_on: dict[str, Any] = {}

        # This is PagedAttention, whose default for `scoring` torch.compile can't trace (torch 2.11) in an object that is made
        # during the trace.
        def attn(layer: int, inputs: LayerInputs, rows_R: Tensor | None = None, scoring: Scoring | None = None) -> Tensor:
            scoring = PLAIN if scoring is None else scoring
            view, kind = given.view(layer), given.kinds[layer]
            return inputs.paged(LayerCall(backend, view, kind, slots_T, prepared, rows_R, scoring, handed_on))

        assert plan.positions_T is not None
        run = _natively if isinstance(self.target, CausalLM) else _by_transformers
        return run(self.target, tokens_BN.flatten(), plan.positions_T, attn).unflatten(0, shape)

    def given_cache(self, cache: Sequence[LayerTensors], sets_scales: bool = False) -> GivenCache:
        """These tensors as a cache of the target's layers.  sets_scales: see GivenCache."""
        config = self.target.config
        return GivenCache(self.layout, config.layer_kinds, config.kv_source, cache, sets_scales)


def _natively(target: Target, ids_T: Tensor, positions_T: Tensor, attn: Any) -> Tensor:
    """The logits [T, V] after each of the tokens."""
    return target.logits(target(ids_T, positions_T, attn).hidden_TH)


@torch.compiler.disable(
    reason="torch.compile can't trace a target that runs through transformers' code, which finds specdec's attention by a "
    "ContextVar; nearest that works: torch.compile(export_decode(decode).run_decompositions().module())"
)
def _by_transformers(target: Target, ids_T: Tensor, positions_T: Tensor, attn: Any) -> Tensor:
    """The same, where transformers' code computes them.  torch.export runs that code, however the code finds attention."""
    return _natively(target, ids_T, positions_T, attn)


def chain_plan(pages: PageTable, lens_B: Tensor, N: int) -> AttentionPlan:
    """Each of a sequence's next N tokens reads everything up to itself."""
    positions_BN = lens_B.long()[:, None] + torch.arange(N, dtype=torch.int64, device=lens_B.device)
    return AttentionPlan((Segment(pages, lens_B + N, _rows(lens_B, N), N, causal=True),), positions_BN.flatten())


def tree_plan(pages: PageTable, lens_B: Tensor, slots_BN: Tensor, mask_BNN: Tensor) -> AttentionPlan:
    """Each of N nodes reads what is stored of its sequence, and its own path.  slots_BN: int64, where the nodes lie.

    The suffix is that of `fill_tree_suffix`, computed without a buffer, so that N may vary.
    """
    N, nodes_T = slots_BN.shape[1], torch.arange(slots_BN.numel(), dtype=torch.int64, device=slots_BN.device)
    rows_T = nodes_T // N
    mask_TN, slots_TN = mask_BNN[rows_T, nodes_T % N], slots_BN[rows_T]  # torch.export can't flatten [B, N, N] if N may vary
    order_TN = mask_TN.logical_not().argsort(dim=-1, stable=True)  # a node's path stands at the left of its row, without gaps
    seen_T = mask_TN.sum(-1).int()
    suffix = Segment(PageTable(slots_TN.gather(1, order_TN).int()), seen_T, _rows(seen_T, 1), 1, base_B=lens_B)
    return AttentionPlan((Segment(pages, lens_B, _rows(lens_B, N), N),), lens_B[rows_T].long() + seen_T - 1, suffix)


def _rows(like_R: Tensor, queries: int) -> Tensor:
    """[R + 1] int32: cumulative query counts of R rows with so many queries each, computed in the graph for any R."""
    return torch.arange(like_R.shape[0] + 1, dtype=torch.int32, device=like_R.device) * queries


def refuse_long(config: ModelConfig, num_tokens: int) -> None:
    """ValueError for more tokens of a sequence than a target of latent attention reads without expanding its heads."""
    if config.keeps_latents and num_tokens > LIMITS.expand_above:
        raise ValueError(
            f"num_tokens must be at most {LIMITS.expand_above} with latent attention, got {num_tokens}; nearest: passes of "
            f"{LIMITS.expand_above} tokens, one after the other"
        )


@torch.no_grad()
def export_decode(
    decode: DecodePass,
    *,
    batch: int | None = None,
    num_tokens: int | None = None,
    table_width: int | None = None,
    num_slots: int | None = None,
    trees: bool = False,
) -> ExportedProgram:
    """The exported program of a DecodePass, whose inputs are those of its forward().

    trees: whether the tokens are the nodes of trees, so that the program takes their mask as well.
    batch, num_tokens, table_width, num_slots: B, N, W and the cache's slots where they are fixed; None: the program takes any.
    """
    given = {"batch": batch, "num_tokens": num_tokens, "table_width": table_width, "num_slots": num_slots}
    for name, size in given.items():
        if size is not None:
            require_int(name, size, 1)
    if not trees:
        refuse_long(decode.target.config, num_tokens or 1)
    B, N, W = batch or 2, num_tokens or 3, table_width or 5
    device = decode.target.embed_tokens.weight.device
    tokens_BN = torch.zeros(B, N, dtype=torch.int64, device=device)
    table_BW, lens_B = (torch.zeros(shape, dtype=torch.int32, device=device) for shape in ((B, W), (B,)))
    cache = decode.new_cache(num_slots or 7 * decode.page_size)
    # A pass over latents has another graph for longer prompts, which reads on the host how much is stored already.
    most = {"num_tokens": LIMITS.expand_above} if decode.target.config.keeps_latents and not trees else {}
    dims = {name: Dim.STATIC if size else Dim(name, min=1, max=most.get(name)) for name, size in given.items()}
    args: tuple[Any, ...] = (tokens_BN, table_BW, lens_B, cache)
    by_dim: tuple[Any, ...] = (
        {0: dims["batch"], 1: dims["num_tokens"]},
        {0: dims["batch"], 1: dims["table_width"]},
        {0: dims["batch"]},
        [{name: {} if name == SCALE else {0: dims["num_slots"]} for name in layer} for layer in cache],
    )
    if trees:
        args += (torch.ones(B, N, N, dtype=torch.bool, device=device).tril(),)
        by_dim += ({0: dims["batch"], 1: dims["num_tokens"], 2: dims["num_tokens"]},)
    if isinstance(decode.target, CausalLM):
        return torch.export.export(decode, args, dynamic_shapes=by_dim)
    try:
        return torch.export.export(decode, args, dynamic_shapes=by_dim)
    except Exception as error:  # of any kind: the code is the model's own
        any_size = "" if all(given.values()) else "give every size a number (batch, num_tokens, table_width, num_slots), or "
        raise ValueError(
            f"family {decode.target.config.family!r} can't be exported through transformers' code for these sizes "
            f"({one_line(error)}); nearest that works: {any_size}run it by SpecDecoder"
        ) from error
