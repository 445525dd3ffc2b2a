"""A target's decode pass as a module, for torch.export and torch.compile.

What changes between calls are inputs, the cache's tensors among them.  The module's graph consists of operators and of torch's
own operations.  This file knows no engine: neither requests, nor who owns which page.

Shapes: B sequences, N new tokens of each, W pages of each, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from specdec.attention.caches.heads_cache import HeadsLayout
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.caches.layout import CacheLayout, KVView
from specdec.attention.caches.mla_cache import LatentLayout
from specdec.attention.caches.quant_cache import QuantLayout
from specdec.attention.inputs import LayerCall, LayerInputs, PreparedPlan
from specdec.attention.kinds import PLAIN, LayerKind, Scoring
from specdec.attention.latent.limits import LIMITS
from specdec.attention.operators.backend import OperatorBackend
from specdec.attention.pages import PageTable
from specdec.attention.segment import AttentionPlan, Segment
from specdec.checks import require_choice, require_int
from specdec.models.causal_lm import CausalLM
from specdec.models.checkpoints.checkpoint import resolve_target
from specdec.models.checkpoints.loader import DTYPES
from specdec.models.config import ModelConfig
from specdec.models.kv import make_cache
from specdec.models.registry import choose_target, load_chosen
from specdec.models.target import Target

LayerTensors = dict[str, Tensor]  # one layer's part of a cache: by buffer, a tensor [num_slots, ...]


class DecodePass(nn.Module):
    """The next N tokens of B sequences through a target: one token of each to decode, more for a prompt or its chunks.

    target: a model of one of specdec's own families, on its device.
    page_size: tokens of a page.
    kv_cache_dtype: "auto" (the target's own dtype) or "int8".
    """

    def __init__(self, target: Target, page_size: int = 1, kv_cache_dtype: str = "auto") -> None:
        super().__init__()
        if not isinstance(target, CausalLM):
            expected = "target must be a model of specdec's own families, as backend='native' loads it"
            raise TypeError(f"{expected}, got {type(target).__name__}")
        self.target, self.page_size = target, require_int("page_size", page_size, 1)
        self.kv_cache_dtype = require_choice("kv_cache_dtype", kv_cache_dtype, ("auto", "int8"), "auto")
        if kv_cache_dtype != "auto" and (target.config.keeps_latents or target.config.value_width):
            expected = f"kv_cache_dtype must be 'auto' for a target of family {target.config.family!r}, got {kv_cache_dtype!r}"
            raise ValueError(f"{expected}; nearest setting that works: kv_cache_dtype='auto'")
        self.layout, self.backend = self._cache(0).layout, OperatorBackend()
        if type(self.layout) not in (HeadsLayout, QuantLayout, LatentLayout):
            got = f"family {target.config.family!r} with {type(self.layout).__name__}"
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
    ) -> DecodePass:
        """The pass of a target that is loaded from a folder or a hub id.  max_positions: the longest sequence that it reads."""
        folder = resolve_target(target, "target")
        require_int("max_positions", max_positions, 1)
        require_choice("dtype", dtype, tuple(DTYPES), "float32")
        chosen = choose_target(folder, "native")
        return cls(load_chosen(chosen, folder, max_positions, torch.device(device), dtype, False), page_size, kv_cache_dtype)

    def new_cache(self, num_slots: int) -> list[LayerTensors]:
        """Memory for the keys and values of so many tokens: one dict for each layer that stores its own.

        What the memory holds is arbitrary until a pass stores something there.
        """
        cache = self._cache(require_int("num_slots", num_slots, self.page_size))
        stored = range(len(next(iter(cache.buffers.values()))))
        return [{name: buffer[place] for name, buffer in cache.buffers.items()} for place in stored]

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
        if mask_BNN is None:
            refuse_long(self.target.config, tokens_BN.shape[1])
        shape, pages = tokens_BN.shape, PageTable(page_table_BW, self.page_size)
        slots_BN = pages.next_tokens(lens_B, shape[1]).slots
        plan = chain_plan(pages, lens_B, shape[1]) if mask_BNN is None else tree_plan(pages, lens_B, slots_BN, mask_BNN)
        given, prepared, slots_T = self.given_cache(cache), PreparedPlan(plan), slots_BN.flatten()
        handed_on: dict[str, Any] = {}

        # This is PagedAttention, whose default for `scoring` torch.compile can't trace (torch 2.11) in an object that is made
        # during the trace.
        def attn(layer: int, inputs: LayerInputs, rows_R: Tensor | None = None, scoring: Scoring | None = None) -> Tensor:
            scoring = PLAIN if scoring is None else scoring
            view, kind = given.view(layer), given.kinds[layer]
            return inputs.paged(LayerCall(self.backend, view, kind, slots_T, prepared, rows_R, scoring, handed_on))

        assert plan.positions_T is not None
        out = self.target(tokens_BN.flatten(), plan.positions_T, attn)
        return self.target.logits(out.hidden_TH).unflatten(0, shape)

    def given_cache(self, cache: Sequence[LayerTensors]) -> GivenCache:
        """These tensors as a cache of the target's layers."""
        config = self.target.config
        return GivenCache(self.layout, config.layer_kinds, config.kv_source, cache)

    def _cache(self, num_slots: int) -> KVCache:
        weight = self.target.embed_tokens.weight
        return make_cache(self.target, self.target.config, num_slots, self.kv_cache_dtype, weight.dtype, weight.device)


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
    order_TN = mask_TN.logical_not().argsort(dim=-1, stable=True)  # a node's path is packed to the left of its row
    seen_T = mask_TN.sum(-1).int()
    suffix = Segment(PageTable(slots_TN.gather(1, order_TN).int()), seen_T, _rows(seen_T, 1), 1, base_B=lens_B)
    return AttentionPlan((Segment(pages, lens_B, _rows(lens_B, N), N),), lens_B[rows_T].long() + seen_T - 1, suffix)


def _rows(like_R: Tensor, queries: int) -> Tensor:
    """[R + 1] int32: cumulative query counts of R rows with so many queries each, computed in the graph for any R."""
    return torch.arange(like_R.shape[0] + 1, dtype=torch.int32, device=like_R.device) * queries


class GivenCache(KVCache):
    """A cache whose layers' tensors are given.

    kv_layers: for each layer, the layer whose keys and values it reads.  layers: the tensors of those that store their own.
    In a traced pass each of these tensors must be an input of its own.  If they were views of one tensor whose number of slots
    may vary, inductor (torch 2.13) would lose the views' offsets and store every layer in the first one's place.
    """

    def __init__(
        self,
        layout: CacheLayout,
        kinds: Sequence[LayerKind],
        kv_layers: Sequence[int],
        layers: Sequence[Mapping[str, Tensor]],
    ) -> None:
        self.layout, self.kinds, self.kv_layers = layout, tuple(kinds), tuple(kv_layers)
        self.groups, self.group_numbers = (0,) * len(kinds), (0,)
        self.layers = dict(zip(sorted(set(kv_layers)), layers, strict=True))

    def view(self, layer: int) -> KVView:
        source = self.kv_layers[layer]
        return self.layout.view(source, self.layers[source])


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
        [{name: {0: dims["num_slots"]} for name in layer} for layer in cache],
    )
    if trees:
        args += (torch.ones(B, N, N, dtype=torch.bool, device=device).tril(),)
        by_dim += ({0: dims["batch"], 1: dims["num_tokens"], 2: dims["num_tokens"]},)
    return torch.export.export(decode, args, dynamic_shapes=by_dim)
