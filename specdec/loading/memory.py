"""Decides how large the KV pool is: which layers share page tables, the bytes of a page, and how many pages memory holds.

Recurrent layers take their states out of the same memory first.

This module knows models' configs, settings and bytes; it allocates nothing.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

import torch

from specdec.engine.pages.admission import Admission
from specdec.engine.pages.groups import KVCacheGroup, group_of, page_groups, share_memory
from specdec.engine.pages.pool import PagePool
from specdec.limits import RESERVED_STATES
from specdec.loading.devices import (
    HOST_KEPT_BATCHES,
    HOST_POOL_SHARE,
    KEPT_TOKENS,
    MAX_KEPT_STATES,
    POOL_SHARE,
    STATE_SHARE,
)
from specdec.loading.resolve import EngineSettings
from specdec.models.config import ModelConfig
from specdec.models.kv import cache_layout

AUDIT_PIECE = 64  # places of a text whose logits the audit holds at once
LOGITS_COPIES = 6  # scores, noise and masks beside them
INPUTS_COPIES = 4  # of what layers read beside the residual stream, while it is made
PRODUCTS_BYTES = 64 << 20  # torch gives cuBLAS 32 MiB a thread on a Hopper GPU; two threads multiply


class StatePlan(NamedTuple):
    """Over all models with recurrent layers, the drafter among them.

    with_nodes: the numbers of states that a tree's nodes may follow: all but the kept ones, which come last.

    nodes: the most of one tree.  kept: how many states are kept for later prompts.  state_bytes, node_bytes: of all layers.
    """

    with_nodes: int
    nodes: int
    kept: int
    state_bytes: int
    node_bytes: int

    @property
    def numbers(self) -> int:
        return self.with_nodes + self.kept

    @property
    def kept_numbers(self) -> range:
        """Of the states that are kept."""
        return range(self.with_nodes, self.numbers)

    @property
    def row_bytes(self) -> int:
        """What a row of the batch takes: two states, and what nodes leave beside each."""
        return 2 * (self.state_bytes + self.nodes * self.node_bytes)

    @property
    def bytes(self) -> int:
        return self.numbers * self.state_bytes + self.with_nodes * self.nodes * self.node_bytes


class PoolPlan(NamedTuple):
    """The KV pool, by group of layers.  states: of models with recurrent layers.  draft_states: whether the drafter is one."""

    groups: tuple[KVCacheGroup, ...]
    num_pages: tuple[int, ...]  # of each group, its dummy page included
    page_bytes: tuple[int, ...]  # of one page of each group, over both models
    states: StatePlan | None = None
    draft_states: bool = False

    @property
    def bytes(self) -> int:
        """The bytes of all pages."""
        return sum(pages * size for pages, size in zip(self.num_pages, self.page_bytes, strict=True))

    def groups_of_layers(self, config: ModelConfig) -> tuple[int, ...]:
        """The group of each layer of a model."""
        return tuple(group_of(kind.span, self.groups) for kind in config.layer_kinds)

    def admission(self, settings: EngineSettings, encoder_pages: int = 0) -> Admission:
        """An admission over these pages, all of them free.  encoder_pages: see Admission."""
        pools = [
            PagePool(pages, settings.page_tokens, group.ring) for group, pages in zip(self.groups, self.num_pages, strict=True)
        ]
        given, kept = (pools[0], settings.lookahead, settings.options.prefix_caching), self.states and self.states.kept_numbers
        if len(pools) == 1:
            return Admission(*given, encoder_pages=encoder_pages, kept_states=kept, drafts_have_states=self.draft_states)
        span = self.groups[1].span
        assert span is not None
        return Admission(*given, pools[1], span, encoder_pages, kept, self.draft_states)


def pool_plan(
    configs: Sequence[ModelConfig],
    settings: EngineSettings,
    memory: float,
    slot_bytes: int = 0,
    more: int = 0,
    kept_tokens: int | None = None,
) -> PoolPlan:
    """The KV pool for a full batch of longest sequences, or as much as the memory holds; then requests wait for pages.

    With prefix caching there are more pages, if the memory holds them, so that pages can outlive their requests: up to
    kept_tokens (None: KEPT_TOKENS), and on a CPU at most HOST_KEPT_BATCHES full batches.

    configs: of the target, and of the drafter if there is one.  memory: bytes for the pool; such as `pool_bytes` gives.
    slot_bytes, more: what a drafter keeps beside keys and values: of each token in the first group, and of each page in the
        group of its own layers.
    ValueError if the memory holds no page.
    """
    options, longest = settings.options, settings.pages_per_sequence
    groups = layer_groups(configs, settings)
    sizes = list(kv_page_bytes(configs, settings, groups))
    sizes[0] += slot_bytes * settings.page_tokens
    if more:
        sizes[group_of(configs[-1].key_kinds[0].span, groups)] += more
    page_bytes = tuple(sizes)
    needed = [(group.ring or longest) + 1 for group in groups]
    wanted = [options.max_batch_size * (group.ring or longest) + 1 for group in groups]
    if options.prefix_caching:
        most = (KEPT_TOKENS if kept_tokens is None else kept_tokens) // settings.page_tokens
        batches = options.max_batch_size * longest  # copies of rings are kept for as many tokens as other pages
        takes_all = settings.device.type == "cuda" or options.kv_cache_memory != "auto"
        kept = most if takes_all else min(most, HOST_KEPT_BATCHES * batches + 1)
        wanted = [max(pages, kept) for pages in wanted]
    beside = source_bytes(configs[0], settings) + scratch_bytes(configs[0], settings)
    fewest = 2 * page_bytes[0] + sum(map(mul, needed[1:], page_bytes[1:]))
    states = plan_states(configs, settings, memory, beside + fewest)
    beside += states.bytes if states else 0
    memory -= beside
    num_pages = share_memory(memory, wanted, page_bytes, needed)
    plan = PoolPlan(groups, num_pages, page_bytes, states, any(config.recurrent for config in configs[1:]))
    if min(num_pages) < 2 or (len(groups) > 1 and plan.bytes > memory):
        if options.kv_cache_memory != "auto":
            least = beside + fewest
            raise ValueError(
                f"kv_cache_memory must hold at least a page besides the one for padding, {least} bytes here, got "
                f"{options.kv_cache_memory!r}; nearest setting that works: kv_cache_memory={least}"
            )
        also = ", max_batch_size or max_seq_len, by which an encoder's texts take memory" if configs[0].encoder else ""
        also += f", or max_batch_size, of which each row's states take {states.row_bytes} bytes" if states else ""
        if options.page_size == "sequence":
            also += f" or max_seq_len, since a page holds {settings.page_size} tokens; nearest setting that works: page_size=16"
        raise ValueError(f"no memory is left on {settings.device} for KV pages; use a smaller model or dtype{also}")
    return plan


def layer_groups(configs: Sequence[ModelConfig], settings: EngineSettings) -> tuple[KVCacheGroup, ...]:
    """Which layers of these models share page tables."""
    spans, options = [kind.span for config in configs for kind in config.key_kinds], settings.options
    return page_groups(spans, settings.lookahead, settings.page_tokens, settings.pages_per_sequence, options.prefix_caching)


def kv_page_bytes(configs: Sequence[ModelConfig], settings: EngineSettings, groups: Sequence[KVCacheGroup]) -> tuple[int, ...]:
    """The bytes of one page of each group, of what the group's layers store in both models."""
    options, sizes = settings.options, [0] * len(groups)
    for model, config in enumerate(configs):
        layout = cache_layout(config, options.kv_cache_dtype, settings.dtype)
        tokens = settings.page_tokens if model else settings.page_size  # ranks shard what the target keeps, and nothing else
        for layer in set(config.key_sources):  # a layer that reads another one's keys and values stores none
            sizes[group_of(config.layer_kinds[layer].span, groups)] += tokens * layout.layer_bytes(layer)
    return tuple(sizes)


def source_bytes(target: ModelConfig, settings: EngineSettings) -> int:
    """The bytes of the encoder's texts, one of the longest for each row of a batch; 0 without an encoder."""
    layout = cache_layout(target, settings.options.kv_cache_dtype, settings.dtype)
    slots = settings.options.max_batch_size * settings.longest_encoder_input(target)
    return slots * sum(map(layout.layer_bytes, range(target.num_layers)))


def scratch_bytes(target: ModelConfig, settings: EngineSettings) -> int:
    """The bytes of the scratch where a pass's own tokens lie on every rank; 0 where ranks shard no sequence."""
    layout = cache_layout(target, settings.options.kv_cache_dtype, settings.dtype)
    return settings.scratch_room * sum(map(layout.layer_bytes, set(target.key_sources)))


def plan_states(
    configs: Sequence[ModelConfig], settings: EngineSettings, memory: float = 0.0, others: int = 0
) -> StatePlan | None:  # fmt: skip
    """The states of recurrent layers, the target's and the drafter's under the same numbers; None: neither has any.

    configs: as of `pool_plan`.
    memory: bytes for them and the KV pool together, of which some are for states that are kept.  others: bytes of it that the
        fewest pages take, and what else is neither.
    ValueError if state_cache holds no state, or leaves too little memory.
    """
    options = settings.options
    held = [(config.recurrent, len(config.recurrent_layers)) for config in configs if config.recurrent is not None]
    if not held:
        return None
    nodes = settings.most_nodes
    if any(config.recurrent for config in configs[1:]):
        nodes = max(nodes, settings.draft_slots)
    rows = RESERVED_STATES + 2 * options.max_batch_size
    state = sum(layers * sizes.state_bytes(settings.dtype) for sizes, layers in held)
    node = sum(layers * sizes.node_bytes(settings.dtype) for sizes, layers in held)
    plan = StatePlan(rows, nodes, 0, state, node)
    return plan._replace(kept=_kept_states(plan, settings, memory, others)) if options.prefix_caching else plan


def _kept_states(plan: StatePlan, settings: EngineSettings, memory: float, others: int) -> int:
    """How many states are kept besides those of the plan.  See `plan_states`."""
    asked, least, free = settings.options.state_cache, plan.state_bytes, int(memory) - plan.bytes - others
    size = asked if isinstance(asked, int) else memory * (STATE_SHARE if isinstance(asked, str) else asked)
    nearest = "state_cache='auto'" if size >= least else f"state_cache={least}"
    if free < least:  # the rows' states alone fill it
        more = f"kv_cache_memory={plan.bytes + others + least}"
        is_given = settings.options.kv_cache_memory != "auto"
        nearest = f"{more} and state_cache={least}" if is_given else f"a max_batch_size below {settings.options.max_batch_size}"
    if asked != "auto" and not least <= size <= free:
        raise ValueError(
            f"state_cache must hold a state, {least} bytes here, and leave some of the {max(0, int(memory) - plan.bytes)} "
            f"bytes for pages, which rows' states leave of {int(memory)}, got {asked!r}; nearest setting that works: {nearest}"
        )
    if not (kept := min(MAX_KEPT_STATES, int(min(size, max(0, free)) / least))):
        warnings.warn(
            f"prefix_caching=True finds nothing: a state of the models takes {least} bytes, and state_cache='auto' is a tenth "
            f"of {int(memory)}, of which rows' states and a page leave {max(0, free)}; nearest setting that finds something: "
            f"{nearest}",
            stacklevel=2,
        )
    return kept


def pass_bytes(config: ModelConfig, tokens: int, rows: int, features: int, itemsize: int) -> int:
    """What a forward pass takes while it runs: the widest values of a layer, the features, and the logits of `rows` rows.

    The widest values are the residual stream, its norm and what is added to it, gate and up, and their product.
    """
    layer = 3 * config.hidden_size + 3 * config.intermediate_size + features
    return itemsize * tokens * layer + (itemsize + 4) * rows * config.vocab_size


def audit_bytes(config: ModelConfig, settings: EngineSettings, weights: int) -> int:
    """What comparing a longest text with the reference takes on a rank while it goes on; 0 without `audit`.

    weights: the bytes of the rank's share of the target.  In the wider dtype, there are one layer and the tables of embeddings
    (and what makes the layers' own inputs), what a pass over the text takes, what it is given once more where it goes on after
    it has made way, the scores of all pairs of its tokens where attention keeps them, and some logits; and on a GPU what cuBLAS
    keeps.
    """
    options, own = settings.options, settings.dtype.itemsize
    if not options.audit:
        return 0
    tokens, wide = min(options.audit_max_tokens, settings.max_seq_len), min(8, 2 * own)
    table, inputs = config.vocab_size * config.hidden_size, config.num_layers * config.input_size
    tables = table * own + (0 if config.tie_embeddings else table * own // options.tensor_parallel_size)
    tables += inputs * (config.vocab_size + config.hidden_size) * own
    layer = max(0, weights - tables) // config.num_layers
    widened = (tables + layer) * wide // own if wide > own else 0
    scores = 3 * wide * config.num_heads * tokens**2
    products = PRODUCTS_BYTES if settings.device.type == "cuda" else 0
    # Of a token: a layer's residual stream and its norm, and what all layers read beside it, which is kept and has copies.
    again = 2 * config.hidden_size + (1 + INPUTS_COPIES) * inputs
    return widened + pass_bytes(config, tokens, AUDIT_PIECE * LOGITS_COPIES, again, wide) + scores + products


def pool_bytes(device: torch.device, asked: str | int | float = "auto", reserved: int = 0) -> float:
    """The bytes that KV may take: a share of the GPU's free memory, or of all memory of the host; or what is asked for.

    asked: kv_cache_memory.  reserved: bytes that something else needs.  ValueError if it is more than there is.
    """
    is_gpu = device.type == "cuda"
    if is_gpu:
        torch.cuda.empty_cache()  # memory that torch keeps of an engine that is gone would count as taken
        free, share = torch.cuda.mem_get_info(device)[0], POOL_SHARE
    else:
        free, share = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), HOST_POOL_SHARE
    free = max(0, free - reserved)
    if isinstance(asked, str):
        return free * share
    if isinstance(asked, float):
        return free * asked
    if asked > free:
        there = ("is free" if is_gpu else "the host has") + (" beside the audit's passes" if reserved else "")
        raise ValueError(
            f"kv_cache_memory must be at most what {there} on {device}, {free} bytes, got {asked}; nearest setting that works: "
            f"kv_cache_memory={share}"
        )
    return asked
