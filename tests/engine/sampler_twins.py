"""vLLM's sampler of its second runner without Triton: its kernels written again with NumPy.

Given to an engine as ``worker_extension_cls``, which vLLM imports in each worker before it makes
the worker, where a test has vLLM draw tokens on a CPU. The other kernels of that runner are
SiPipe's own (:mod:`sipipe.worker.cpu_kernels`). A twin takes what its kernel takes and does what it
does, program after program.
"""

from functools import partial

import numpy as np
import torch
from vllm.v1.worker.gpu import input_batch
from vllm.v1.worker.gpu.sample import gumbel, penalties, states


class Twins:
    """Mixed into the worker's class, to which it adds nothing."""


class Twin:
    def __init__(self, function):
        self._function = function

    def __getitem__(self, grid):
        return partial(self._function, grid)


def twin_of(module, kernel):
    def replace(function):
        assert hasattr(module, kernel), f"vLLM has no {module.__name__}.{kernel}"
        setattr(module, kernel, Twin(function))
        return function

    return replace


@twin_of(input_batch, "_get_num_sampled_and_rejected_kernel")
def get_num_sampled_and_rejected(grid, sampled, rejected, seq_lens, first_logits, index, prefill):
    for batch in range(grid[0]):
        chunk = int(seq_lens[batch]) < int(prefill[int(index[batch])])
        sampled[batch] = 0 if chunk else sampled[batch]
        logits = first_logits[batch + 1] - first_logits[batch]
        rejected[batch] = 0 if chunk else logits - sampled[batch]


def murmur3(seed, position, tokens):
    """uint32 for each of ``tokens``, of (seed, position, token): MurmurHash3 of four words."""

    def rotated(value, by):
        return (value << np.uint32(by)) | (value >> np.uint32(32 - by))

    found = np.zeros(len(tokens), np.uint32)
    for word in (seed, seed >> 32, position, tokens):
        word = np.atleast_1d(word & 0xFFFFFFFF).astype(np.uint32) * np.uint32(0xCC9E2D51)
        found = rotated(found ^ (rotated(word, 15) * np.uint32(0x1B873593)), 13)
        found = found * np.uint32(5) + np.uint32(0xE6546B64)
    found ^= np.uint32(16)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        found = (found ^ (found >> np.uint32(shift))) * np.uint32(factor)
    return found


@twin_of(gumbel, "_gumbel_sample_kernel")
def gumbel_sample(
    grid,
    tokens,
    tokens_stride,
    values,
    values_stride,
    _cache,
    _cache_stride,
    _cache_column_stride,
    _cache_column,
    _cache_source,
    _cache_source_stride,
    logits,
    logits_stride,
    index,
    seeds,
    positions,
    temperatures,
    vocab,
    *,
    BLOCK_SIZE,
    IS_DRAFTING,
    APPLY_TEMPERATURE,
    USE_FP64,
    PER_TOKEN_COL,
):
    assert (IS_DRAFTING, USE_FP64, PER_TOKEN_COL) == (False, False, False)
    for row in range(grid[0]):
        request = int(index[row])
        scores, temperature = logits[row, :vocab].float().numpy(), float(temperatures[request])
        if temperature and APPLY_TEMPERATURE:
            scores = scores / np.float32(temperature)
        if temperature:
            drawn = murmur3(int(seeds[request]), int(positions[row]), np.arange(vocab))
            uniform = ((drawn.astype(np.float64) + 0.5) * 2.0**-32).astype(np.float32)
            scores = scores - np.log(-np.log1p(-np.minimum(uniform, 1 - 2.0**-24)))
        for block in range(grid[1]):
            here = scores[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE]
            tokens[row, block] = block * BLOCK_SIZE + int(here.argmax())
            values[row, block] = float(here.max())


def apply_temperature(logits, index, temperature):
    asked = temperature[index].unsqueeze(1)
    logits.div_(torch.where(asked == 0, 1.0, asked))


def apply_min_p(logits, index, min_p):
    least = logits.max(-1, keepdim=True).values + min_p[index].unsqueeze(1).log()
    logits.masked_fill_(logits < least, -torch.inf)


def count_tokens(index, all_tokens, prompt_len, prefill_len, in_prompt, in_output, longest):
    """Which tokens a prompt has, as bits, and how often an output has each."""
    for row in index.tolist():
        prompt = all_tokens[row, : prompt_len[row]].numpy()
        bits = np.zeros(in_prompt.shape[1] * 32, bool)
        bits[prompt] = True
        in_prompt[row] = torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))
        output = all_tokens[row, prompt_len[row] : prefill_len[row]]
        in_output[row] = torch.bincount(output, minlength=in_output.shape[1])


def apply_penalties(logits, index, _ids, _at, repetition, frequency, presence, prompt, output):
    counts = output[index]
    words = np.ascontiguousarray(prompt[index].numpy()).view(np.uint8)
    bits = np.unpackbits(words, axis=1, bitorder="little")[:, : logits.shape[1]]
    seen = torch.from_numpy(bits).bool() | (counts > 0)
    scale = torch.where(seen, repetition[index].unsqueeze(1), 1.0)
    logits.copy_(torch.where(logits > 0, logits / scale, logits * scale))
    logits -= frequency[index].unsqueeze(1) * counts
    logits -= presence[index].unsqueeze(1) * (counts > 0)


states.apply_temperature, states.apply_min_p = apply_temperature, apply_min_p
penalties.bincount, penalties.apply_penalties = count_tokens, apply_penalties
