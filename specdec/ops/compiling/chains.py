"""Which kernel triggers when, and which of its arguments it reads before its wait: the rules are in launch.py.

tests/ops/compiling/test_chains.py holds the table against the source.  It can't see what a read rests on: which kernels may
stand in front.  So a kernel that is added, that comes to stand elsewhere, or that reads something more before its wait has to
be thought through here first.  Weights, tables of norms and rotations, and numbers that the host has set may always be read,
because no kernel writes them.

This module knows names and nothing else.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Trigger = Literal["early", "late", "never", "unchained"]


class KernelGroup(NamedTuple):
    """Kernels that trigger alike.

    trigger: before their wait, after it, or never.  unchained: they have no wait either.
    why: what this is good for.
    others: kernels that read nothing before their wait, by name.  reads: for all other kernels of the group the arguments that
    they read there.
    """

    trigger: Trigger
    why: str
    others: str
    reads: dict[str, str]


class Chain(NamedTuple):
    """One kernel.  reads: the arguments that it reads before its wait."""

    trigger: Trigger
    why: str
    reads: frozenset[str]


WORDS = "high_tiles max_outliers outlier_columns outliers qweight_tiles scales zero_points"  # all that a product's weight is
GROUPS = (
    KernelGroup(
        "early",
        "The next kernel's start overlaps this one's work (measured: benchmarks/products/README.md).",
        "masked_logits gumbel_noise perturb pair_rms_norm activation take_rows prepend move pack merge_ranks local_slots "
        "largest_queries float8_queries latent_path path merge_kv_blocks next_tokens finish_chain best_paths block_tables fork "
        "best_nodes first_level expand accept path_tables output_gate rates match_paths write_text predicted_paths "
        "continuations follow join join_chain learn halve_counts convolve best_children tree_numbers halt",
        {
            "add_rms_norm": "weight inner",
            "convolve_add_norm": "weight",
            "gated_norm": "weight",
            "router": "bias correction weight",
            "router_one": "bias correction weight",
            "norm_router": "bias correction norm weight",
            "take_columns": "order",
            "subtract": "factor norm",
            "rope_store": "positions slots table",
            "sinks": "sinks",
            "suffix_merge": "cache_seqlens kv q q_positions scales sinks slopes slot_table starts",
            "fill_pairs": "mask",
        },
    ),
    KernelGroup(
        "early",
        "All programs of an exchange between GPUs run when they have triggered, so no kernel after them can take a place "
        "that they need. They read what other ranks send only after their wait.",
        "",
        {"flat": "table", "few_rows": "table weight", "many_rows": "table weight", "all_to_all_states": "table"},
    ),
    KernelGroup(
        "late",
        "The norm in front of the qkv projection is complete when the store after it starts, and so are the tables, "
        "lengths and first keys made before that norm, which store and attention read before their waits. The second "
        "product of experts reads topk_ids, or a router's logits, which the first one has waited for.",
        "tiled_linear experts_linear weighted_sum spread_rows own_pairs by_expert count_pairs place_pairs "
        "router_many norm_parts",
        {
            "quantised_experts": "topk_ids qweight",
            "few_gate_up": "shared",
            "few_gate_up_hopper": "correction router_bias",
            "few_down": "topk_ids qweight shared",
            "few_down_hopper": "active correction parts qweight router_bias topk_ids",
            "each_linear": "weight",
            "hopper_linear": "weight_tiles",
            "one_row": "bias weight",
            "held_rows": "bias weight",
            "linear": "weight",
            "large_n_linear": "weight",
            "x_first_linear": "weight",
            "quantised_linear": "qweight",
            "quantised_warp": WORDS,
            "quantised_warpgroup": WORDS,
        },
    ),
    KernelGroup(
        "late",
        "The merge after attention reads queries, and the suffix's keys, table and lengths, before its wait. Of the cache "
        "itself only single_query_attention and the producers of kernels for Hopper GPUs read before their waits, and "
        "only keys of earlier passes: not those that this layer may have just stored (`Segment.fresh`). latent_attention asks "
        "L2 for slots, fresh ones too, and reads nothing of them; L2 is where the store in front writes.",
        "",
        {
            "latent_kv_blocks": "cache_seqlens cu_seqlens_q page_table",
            "kv_blocks": "cache_seqlens cu_seqlens_q page_table starts",
            "paged_hopper": "cache_seqlens cu_seqlens_q kv_tiles page_table starts",
            "wide_hopper": "cache_seqlens cu_seqlens_q kv_tiles page_table starts",
            "wide_many_hopper": "cache_seqlens cu_seqlens_q k_tiles page_table starts v_tiles",
            "paged_attention": "cache_seqlens cu_seqlens_q page_table starts",
            "single_query_attention": "cache_seqlens kv norm page_table positions slots starts table",
            "latent_hopper": "cache_seqlens cu_seqlens_q",
            "latent_attention": "cache_seqlens cu_seqlens_q latent page_table rope starts",
        },
    ),
    KernelGroup(
        "late",
        "Attention after the store reads tables and lengths before its wait.",
        "upconvert",
        {"store_latent": "positions slots table", "store_index": "positions slots table"},
    ),
    KernelGroup(
        "late",
        "What the indexer, its selection and attention over selected keys read before their waits lies further in front.",
        "latent_merge latent_combine",
        {
            "rows_hopper": "counts",
            "merge_rows": "counts",
            "single_query_scores": "page_table paged_T path_T rows_T",
            "multi_query_scores": "cache_seqlens cu_seqlens_q page_table paged_T path_T",
            "filter": "paged_T path_T",
            "select": "paged_T path_T rows_T",
        },
    ),
    KernelGroup(
        "late",
        "A scan, or the search for the approximate cutoff, comes after a product or one of these, and reads the rows' "
        "lengths, seeds and options before its wait; a chain's later step reads all levels' own logits, which the first "
        "step has waited for.",
        "row_tops narrow cutoff sample_scan merge arrange",
        {
            "approximate_cutoff": "min_p temperatures top_k top_p",
            "scan": "lens offsets seeds temperatures",
            "corrected_logits": "w2",
            "chain_step": "own w2",
        },
    ),
    KernelGroup(
        "late",
        "Layers read the numbers of states before their waits, and the next round what is pending.",
        "state_numbers commit_states",
        {},
    ),
    KernelGroup(
        "late",
        "The gated delta rule comes after the convolution, and reads the numbers, parents and accepted nodes of the round, and "
        "what the round before left, before its wait. So does the convolution, after a product, which triggers late too.",
        "",
        {"chunk_convolution": "bias weight", "tree_convolution": "bias conv count left path read weight"},
    ),
    KernelGroup(
        "late",
        "The convolution in front triggers late, so what stood before it is complete; states and what nodes left were written "
        "a round ago, under other numbers than those that tree_nodes writes in front of tree_rule. What comes next waits for a "
        "complete convolution, too, and chunk_scan for what chunk_prepare leaves; so it is with Mamba-2's rule and Kimi's.",
        "ssd_prepare ssd_scan",
        {
            "ssd_step": "bias conv count decay_left inputs_left k_left path read state u_left weight",
            "ssd_tree": "count decay_left k_left parents path read state u_left",
            "ssd_tree_hopper": "A_log D count decay_left dt_bias k_left parents path read state u_left",
            "chunk_prepare": "",
            "chunk_scan": "",
            "tree_nodes": "parents",
            "kimi_nodes": "parents",
            "kimi_prepare": "",
            "kimi_prepare_hopper": "",
            "kimi_rule": "count decay_left k_left path read state u_left",
            "kimi_rule_hopper": "A_log count decay_left dt_bias k_left parents path read state u_left",
            "kimi_scan": "",
            "kimi_step": "count decay_left k_left path read state u_left",
            "step_rule": "count decay_left k_left path read state u_left",
            "tree_rule": "count decay_left k_left path read state u_left",
            "tree_rule_hopper": "A_log count decay_left dt_bias k_left parents path read state u_left",
        },
    ),
    KernelGroup(
        "late",
        "The kernel after it reads positions before its wait as soon as one more kernel is in front.",
        "last_positions",
        {},
    ),
    KernelGroup(
        "never",
        "Attention reads first keys and lengths before its wait, and may be the next kernel.",
        "local_lens first_keys",
        {},
    ),
    KernelGroup(
        "unchained",
        "It is launched without the attribute: it starts when the kernel in front is complete, and may read everything.",
        "gated_linear grouped_linear dequantise match_keys soft_entropy soft_entropy_gradient",
        {},
    ),
)
CHAINS = {
    f"{name}_kernel": Chain(group.trigger, group.why, frozenset(group.reads.get(name, "").split()))
    for group in GROUPS
    for name in (*group.others.split(), *group.reads)
}
