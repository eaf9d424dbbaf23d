"""Compile every kernel before the first request, or load it from the on-disk cache."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from sipipe.jit import compiling
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
    rows = [_logits(dtype) for dtype in dtypes]
    with compiling("sipipe.sampler.kernels"):
        columns = SequenceColumns(_VOCAB)
        params = SequenceParams(repetition_penalty=1.1, logprobs=1, top_k=5, seed=1)
        columns.join(0, params, [1, 2, 3], [4] * 100)
        columns.append([0], [5])
        for row in rows:
            for layout in layouts:
                columns.sample([0], row if layout == "rows" else row.reshape(-1, 1), layout=layout)


def _logits(dtype: str) -> npt.NDArray[np.generic]:
    if dtype not in DTYPES:
        raise ValueError(f"dtypes must be among {', '.join(DTYPES)}, got {dtype!r}")
    row = np.linspace(-4.0, 4.0, _VOCAB, dtype=np.float32).reshape(1, -1)
    if dtype == "bfloat16":
        return (row.view(np.uint32) >> 16).astype(np.uint16)
    return row.astype(dtype)
