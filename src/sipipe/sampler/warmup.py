"""Compile every kernel before the first request, or load it from the on-disk cache."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from sipipe.jit import compiling
from sipipe.messages.params import SequenceParams
from sipipe.sampler.state import SequenceColumns

DTYPES = ("float32", "bfloat16", "float16")

_VOCAB = 300


def warm_up(dtypes: Iterable[str] = DTYPES) -> None:
    """Compile for these logits dtypes: of several processes one compiles, the others load."""
    line = np.linspace(-4.0, 4.0, _VOCAB, dtype=np.float32).reshape(1, -1)
    rows = [converted(line, dtype) for dtype in dtypes]
    with compiling("sipipe.sampler.kernels"):
        columns = SequenceColumns(_VOCAB)
        params = SequenceParams(repetition_penalty=1.1, logprobs=1, top_k=5, seed=1)
        columns.join(0, params, [1, 2, 3], [4])
        for token in range(5, 60):  # more than its table has room for
            columns.append([0], [token])
        for row in rows:
            [token] = columns.sample([0], row).token_ids
            behind_a_draft = np.array([-1, token], np.int32)
            columns.prepare([0, 0], [0, 0], follows=behind_a_draft)(row)


def converted(logits: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    """``logits`` as a model of ``dtype`` gives them; bfloat16 as its bits."""
    if dtype not in DTYPES:
        raise ValueError(f"dtypes must be among {', '.join(DTYPES)}, got {dtype!r}")
    if dtype == "bfloat16":
        return (logits.view(np.uint32) >> 16).astype(np.uint16)
    return logits.astype(dtype)
