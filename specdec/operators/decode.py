"""A target's decode pass as a module, for torch.export and torch.compile.

What changes between calls are inputs, the cache's tensors among them.  The module's graph consists of operators and of torch's
own operations.  This file knows no engine: neither requests, nor who owns which page.

Shapes: B sequences, N new tokens of each, W pages of each, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from specdec.attention.attend import PagedAttention, PassTables
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.caches.planes import CacheLayout, KVView
from specdec.attention.kinds import LayerKind
from specdec.attention.latent.mla import EXPAND_ABOVE
from specdec.attention.operators.backend import OperatorBackend
from specdec.attention.pages import PageTable
from specdec.attention.segment import AttentionPlan, Segment
from specdec.checks import require_choice, require_int
from specdec.models.causal_lm import CausalLM
from specdec.models.checkpoints.checkpoint import resolve_folder
from specdec.models.checkpoints.loader import DTYPES
from specdec.models.kv import keeps_latents, make_cache
from specdec.models.registry import choose_target, load_chosen
from specdec.models.target import Target

LayerTensors = dict[str, Tensor]  # one layer's part of a cache: by plane, a tensor [num_slots, ...]


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
        if keeps_latents(target.config) and kv_cache_dtype != "auto":
            raise ValueError(
                f"kv_cache_dtype must be 'auto' for a target that stores latents, got {kv_cache_dtype!r}; nearest setting that "
                "works: kv_cache_dtype='auto'"
            )
        self.layout = self._cache(0).layout

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
        folder = resolve_folder(target, "target")
        require_int("max_positions", max_positions, 1)
        require_choice("dtype", dtype, tuple(DTYPES), "float32")
        chosen = choose_target(folder, "native")
        return cls(load_chosen(chosen, folder, max_positions, torch.device(device), dtype, False), page_size, kv_cache_dtype)

    def new_cache(self, num_slots: int) -> list[LayerTensors]:
        """Memory for the keys and values of so many tokens, layer by layer.  What it holds is arbitrary until it is stored."""
        cache = self._cache(require_int("num_slots", num_slots, self.page_size))
        return [{name: plane[layer] for name, plane in cache.planes.items()} for layer in range(len(cache.kinds))]

    def forward(self, tokens_BN: Tensor, page_table_BW: Tensor, lens_B: Tensor, cache: Sequence[LayerTensors]) -> Tensor:
        """The logits [B, N, V] after each of the tokens, whose keys and values are stored in `cache`.

        tokens_BN: int64.
        page_table_BW: int32; the token at position p of sequence b lies in page page_table_BW[b, p // page_size].
        lens_B: int32, how many tokens of each sequence are stored already; the new ones come right after them.
        cache: as `new_cache` makes it.
        """
        B, N = tokens_BN.shape
        pages, end_B = PageTable(page_table_BW, self.page_size), lens_B + N
        new = pages.next_tokens(lens_B, N)
        first_queries = torch.arange(B + 1, dtype=torch.int32, device=lens_B.device) * N
        plan = AttentionPlan((Segment(pages, end_B, first_queries, N, causal=True),), new.positions.flatten())
        given = GivenCache(self.layout, self.target.config.layer_kinds, cache)
        attn = PagedAttention(OperatorBackend(), given, PassTables(plan, new.slots.flatten()))
        out = self.target(tokens_BN.flatten(), new.positions.flatten(), attn)
        return self.target.logits(out.hidden_TH).unflatten(0, (B, N))

    def _cache(self, num_slots: int) -> KVCache:
        weight = self.target.lm_head.weight
        return make_cache(self.target, self.target.config, num_slots, self.kv_cache_dtype, weight.dtype, weight.device)


class GivenCache(KVCache):
    """A cache whose layers' tensors are given.

    In a traced pass each of these tensors must be an input of its own.  If they were views of one tensor whose number of slots
    may vary, inductor (torch 2.13) would lose the views' offsets and store every layer in the first one's place.
    """

    def __init__(self, layout: CacheLayout, kinds: Sequence[LayerKind], layers: Sequence[Mapping[str, Tensor]]) -> None:
        self.layout, self.kinds, self.layers = layout, tuple(kinds), layers

    def view(self, layer: int) -> KVView:
        return self.layout.view(layer, self.layers[layer])


@torch.no_grad()
def export_decode(
    decode: DecodePass,
    *,
    batch: int | None = None,
    num_tokens: int | None = None,
    table_width: int | None = None,
    num_slots: int | None = None,
) -> ExportedProgram:
    """The exported program of a DecodePass, whose inputs are those of its forward().

    batch, num_tokens, table_width, num_slots: B, N, W and the cache's slots where they are fixed; None: the program takes any.
    """
    given = {"batch": batch, "num_tokens": num_tokens, "table_width": table_width, "num_slots": num_slots}
    for name, size in given.items():
        if size is not None:
            require_int(name, size, 1)
    B, N, W = batch or 2, num_tokens or 3, table_width or 5
    device = decode.target.lm_head.weight.device
    tokens_BN = torch.zeros(B, N, dtype=torch.int64, device=device)
    table_BW, lens_B = (torch.zeros(shape, dtype=torch.int32, device=device) for shape in ((B, W), (B,)))
    cache = decode.new_cache(num_slots or 7 * decode.page_size)
    # A pass over latents has another graph for longer prompts, which reads on the host how much is stored already.
    most = {"num_tokens": EXPAND_ABOVE} if keeps_latents(decode.target.config) else {}
    dims = {name: Dim.STATIC if size else Dim(name, min=1, max=most.get(name)) for name, size in given.items()}
    by_dim = (
        {0: dims["batch"], 1: dims["num_tokens"]},
        {0: dims["batch"], 1: dims["table_width"]},
        {0: dims["batch"]},
        [{name: {0: dims["num_slots"]} for name in layer} for layer in cache],
    )
    return torch.export.export(decode, (tokens_BN, table_BW, lens_B, cache), dynamic_shapes=by_dim)
