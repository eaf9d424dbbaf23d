"""Start of a sampler: compile its kernels, or load them from the on-disk cache.

Where the engine asks (``"cpu_sampling": "auto"``) it also measures how long drawing takes here.
"""

import statistics
import time
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from sipipe.jit import compiling
from sipipe.messages.measured import MIXES, TIMES
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


def measure(rows: int, vocabulary: int, dtype: str) -> dict[str, float]:
    """Seconds to draw a token for each of ``rows`` sequences, for each of :data:`MIXES`."""
    columns = SequenceColumns(vocabulary)
    handles = list(range(rows))
    rng = np.random.default_rng(0)
    # A few rows and copies of them: what counts is that they are read from memory.
    few_rows = rng.standard_normal((min(rows, 8), vocabulary), dtype=np.float32) * 4
    logits = np.resize(converted(few_rows, dtype), (rows, vocabulary))
    seen = rng.integers(0, vocabulary, 256, dtype=np.int32)
    seconds = {}
    for mix, params in MIXES.items():
        times = []
        for handle in handles:
            drawn_by = msgspec.convert(params | {"seed": handle}, SequenceParams)
            columns.join(handle, drawn_by, seen[:128], seen[128:])
        for _ in range(1 + TIMES):
            began = time.monotonic()
            columns.sample(handles, logits)
            times.append(time.monotonic() - began)
        seconds[mix] = statistics.median(times[1:])
        for handle in handles:
            columns.discard(handle)
    return seconds
