"""CPU sampling with vLLM's semantics (the paper's first technique, by rows in place of columns).

`sample` and `sample_with_logprobs` keep nothing; `SequenceColumns` keeps a sampler's sequences from
iteration to iteration. No vLLM and no torch is needed.
"""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from sipipe.messages.cost import cost_estimate
from sipipe.messages.params import LogprobsMode, SequenceParams, derive_seed
from sipipe.sampler.kernels.state import Work, make_work
from sipipe.sampler.result import Logprobs, SampleResult
from sipipe.sampler.state import SequenceColumns
from sipipe.sampler.warmup import warm_up

__all__ = [
    "Logprobs",
    "SampleResult",
    "SequenceColumns",
    "SequenceParams",
    "cost_estimate",
    "derive_seed",
    "sample",
    "sample_with_logprobs",
    "warm_up",
]

Tokens = Sequence[Sequence[int] | npt.NDArray[np.integer[Any]]]

_thread = threading.local()


def _work(vocab_size: int) -> Work:
    """This thread's work memory, kept from call to call while the vocabulary stays the same."""
    if getattr(_thread, "vocab_size", None) != vocab_size:
        _thread.work = make_work(vocab_size)
        _thread.vocab_size = vocab_size
    work: Work = _thread.work
    return work


def as_array(logits: Any) -> npt.NDArray[Any]:
    """NumPy's view of an array or a torch CPU tensor; bfloat16 as its bits in uint16."""
    if isinstance(logits, np.ndarray):
        return logits
    if not hasattr(logits, "detach"):
        raise TypeError(f"logits must be a NumPy array or a torch CPU tensor, not {type(logits)}")
    tensor = logits.detach()
    if half := str(tensor.dtype) == "torch.bfloat16":  # which NumPy lacks
        import torch

        tensor = tensor.view(torch.int16)
    array: npt.NDArray[Any] = tensor.numpy()
    return array.view(np.uint16) if half else array


def _of_each(params: SequenceParams, batch: int) -> list[SequenceParams]:
    """``params`` for each of ``batch`` sequences, with random numbers of its own."""
    if params.seed is None or params.greedy:
        return [params] * batch
    seeds = (derive_seed(params.seed, str(row)) for row in range(1, batch))
    return [params, *(replace(params, seed=seed) for seed in seeds)][:batch]


def sample(
    logits: Any,
    params: SequenceParams | Sequence[SequenceParams],
    *,
    prompt_token_ids: Tokens | None = None,
    output_token_ids: Tokens | None = None,
    vocab_size: int | None = None,
) -> npt.NDArray[np.int32]:
    """Draw one token per sequence: int32 [B].

    ``logits``: [B, V], NumPy or torch CPU, float32, float16 or bfloat16 (uint16 bits in NumPy),
    left unchanged. ``params``: one per sequence, or one for all, of which sequence i > 0 draws with
    the seed ``derive_seed(seed, str(i))``. Without a seed each call draws anew. Token ids: a list or
    int array per sequence; the position of the draw is the number of
    its output tokens. ``vocab_size``: tokens beyond it are padding. Raises ValueError naming the
    first sequence whose logits hold NaN or +inf, or leave no token.
    """
    tokens, _ = sample_with_logprobs(
        logits,
        params,
        prompt_token_ids=prompt_token_ids,
        output_token_ids=output_token_ids,
        vocab_size=vocab_size,
    )
    return tokens


def sample_with_logprobs(
    logits: Any,
    params: SequenceParams | Sequence[SequenceParams],
    *,
    prompt_token_ids: Tokens | None = None,
    output_token_ids: Tokens | None = None,
    vocab_size: int | None = None,
    logprobs_mode: LogprobsMode = "raw_logprobs",
) -> tuple[npt.NDArray[np.int32], dict[int, Logprobs]]:
    """`sample`, and the logprobs that ``params`` ask for, by sequence."""
    if (array := as_array(logits)).ndim != 2:
        raise ValueError(f"logits must have 2 dimensions, got {array.ndim}")
    batch, width = array.shape
    every = _of_each(params, batch) if isinstance(params, SequenceParams) else list(params)
    prompts: Tokens = [()] * batch if prompt_token_ids is None else prompt_token_ids
    outputs: Tokens = [()] * batch if output_token_ids is None else output_token_ids
    names = ("params", "prompt_token_ids", "output_token_ids")
    for name, given in zip(names, (every, prompts, outputs), strict=True):
        if len(given) != batch:
            raise ValueError(f"{name}: {len(given)} for {batch} sequences")
    vocab = width if vocab_size is None else vocab_size
    work = _work(vocab) if vocab > 0 else None
    columns = SequenceColumns(vocab, logprobs_mode=logprobs_mode, work=work)
    for row in range(batch):
        columns.join(row, every[row], prompts[row], outputs[row])
    result = columns.sample(range(batch), array)
    if result.errors:
        row, problem = next(iter(result.errors.items()))
        raise ValueError(f"logits of sequence {row}: {problem}")
    return result.token_ids, result.logprobs
