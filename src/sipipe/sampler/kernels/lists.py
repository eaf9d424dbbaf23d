"""Operations on 256 consecutive entries of float32 work lists (candidates, edits), in vector code.

Lists are padded to whole blocks by whoever fills them. Nothing allocates or checks bounds.
"""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types

from sipipe.sampler.kernels import _vector as vec
from sipipe.sampler.kernels._vector import ARRAY, operation
from sipipe.sampler.kernels.blocks import Sums, consecutive, offset_of, vectors_of

_REAL = types.float32
_INT = types.intp


@operation(types.Tuple((_REAL, types.int64)), ARRAY, ARRAY, _INT, _REAL)
def list_mass(
    builder: Any, kind: Any, values: Any, weights: Any, start: Any, threshold: Any
) -> Any:
    """(sum of ``weights``, how many) where ``values`` >= ``threshold``."""
    threshold = vec.splat(builder, threshold, vec.VF)
    zero = vec.constant(vec.VF, 0.0)
    sums = Sums(builder)
    count = ir.Constant(vec.I64, 0)
    for value, weight in zip(
        vectors_of(builder, values, start, kind),
        vectors_of(builder, weights, start, kind),
        strict=True,
    ):
        reaches = builder.fcmp_ordered(">=", value, threshold)
        count = builder.add(count, vec.count_lanes(builder, reaches))
        sums.add(builder.select(reaches, weight, zero))
    return vec.struct_of(builder, sums.total(), count)


@operation(_INT, ARRAY, _INT, _REAL, _REAL, ARRAY, _INT)
def list_between(
    builder: Any, kind: Any, values: Any, start: Any, low: Any, high: Any, found: Any, count: Any
) -> Any:
    """Append to int32 ``found[count:]`` the positions of ``values`` in [low, high); the new count.
    ``found`` needs room for 16 more than it ends up holding."""
    low, high = vec.splat(builder, low, vec.VF), vec.splat(builder, high, vec.VF)
    base = consecutive(builder, start)
    for v, value in enumerate(vectors_of(builder, values, start, kind)):
        above = builder.fcmp_ordered(">=", value, low)
        inside = builder.and_(above, builder.fcmp_ordered("<", value, high))
        positions = builder.add(base, vec.constant(vec.VI, v * vec.LANES))
        vec.compress(builder, positions, inside, found, count)
        count = builder.add(count, vec.count_lanes(builder, inside))
    return count


@operation(_INT, ARRAY, _INT, ARRAY, _INT, _REAL, _REAL, _REAL, _REAL)
def list_penalize(
    builder: Any, kind: Any, values: Any, start: Any, counts: Any, first: Any,
    repetition: Any, inverse: Any, frequency: Any, presence: Any,
) -> Any:  # fmt: skip
    """Penalize ``values[start:]`` in place; ``counts[first:]``: occurrences in the output. Rounded
    as vLLM's CPU code does: after the product with the repetition penalty (its ``inverse`` for
    positive logits), after frequency * count, and after each subtraction."""
    repetition, inverse, frequency, presence = (
        vec.splat(builder, scalar, vec.VF) for scalar in (repetition, inverse, frequency, presence)
    )
    zero = vec.constant(vec.VF, 0.0)
    none = vec.constant(vec.VI, 0)
    for v, logit in enumerate(vectors_of(builder, values, start, kind)):
        positive = builder.fcmp_ordered(">", logit, zero)
        value = builder.fmul(logit, builder.select(positive, inverse, repetition))
        at = builder.gep(counts, [offset_of(builder, first, v)])
        seen = builder.load(builder.bitcast(at, vec.VI.as_pointer()))
        seen.align = 4
        times = builder.fmul(frequency, builder.sitofp(seen, vec.VF))
        less = builder.fsub(builder.fsub(value, times), presence)
        result = builder.select(builder.icmp_signed(">", seen, none), less, value)
        vec.store_vector(builder, result, values, offset_of(builder, start, v))
    return ir.Constant(vec.I64, 0)
