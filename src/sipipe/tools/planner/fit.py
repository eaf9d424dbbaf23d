"""Fitting non-negative coefficients to measured times.

A time is modelled as a sum of a few terms with physical meaning (per call, per sequence, per
product, ...), each with a coefficient of zero or more, since no term can save time.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sipipe.errors import ResourceError

Array = npt.NDArray[np.float64]
Terms = dict[str, float]

_USUAL = 0.15
"""Relative deviation up to which a group counts in full; beyond, in proportion less."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """One phase's fitted terms and how well they predict what they were not fitted to."""

    phase: str
    coefficients: Terms
    """Seconds per unit of each term."""
    count: int
    """Records used."""
    dropped: int
    """Records left out as far outliers (first calls, compilation, preemption)."""
    mean_seconds: float
    median_error: float
    """Median relative error on the half of the records that was held out."""
    high_error: float
    """Its 90th percentile."""
    batch_range: tuple[float, float]
    tokens_range: tuple[float, float]

    def parts(self, terms: Terms) -> Terms:
        """The seconds that each of ``terms`` takes."""
        return {name: self.coefficients[name] * value for name, value in terms.items()}


def group_means(
    records: Sequence[tuple[float, ...]], seconds: Array
) -> tuple[Array, Array, Array, int]:
    """Mean time of the records that have the same terms.

    A record over three times its group's median is left out: a compilation, not a cost.

    Returns:
        The distinct keys as [keys, terms], their mean seconds, how many records each has, and how
        many were left out.
    """
    groups: dict[tuple[float, ...], list[float]] = {}
    for key, value in zip(records, seconds, strict=True):
        groups.setdefault(key, []).append(float(value))
    means, counts = [], []
    for values in groups.values():
        array = np.asarray(values)
        kept = array[array <= 3.0 * np.median(array)]
        means.append(kept.mean())
        counts.append(len(kept))
    dropped = len(seconds) - sum(counts)
    keys = np.asarray(list(groups))
    return keys, np.asarray(means), np.asarray(counts, dtype=np.float64), dropped


def fit_terms(matrix: Array, seconds: Array, weights: Array) -> Array:
    """Coefficients of 0 or more that minimize the weighted relative error.

    Args:
        matrix: [records, terms] value of each term, 0 or more.
        seconds: [records] measured times, above 0.
        weights: [records] how many observations each row stands for.

    Returns:
        [terms] coefficients; 0 for a term that is not needed.

    Raises:
        ResourceError: scipy is not installed.
    """
    try:
        from scipy.optimize import nnls
    except ImportError:
        raise ResourceError(
            "plan --calibrate fits with scipy, which is not installed: pip install 'sipipe[plan]'"
        ) from None
    scale = np.sqrt(weights)
    rows = matrix * (scale / seconds)[:, None]
    spread = rows.max(axis=0, initial=0.0)
    spread[spread == 0.0] = 1.0  # a term that no record has gets no coefficient
    found: Array = nnls(rows / spread, scale)[0] / spread
    return found


def fit_robustly(matrix: Array, seconds: Array, weights: Array) -> Array:
    """:func:`fit_terms`, repeated so that disturbed groups do not bend the fit.

    Two things are put right by reweighting. Relative to the *measured* value an overestimate costs
    more than an underestimate, which biases the fit low: errors are taken relative to the fitted
    value. And a group that is far off (something else ran just then) counts less, by Huber's rule.
    Arguments and result as :func:`fit_terms`.
    """
    coefficients = fit_terms(matrix, seconds, weights)
    for _ in range(10):
        fitted = np.maximum(matrix @ coefficients, 1e-3 * seconds)
        deviation = np.abs(seconds / fitted - 1.0)
        trust = _USUAL / np.maximum(deviation, _USUAL)
        new = fit_terms(matrix, seconds, weights * trust * (seconds / fitted) ** 2)
        if np.allclose(new, coefficients, rtol=1e-4, atol=0.0):
            break
        coefficients = new
    return coefficients
