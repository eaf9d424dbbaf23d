"""Compile every kernel before the first request, or load it from the on-disk cache; and measure
how long drawing takes, where the engine asks."""

import statistics
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from sipipe.jit import compiling
from sipipe.messages.boots import SamplerSettings
from sipipe.messages.measured import MIXES, TIMES
from sipipe.messages.params import SequenceParams
from sipipe.sampler.layout import Layout
from sipipe.sampler.state import SequenceColumns

DTYPES = ("float32", "bfloat16", "float16")
LAYOUTS: tuple[Layout, ...] = ("rows", "columns")

_VOCAB = 300


def warm_up(dtypes: Iterable[str] = DTYPES, layouts: Iterable[Layout] = LAYOUTS) -> None:
    """Compile for these logits dtypes and layouts.

    Several processes may call it at once: one compiles, the others wait and load. With a warm
    cache it takes a fraction of a second.
    """
    line = np.linspace(-4.0, 4.0, _VOCAB, dtype=np.float32).reshape(1, -1)
    rows = [_converted(line, dtype) for dtype in dtypes]
    with compiling("sipipe.sampler.kernels"):
        columns = SequenceColumns(_VOCAB)
        params = SequenceParams(repetition_penalty=1.1, logprobs=1, top_k=5, seed=1)
        columns.join(0, params, [1, 2, 3], [4] * 100)
        columns.append([0], [5])
        for row in rows:
            for layout in layouts:
                columns.sample([0], row if layout == "rows" else row.reshape(-1, 1), layout=layout)


def measure(rows: int, settings: SamplerSettings, dtype: str) -> dict[str, float]:
    """Seconds to draw a token for each of ``rows`` sequences, for each of :data:`MIXES`."""
    columns = SequenceColumns(settings.vocab_size)
    handles = list(range(rows))
    rng = np.random.default_rng(0)
    # A few rows and copies of them: what counts is that they are read from memory.
    some = rng.standard_normal((min(rows, 8), settings.vocab_size), dtype=np.float32) * 4
    logits = np.resize(_converted(some, dtype), (rows, settings.vocab_size))
    if settings.layout == "columns":
        logits = np.ascontiguousarray(logits.T)
    seen = rng.integers(0, settings.vocab_size, 256, dtype=np.int32)
    found = {}
    for mix, params in MIXES.items():
        times = []
        for handle in handles:
            columns.join(handle, SequenceParams(**params, seed=handle), seen[:128], seen[128:])
        for _ in range(1 + TIMES):
            began = time.monotonic()
            columns.sample(handles, logits, layout=settings.layout)
            times.append(time.monotonic() - began)
        found[mix] = statistics.median(times[1:])
        for handle in handles:
            columns.discard(handle)
    return found


def _converted(logits: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    if dtype not in DTYPES:
        raise ValueError(f"dtypes must be among {', '.join(DTYPES)}, got {dtype!r}")
    if dtype == "bfloat16":
        return (logits.view(np.uint32) >> 16).astype(np.uint16)
    return logits.astype(dtype)
