"""vLLM's runner with drafts of its own without Triton: kernels written again, beside those of
``sampler_twins.py``. SiPipe's own kernels for CPUs know of no drafts in the runner
(:mod:`sipipe.worker.cpu_kernels`), since there its samplers verify them.
"""

import os

import numpy as np
import torch
from sampler_twins import Twins, apply_penalties  # noqa: F401 - a worker's extension
from vllm.v1.worker.gpu import input_batch, structured_outputs
from vllm.v1.worker.gpu.sample import penalties

from sipipe.worker.cpu_kernels.launch import Launch

if "SLOW_PART" in os.environ:
    import slow_twins  # noqa: F401


class Stays(Launch):
    """A twin that SiPipe does not replace: it takes it for one of its own."""

    def __init__(self, function):
        self._function = function

    def _launch(self, grid, *arguments, **named):
        self._function(grid, *arguments, **named)


def stays(module, kernel):
    def replace(function):
        assert hasattr(module, kernel), f"vLLM has no {module.__name__}.{kernel}"
        setattr(module, kernel, Stays(function))
        return function

    return replace


@stays(input_batch, "_expand_idx_mapping_kernel")
def expand(grid, index, rows, places, first_logits, **_):
    for batch in range(grid[0]):
        first, last = first_logits[batch : batch + 2].tolist()
        rows[first:last] = index[batch]
        places[first:last] = torch.arange(last - first)


@stays(input_batch, "_combine_sampled_and_draft_tokens_kernel")
def combine(
    grid,
    input_ids,
    index,
    last_sampled,
    starts,
    seq_lens,
    prefill_lens,
    drafts,
    drafts_stride,
    first_logits,
    logits_indices,
    **_,
):
    for batch in range(grid[0]):
        row = int(index[batch])
        first, last = first_logits[batch : batch + 2].tolist()
        end = int(starts[batch + 1])
        begin = end - (last - first)
        logits_indices[first:last] = torch.arange(begin, end)
        if seq_lens[batch] <= prefill_lens[row]:
            continue
        if seq_lens[batch] - (last - first) >= prefill_lens[row]:
            input_ids[begin] = last_sampled.reshape(-1)[row]
        input_ids[begin + 1 : end] = drafts[row, : end - begin - 1]


@stays(input_batch, "_post_update_kernel")
def post_update(
    grid,
    index,
    computed,
    last_sampled,
    counts,
    counts_stride,
    sampled,
    sampled_stride,
    num_sampled,
    num_rejected,
    starts,
    all_tokens,
    all_tokens_stride,
    total_lens,
    *_,
    **__,
):
    for batch in range(grid[0]):
        row = int(index[batch])
        if row < 0:
            continue
        for token in sampled[batch, : int(num_sampled[batch])].tolist():
            last_sampled.reshape(-1)[row] = token
            all_tokens[row, int(total_lens[row])] = token
            total_lens[row] += 1
            if counts is not None:
                counts[row, token] += 1
        length = 0 if starts is None else int(starts[batch + 1] - starts[batch])
        computed[row] += length - int(num_rejected[batch])


@stays(structured_outputs, "_apply_grammar_bitmask_kernel")
def apply_grammar_bitmask(
    grid,
    logits,
    logits_stride,
    places,
    first_logits,
    bitmask,
    bitmask_stride,
    vocab,
    *,
    MASK_STRIDE,
    **_,
):
    for mask in range(grid[0]):
        request, place = divmod(int(places[mask]), MASK_STRIDE)
        row = int(first_logits[request]) + place
        if row < first_logits[request + 1]:
            words = np.ascontiguousarray(bitmask[mask].numpy()).view(np.uint8)
            allowed = np.unpackbits(words, bitorder="little")[:vocab].astype(bool)
            logits[row, torch.from_numpy(~allowed)] = -torch.inf


def apply_penalties_behind_drafts(
    logits, index, ids, places, repetition, frequency, presence, prompt, output
):
    """Each row counts the drafts before it as drawn."""
    for row, place in enumerate(places.tolist()):
        counts = output[index[row : row + 1]].clone()
        for draft in ids[row - place + 1 : row + 1].tolist():
            counts[0, draft] += 1
        every = (penalty[index[row : row + 1]] for penalty in (repetition, frequency, presence))
        zero = torch.zeros(1, dtype=torch.int64)
        apply_penalties(
            logits[row : row + 1], zero, None, None, *every, prompt[index[row : row + 1]], counts
        )


penalties.apply_penalties = apply_penalties_behind_drafts
