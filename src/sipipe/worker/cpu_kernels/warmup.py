"""Compiles the kernels at start-up, so that no request waits for it."""

import numpy as np

from sipipe.jit import compiling
from sipipe.worker.cpu_kernels import inputs, states


def warm_up() -> None:
    """Compile or load every kernel for the types that vLLM launches it with, on batches of nobody."""
    row, place = np.zeros(1, np.int64), np.zeros(1, np.int32)
    starts, table, long = np.zeros(2, np.int32), np.zeros((1, 4), np.int32), np.zeros((1, 1), int)
    addresses, width, flag = np.array([table.ctypes.data], np.uint64), row + 4, row == 0
    none, one = (0,), (0, 1)
    with compiling("sipipe.worker.cpu_kernels"):
        nothing = (place[:0], place, place, place)
        states.write_rows(place, 1, *nothing)
        states.write_groups(addresses, width, *nothing, place)
        gather = (row, addresses, addresses, width, table, 1)
        inputs.gather_block_tables(one, *gather)
        inputs.gather_block_tables(one, *gather, place, place, place, False)
        inputs.compute_slot_mappings(
            one, 1, row, starts, row, addresses, width, place, flag, long, -1
        )
        inputs.prepare_prefill_inputs(none, place, table, 1, row, starts, table, place, place)
        inputs.prepare_pos_seq_lens((1,), row, place, row, starts, place, 1)
        inputs.combine_sampled_and_draft_tokens(
            none, place, row, long, starts, place, place, starts, row
        )
        rows = (table, place)
        states.post_update(none, row, place, long, None, long, place, place, starts, *rows)
        states.post_update(none, row, place, long, None, long, place, place, None, *rows)
        states.post_update_num_computed_tokens(none, row, place, starts)
        inputs.prepare_rope_positions(none, long, table, place, row, starts, place, place, 3)
        states.fill_num_accepted(none, row, place, 1)
        states.scatter_num_accepted(none, row, place, place)
        states.zero_kv_blocks(addresses, width, width, row[:0])
        inputs.prompt_logprobs_token_ids(none, row, starts, row, place, table)
        states.preprocess_mamba_align(row, place, place, starts, place, place, place, 0, 1)
        found = (width, width, place, width, place, place, place, width)
        states.precopy_mamba_align(place, place, row, 1, *found, row, 0)
