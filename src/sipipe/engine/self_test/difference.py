"""Distance of the stages' answers from those of one stage, and the part that rounding explains.

The measure of one token is ``|a - b| / |b|``, a and b being the scores of the vocabulary about their
mean: 0 for equal ones, about 1.4 for scores that have nothing to do with each other.

A microbatch of stages has other shapes than one stage has, so products are rounded otherwise, and
a compiled model rounds otherwise than one that is not. What a stage misses is missed at every token;
rounding that flips an expert, or a token, is not. So the median counts, of tokens that follow a
prompt and of later ones apart: the latter are what the KV cache decides.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sipipe.engine.self_test.prompts import Answers, Position

BOUNDS = {"float32": 0.01}
"""Largest difference that is taken for rounding, by the dtype of activations.

Measured with random models of 4 to 8 layers at pp 2, float32: 5e-8 to 1.4e-7. So 0.01 leaves room for
a hundred layers and other processors.
"""
OTHERS = 0.2
"""The same for dtypes with fewer digits.

Measured likewise in bfloat16: below 1e-7 uncompiled, where both round alike, and 0.9 to 1.1 % with the
stages compiled and the process not. Rounding grows with the square root of the layers at least: twenty
times as many, five times as much.
"""


def bound(dtype: str) -> float:
    """Largest difference that rounding explains, for activations of ``dtype``."""
    return BOUNDS.get(dtype, OTHERS)


def difference(stages: Answers, alone: Answers) -> float:
    """Difference of two models' answers to the same prompts: 0 for equal ones.

    Tokens of an answer are compared as long as those before them are the same.
    """
    first: list[float] = []
    later: list[float] = []
    for ours, theirs in zip(stages, alone, strict=True):
        for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            (later if index else first).append(_distance(a, b))
            if a.token != b.token:
                break
    return max(_median(first), _median(later))


def _median(distances: Sequence[float]) -> float:
    return statistics.median(distances) if distances else 0.0


def _distance(a: Position, b: Position) -> float:
    known = np.isfinite(a.scores) & np.isfinite(b.scores)
    if not known.any():
        return float("inf")
    ours = _centred(a, known)
    theirs = _centred(b, known)
    length = float(np.linalg.norm(theirs))
    apart = float(np.linalg.norm(ours - theirs))
    return apart / length if length else apart


def _centred(position: Position, known: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    scores: npt.NDArray[np.float64] = position.scores[known].astype(np.float64)
    centred: npt.NDArray[np.float64] = scores - scores.mean()
    return centred
