"""How long drawing takes here, where the engine asks (``"cpu_sampling": "auto"``)."""

import statistics
import time

import numpy as np

from sipipe.messages.measured import MIXES, TIMES
from sipipe.messages.params import SequenceParams
from sipipe.sampler.state import SequenceColumns
from sipipe.sampler.warmup import converted


def measure(rows: int, vocabulary: int, dtype: str) -> dict[str, float]:
    """Seconds to draw a token for each of ``rows`` sequences, for each of :data:`MIXES`."""
    columns = SequenceColumns(vocabulary)
    handles = list(range(rows))
    rng = np.random.default_rng(0)
    # A few rows and copies of them: what counts is that they are read from memory.
    some = rng.standard_normal((min(rows, 8), vocabulary), dtype=np.float32) * 4
    logits = np.resize(converted(some, dtype), (rows, vocabulary))
    seen = rng.integers(0, vocabulary, 256, dtype=np.int32)
    found = {}
    for mix, params in MIXES.items():
        times = []
        for handle in handles:
            columns.join(handle, SequenceParams(**params, seed=handle), seen[:128], seen[128:])
        for _ in range(1 + TIMES):
            began = time.monotonic()
            columns.sample(handles, logits)
            times.append(time.monotonic() - began)
        found[mix] = statistics.median(times[1:])
        for handle in handles:
            columns.discard(handle)
    return found
