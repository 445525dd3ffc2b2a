"""For each kernel of specdec the tests that launch it on a GPU under compute-sanitizer, on small shapes.

A test appears once, at the first of the kernels that it launches.
"""

import ast
from pathlib import Path

from toolkit.sanitize.explained import ROOMS

ROUTED = "tests/ops/products/experts/test_routed.py"
RULE = "tests/ops/recurrent/test_rule_triton.py"
SSD = "tests/ops/recurrent/mamba/test_ssd_triton.py"
KIMI = "tests/ops/recurrent/kimi/test_kimi_triton.py"

CHOSEN: dict[str, list[str]] = {
    # ops
    "add_rms_norm_kernel": [
        "tests/ops/test_norm.py::test_sum_and_norm_equal_the_definition[3-300-dtype2]",
        "tests/ops/test_partials.py::test_a_norm_adds_what_another_norm_gives[0.3-5]",
    ],
    "norm_parts_kernel": ["tests/ops/test_norm.py::test_norms_of_parts_equal_the_definition[3-dtype2]"],
    "pair_rms_norm_kernel": ["tests/ops/test_norm.py::test_pair_norm_equals_the_definition[dtype2]"],
    "linear_kernel": ["tests/ops/products/test_linear.py::test_equals_the_definition[1-64-128-1-gated-dtype2]"],
    "hopper_linear_kernel": [
        "tests/ops/products/test_linear.py::test_hopper_equals_the_definition[31-72-1000-tiles4-True-dtype1]",
        "tests/ops/test_partials.py::test_partials_are_the_product[1544-2088-9]",
    ],
    "one_row_kernel": ["tests/ops/products/test_one_row.py::test_a_row_equals_the_definition[16-64-4-True-dtype0]"],
    "held_rows_kernel": ["tests/ops/products/test_one_row.py::test_few_rows_equal_the_definition[16-32-4-True-dtype0]"],
    "gated_linear_kernel": ["tests/ops/products/test_linear.py::test_gated_hopper_equals_the_definition[1100-264-72-5-dtype1]"],
    "large_n_linear_kernel": [
        "tests/ops/products/test_linear.py::test_large_n_equals_the_definition[72-64-27-32-gated-dtype2]"
    ],
    "x_first_linear_kernel": [
        "tests/ops/products/test_linear.py::test_large_n_equals_the_definition[72-64-150-192-gated-dtype2]"
    ],
    "quantised_linear_kernel": [
        "tests/ops/products/test_quantised_linear.py::test_the_kernel_computes_the_product[int4-32-True]"
    ],
    "quantised_warp_kernel": [
        "tests/ops/products/test_quantised_hopper.py::test_hopper_kernels_compute_the_product[False-int4-64-True]",
        "tests/ops/products/test_lossless_hopper.py::test_the_kernels_compute_the_product[False]",
    ],
    "quantised_warpgroup_kernel": [
        "tests/ops/products/test_quantised_hopper.py::test_hopper_kernels_compute_the_product[True-int4-64-True]",
        "tests/ops/products/test_quantised_hopper.py::test_hopper_kernels_compute_the_product[True-int4-128-True]",
        "tests/ops/products/test_lossless_hopper.py::test_the_kernels_compute_the_product[True]",
    ],
    "dequantise_kernel": ["tests/ops/products/test_quantised_linear.py::test_the_kernel_dequantises[int4-32-True]"],
    "tiled_linear_kernel": [
        "tests/ops/products/test_invariant_products.py::test_the_tiled_product_equals_the_definition[35-40-104-1-False]"
    ],
    "quantised_experts_kernel": [
        "tests/ops/products/experts/test_quantised_mixture.py::test_a_mixture_equals_its_definition[mxfp4-read]",
        "tests/ops/products/experts/test_quantised_mixture.py::test_a_mixture_equals_its_definition[int4 zero points-sorted]",
    ],
    "few_gate_up_kernel": [
        "tests/ops/products/experts/test_few_tokens.py::test_a_mixture_equals_its_definition[mxfp4-5-2-4]",
        "tests/ops/products/experts/test_few_tokens.py::test_a_mixture_equals_its_definition[dense-1-4-1]",
    ],
    "few_down_kernel": [],
    "few_gate_up_hopper_kernel": [
        "tests/ops/products/experts/test_few_hopper.py::test_a_mixture_equals_its_definition[mxfp4-1]",
        "tests/ops/products/experts/test_few_hopper.py::test_a_mixture_equals_its_definition[int4-5]",
    ],
    "few_down_hopper_kernel": [],
    "router_kernel": [f"{ROUTED}::test_one_launch_chooses_as_the_definition[sigmoid, groups' best two-5-True-tiles0]"],
    "router_one_kernel": [
        "tests/ops/products/experts/test_unchosen.py::"
        "test_a_token_alone_has_the_experts_of_the_definition[sigmoid, corrected-160]"
    ],
    "norm_router_kernel": [
        "tests/ops/products/experts/test_unchosen.py::"
        "test_a_norm_and_a_router_equal_their_definitions[sigmoid, corrected-40-160-3]"
    ],
    "router_many_kernel": [f"{ROUTED}::test_one_launch_chooses_as_the_definition[sigmoid, groups' best two-21-True-tiles2]"],
    "experts_linear_kernel": ["tests/ops/products/experts/test_stacked.py::test_experts_equal_the_definition[7-2]"],
    "weighted_sum_kernel": [],
    "spread_rows_kernel": ["tests/ops/products/experts/test_stacked.py::test_rows_of_placed_pairs_are_added_up"],
    "by_expert_kernel": ["tests/ops/products/experts/test_stacked.py::test_pairs_are_sorted_by_expert[700-launch_by_expert]"],
    "count_pairs_kernel": [
        "tests/ops/products/experts/test_stacked.py::test_pairs_are_sorted_by_expert[1700-launch_by_expert_many]"
    ],
    "place_pairs_kernel": ["tests/ops/products/experts/test_stacked.py::test_pairs_have_places_in_tiles_of_one_expert[1700]"],
    "grouped_linear_kernel": ["tests/ops/products/experts/test_placed.py::test_experts_equal_the_definition[form1-dtype0-300]"],
    "own_pairs_kernel": ["tests/ops/products/experts/test_quantised_mixture.py::test_pairs_are_skipped[mxfp4-5-False]"],
    "each_linear_kernel": ["tests/ops/products/experts/test_stacked.py::test_each_matrix_equals_the_definition[columns]"],
    "activation_kernel": ["tests/ops/products/test_linear.py::test_activations_equal_their_definitions[5-100-dtype2]"],
    "take_rows_kernel": ["tests/ops/test_rows.py::test_picked_rows[torch.bfloat16-1-6-1-40]"],
    "take_columns_kernel": ["tests/ops/test_rows.py::test_columns_in_another_order[torch.bfloat16-shape1-2100]"],
    "prepend_kernel": ["tests/ops/test_rows.py::test_a_column_in_front[3-1]"],
    "tree_convolution_kernel": [
        "tests/ops/recurrent/test_conv_triton.py::test_trees_equal_the_definition[33-False-dtype3-tiles3-False-True]"
    ],
    "chunk_convolution_kernel": [
        "tests/ops/recurrent/test_conv_triton.py::test_parts_equal_the_definition[lengths0-2-16-dtype0-True-True]"
    ],
    "step_rule_kernel": [f"{RULE}::test_trees_equal_the_definition[sizes1-1-chain-6-dtype1]"],
    "tree_nodes_kernel": [],
    "tree_rule_kernel": [
        f"{RULE}::test_trees_equal_the_definition[sizes{at}]" for at in ("3-7-tree-6-dtype3", "5-32-tree-6-dtype5")
    ],
    "tree_rule_hopper_kernel": [
        "tests/ops/recurrent/test_rule_hopper.py::test_trees_equal_the_definition[7-chain-6-None]",
        "tests/ops/recurrent/test_rule_hopper.py::test_trees_equal_the_definition[20-tree-6-tiles5]",
        "tests/ops/recurrent/test_rule_hopper.py::test_trees_equal_the_definition[6-chain-2-tiles11]",
    ],
    "chunk_prepare_kernel": [f"{RULE}::test_parts_equal_the_definition[blocks of 32]"],
    "chunk_scan_kernel": [],
    "ssd_tree_kernel": [
        f"{SSD}::test_trees_equal_the_definition[sizes{at}]" for at in ("3-7-tree-6-dtype3", "5-32-tree-6-dtype5")
    ],
    "ssd_tree_hopper_kernel": [
        f"tests/ops/recurrent/mamba/test_ssd_hopper.py::test_trees_equal_the_definition[{case}]"
        for case in ("heads of a group-7-chain-6-None", "two blocks of columns-20-tree-6-tiles5")
    ],
    "ssd_step_kernel": [f"{SSD}::test_a_step_with_its_convolution_equals_the_definition[sizes1-False-2]"],
    "ssd_prepare_kernel": [f"{SSD}::test_parts_equal_the_definition[blocks of 32]"],
    "ssd_scan_kernel": [],
    "kimi_step_kernel": [f"{KIMI}::test_trees_equal_the_definition[sizes1-1-chain-6-dtype1]"],
    "kimi_nodes_kernel": [f"{KIMI}::test_trees_equal_the_definition[sizes4-32-chain-2-dtype4]"],
    "kimi_rule_kernel": [f"{KIMI}::test_trees_equal_the_definition[sizes3-7-tree-6-dtype3]"],
    "kimi_rule_hopper_kernel": [
        "tests/ops/recurrent/kimi/test_kimi_hopper.py::test_trees_equal_the_definition[7-chain-6-None]",
        "tests/ops/recurrent/kimi/test_kimi_hopper.py::test_trees_equal_the_definition[32-tree-6-tiles5]",
        "tests/ops/recurrent/kimi/test_kimi_hopper.py::test_trees_equal_the_definition[20-chain-20-tiles9]",
    ],
    "kimi_prepare_kernel": [f"{KIMI}::test_parts_equal_the_definition[blocks of 32]"],
    "kimi_prepare_hopper_kernel": ["tests/ops/recurrent/kimi/test_kimi_hopper.py::test_parts_equal_the_definition[short]"],
    "kimi_scan_kernel": [],
    "gated_norm_kernel": [
        "tests/ops/recurrent/test_gated_norm.py::test_a_norm_with_its_gate_is_transformers_[torch.float16-1-5-48]"
    ],
    "scan_kernel": ["tests/ops/test_topk_triton.py::test_equals_the_definition[7-7-torch.bfloat16]"],
    "merge_kernel": ["tests/ops/test_topk_triton.py::test_equals_the_definition[300-1-torch.float32]"],
    "gumbel_noise_kernel": ["tests/ops/noise/test_gumbel_triton.py::test_noise_equals_the_definition[0-3000]"],
    "sample_scan_kernel": [
        "tests/ops/noise/test_sample.py::test_tokens_are_the_definition_s[torch.float16-5-1-300]",
        "tests/ops/noise/test_cutoff.py::test_tokens_are_sampled_from_what_is_kept[torch.float16]",
    ],
    "masked_logits_kernel": ["tests/batch/test_masks.py::test_banned_tokens_are_minus_infinity[torch.float16-4-3-95-0-95]"],
    "perturb_kernel": [
        "tests/ops/noise/test_gumbel_triton.py::test_perturbed_logits_of_a_run_equal_the_definition[torch.bfloat16]"
    ],
    "row_tops_kernel": ["tests/ops/noise/test_cutoff.py::test_the_kernels_equal_the_definition[4097-dtype1]"],
    "narrow_kernel": [],
    "cutoff_kernel": [],
    "approximate_cutoff_kernel": [
        "tests/ops/noise/test_approximate_cutoff.py::test_the_kernel_equals_the_definition[1300-dtype1]"
    ],
    # attention over keys and values
    "next_tokens_kernel": ["tests/attention/kernels/test_tables.py::test_next_tokens[1-1-5-True]"],
    "last_positions_kernel": ["tests/attention/kernels/test_triton_kinds.py::test_last_positions[6]"],
    "first_keys_kernel": ["tests/attention/kernels/test_triton_kinds.py::test_first_keys[window 9-7]"],
    "move_kernel": ["tests/attention/kernels/test_tables.py::test_moved_tokens_equal_the_definition[3-2-5-5-3-8]"],
    "rope_store_kernel": [
        "tests/attention/kernels/test_rope_queries.py::test_equals_the_definition[dtype0-5-6-24-False-True]",
        "tests/attention/caches/test_quant_triton.py::test_the_first_store_sets_fp8_s_scale_from_normed_and_rotated_keys",
        "tests/attention/caches/test_int8_keys.py::test_the_kernel_stores_the_very_bytes_of_the_definition[5-3-24-True-torch.float16]",
    ],
    "paged_attention_kernel": ["tests/attention/kernels/test_triton.py::test_nan_in_unread_slots_stays_there[5]"],
    "single_query_attention_kernel": [
        "tests/attention/test_single_query.py::test_a_layer_takes_it_where_it_was_measured",
    ],
    "paged_hopper_kernel": ["tests/attention/kernels/test_hopper_gpu.py::test_the_rule_s_own_choice[empty row]"],
    "wide_many_hopper_kernel": ["tests/attention/kernels/wide/test_wide_hopper_gpu.py::test_the_rule_s_own_choice[tree]"],
    "wide_hopper_kernel": ["tests/attention/kernels/wide/test_wide_hopper_gpu.py::test_the_rule_s_own_choice[empty row]"],
    "suffix_merge_kernel": ["tests/attention/kernels/test_triton.py::test_any_number_of_splits_gives_the_same[True-8]"],
    "sinks_kernel": ["tests/attention/kernels/test_sinks.py::test_sinks_equal_their_definition[7-3-24-dtype1]"],
    "subtract_kernel": ["tests/attention/differential/test_subtract.py::test_difference_is_that_of_the_pairs"],
    "largest_queries_kernel": [
        "tests/attention/flash/test_queries.py::test_kernels_equal_their_definition[lens2-3-1-16-16-dtype2]"
    ],
    "float8_queries_kernel": [],
    "kv_blocks_kernel": [
        "tests/attention/invariant/test_kv_blocks.py::test_a_token_s_attention_does_not_depend_on_its_chunk[World-kind1]"
    ],
    "merge_kv_blocks_kernel": [],
    "path_kernel": [
        "tests/attention/invariant/test_kv_blocks.py::test_a_node_s_attention_is_that_of_a_plain_step[World-kind3-62]"
    ],
    "latent_kv_blocks_kernel": [
        "tests/attention/invariant/test_kv_blocks.py::test_a_token_s_attention_does_not_depend_on_its_chunk[Latents-kind4]"
    ],
    "latent_path_kernel": [
        "tests/attention/invariant/test_kv_blocks.py::test_a_node_s_attention_is_that_of_a_plain_step[Latents-kind7-126]"
    ],
    # context parallelism, of which a test plays one rank
    "local_slots_kernel": ["tests/attention/context_parallel/test_sharding.py::test_kernels_equal_their_definition[0-2-4-2]"],
    "local_lens_kernel": [],
    "pack_kernel": ["tests/attention/context_parallel/test_all_to_all.py::test_kernels_equal_their_definition[torch.float32]"],
    "merge_ranks_kernel": [],
    "arrange_kernel": ["tests/parallel/test_scan.py::test_ranks_find_what_one_finds[600-2-3-torch.bfloat16]"],
    # latents
    "store_latent_kernel": ["tests/attention/latent/test_mla.py::test_trees_meet_latents[5-triton-split]"],
    "latent_attention_kernel": [
        "tests/attention/latent/test_mla.py::test_few_queries_meet_latents[5-6-triton-split]",
        "tests/attention/latent/test_fp8_latent_kernels.py::test_chains[5-6-triton-split-torch.float16]",
    ],
    "latent_combine_kernel": ["tests/attention/latent/test_mla.py::test_keys_are_rows_of_the_products[5]"],
    "latent_merge_kernel": ["tests/attention/latent/test_mla.py::test_odd_sizes_are_padded"],
    "upconvert_kernel": [
        "tests/attention/latent/test_upconvert.py::test_the_kernel_converts_what_its_definition_converts[5-torch.float16]"
    ],
    # latents that an indexer chooses
    "store_index_kernel": [
        "tests/attention/sparse/test_index_store.py::test_the_kernel_does_what_its_definition_does[(5, 16, 8)-torch.float16]"
    ],
    "single_query_scores_kernel": [
        "tests/attention/sparse/test_sparse_triton.py::test_scores_meet_the_definition[16-causal-1-dtype1]"
    ],
    "multi_query_scores_kernel": [
        "tests/attention/sparse/test_sparse_inputs.py::test_tree_nodes_choose_as_plain_decoding_along_their_paths[5-triton]"
    ],
    "filter_kernel": [],
    "select_kernel": [],
    "merge_rows_kernel": ["tests/attention/sparse/test_rows_merge.py::test_merged_states[7]"],
    # the round
    "first_level_kernel": ["tests/draft/test_kernels.py::test_growth_equals_the_definition[3-3-3-17-plain]"],
    "expand_kernel": [],
    "fork_kernel": ["tests/draft/test_kernels.py::test_forks_equal_the_definition[1-2-3-9-64]"],
    "soft_entropy_kernel": ["tests/train/test_entropy.py::test_the_kernels_are_the_definition[4099-dtype1]"],
    "soft_entropy_gradient_kernel": [],
    "match_keys_kernel": ["tests/draft/ngram/test_lookup.py::test_the_kernel_finds_the_same_places[span]"],
    "best_nodes_kernel": ["tests/draft/test_kernels.py::test_the_best_nodes_equal_the_definition[2-4-4-53-False]"],
    "best_paths_kernel": ["tests/draft/block/test_grow.py::test_the_kernel_finds_the_same[3-3-20-random]"],
    "corrected_logits_kernel": ["tests/draft/block/test_correct.py::test_logits[2-9-300-16-dtype2]"],
    "chain_step_kernel": ["tests/draft/block/test_correct.py::test_chains[3-4-129-40-True-dtype2]"],
    "finish_chain_kernel": [],
    "convolve_kernel": [
        "tests/draft/block/test_dflash2_kernels.py::test_kernels_equal_their_definitions[(1, 16, 96, 4, 6)-torch.bfloat16]"
    ],
    "convolve_add_norm_kernel": [],
    "best_children_kernel": [
        "tests/draft/block/test_dflash2_kernels.py::test_the_kernel_of_children[2-5-16-64-3-50-torch.bfloat16]"
    ],
    "fill_pairs_kernel": ["tests/draft/block/test_tables.py::test_pairs[3-6-10-1100-dtype1]"],
    "rates_kernel": ["tests/draft/join/test_paths.py::test_the_kernel_finds_the_same_paths[9-None-chain]"],
    "match_paths_kernel": [],
    "write_text_kernel": ["tests/draft/ngram/test_lookup.py::test_what_a_round_emits_is_written_after_the_text"],
    "continuations_kernel": ["tests/draft/suffix/test_lookup.py::test_the_kernel_finds_the_same[4-9]"],
    "predicted_paths_kernel": ["tests/draft/prediction/test_places.py::test_the_kernel_finds_the_same_places[3]"],
    "follow_kernel": ["tests/draft/prediction/test_places.py::test_answers_go_on[1]"],
    "join_kernel": ["tests/draft/join/test_join.py::test_the_kernel_finds_the_same_candidates[3]"],
    "join_chain_kernel": ["tests/draft/join/test_join.py::test_a_chain_is_the_path_that_is_followed_furthest[3]"],
    "learn_kernel": ["tests/draft/join/test_survival.py::test_the_kernels_learn_the_same"],
    "halve_counts_kernel": ["tests/draft/join/test_survival.py::test_the_kernel_halves_the_same"],
    "block_tables_kernel": ["tests/draft/block/test_tables.py::test_tables_of_blocks[3-6-16-4]"],
    "path_tables_kernel": ["tests/verify/test_kernels.py::test_tables_equal_the_definition[4-16-5-1]"],
    "tree_numbers_kernel": ["tests/verify/test_kernels.py::test_numbers_of_trees_equal_the_definition[3-9-True-True]"],
    "state_numbers_kernel": ["tests/verify/test_states.py::test_kernels_equal_their_definitions[0]"],
    "commit_states_kernel": ["tests/verify/test_states.py::test_kernels_equal_their_definitions[1]"],
    "output_gate_kernel": [
        "tests/ops/recurrent/test_output_gate.py::test_the_kernel_equals_the_definition[False-rows1-dtype1]"
    ],
    "accept_kernel": ["tests/verify/test_kernels.py::test_acceptance_equals_the_definition[2-33-32]"],
    "halt_kernel": ["tests/verify/test_halt.py::test_the_kernel_equals_the_definition[5-True]"],
    # Hopper's own, which take longest
    "latent_hopper_kernel": ["tests/attention/latent/test_mla_gpu.py::test_latents_of_deepseek[64-True-16 bits]"],
    "rows_hopper_kernel": ["tests/attention/sparse/test_sparse_gpu.py::test_latents_of_rows[1-dtype0]"],
}

# Of several ranks: they exchange memory between GPUs, so that one process on one GPU can't launch them.
OF_RANKS: dict[str, list[str]] = {
    "few_rows_kernel": ["tests/gpu/test_gpu_symmetric.py::test_every_kernel_exchanges_a_few_numbers"],
    "many_rows_kernel": [],
    "flat_kernel": [],
    "all_to_all_states_kernel": [],
}


def kernels_in(root: Path) -> set[str]:
    """The names of the tree's kernels: functions that a jit compiles, and whose name ends in _kernel."""
    return {
        node.name
        for room in ROOMS
        for path in (root / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
        if any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    }


def chosen_tests() -> list[str]:
    return [test for tests in (CHOSEN | OF_RANKS).values() for test in tests]
