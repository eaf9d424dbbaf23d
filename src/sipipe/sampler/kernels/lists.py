"""Operations on 256 consecutive entries of float32 work lists (candidates, overlay), in vector code.

Lists are padded to whole blocks by whoever fills them. Nothing allocates or checks bounds.
"""

# ruff: noqa: ARG001 - an intrinsic names its arguments for its signature; its body uses `arguments`
from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.extending import intrinsic

from sipipe.sampler.kernels import _vector as vec
from sipipe.sampler.kernels.blocks import ACCUMULATORS, fold, offset_of, vectors_of


@intrinsic
def float_bits(_: Any, value: Any) -> Any:
    """The bits of a float32 as uint32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], vec.I32)

    return types.uint32(types.float32), generate


@intrinsic
def bits_float(_: Any, value: Any) -> Any:
    """The float32 with the bits of a uint32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def list_mass(_: Any, values: Any, weights: Any, start: Any, threshold: Any) -> Any:
    """(sum of ``weights``, how many) where ``values`` >= ``threshold``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pair = ir.LiteralStructType([vec.F32, vec.I64])

        def body(inner: Any, values: Any, weights: Any, start: Any, threshold: Any) -> Any:
            threshold = vec.splat(inner, threshold, vec.VF)
            zero = vec.constant(vec.VF, 0.0)
            sums: list[Any] = []
            count = ir.Constant(vec.I64, 0)
            each = zip(
                vectors_of(inner, values, start, types.float32),
                vectors_of(inner, weights, start, types.float32),
                strict=True,
            )
            for v, (value, weight) in enumerate(each):
                mask = inner.fcmp_ordered(">=", value, threshold)
                kept = inner.select(mask, weight, zero)
                count = inner.add(count, vec.count_lanes(inner, mask))
                if v < ACCUMULATORS:
                    sums.append(kept)
                else:
                    sums[v % ACCUMULATORS] = inner.fadd(sums[v % ACCUMULATORS], kept)
            total = vec.reduce_sum(inner, fold(sums, inner.fadd))
            found = inner.insert_value(ir.Constant(pair, ir.Undefined), total, 0)
            return inner.insert_value(found, count, 1)

        pointers = [
            vec.data_pointer(context, builder, signature.args[i], arguments[i]) for i in (0, 1)
        ]
        given = [*pointers, *arguments[2:]]
        found = vec.outlined(builder, "sipipe_mass", pair, given, body)
        parts = [builder.extract_value(found, 0), builder.extract_value(found, 1)]
        return context.make_tuple(builder, signature.return_type, parts)

    returned = types.Tuple((types.float32, types.int64))
    return returned(values, weights, types.intp, types.float32), generate


@intrinsic
def list_between(
    _: Any, values: Any, start: Any, low: Any, high: Any, found: Any, count: Any
) -> Any:
    """Append to int32 ``found[count:]`` the positions of ``values`` in [low, high); the new count.

    ``found`` needs room for 16 more than it ends up holding.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def body(
            inner: Any, values: Any, start: Any, low: Any, high: Any, found: Any, count: Any
        ) -> Any:
            low, high = vec.splat(inner, low, vec.VF), vec.splat(inner, high, vec.VF)
            base = vec.splat(inner, inner.trunc(start, vec.I32), vec.VI)
            base = inner.add(base, ir.Constant(vec.VI, list(range(vec.LANES))))
            for v, value in enumerate(vectors_of(inner, values, start, types.float32)):
                above = inner.fcmp_ordered(">=", value, low)
                mask = inner.and_(above, inner.fcmp_ordered("<", value, high))
                places = inner.add(base, vec.constant(vec.VI, v * vec.LANES))
                vec.compress(inner, places, mask, found, count)
                count = inner.add(count, vec.count_lanes(inner, mask))
            return count

        pointers = {
            i: vec.data_pointer(context, builder, signature.args[i], arguments[i]) for i in (0, 4)
        }
        given = [pointers.get(i, argument) for i, argument in enumerate(arguments)]
        return vec.outlined(builder, "sipipe_between", vec.I64, given, body)

    real = types.float32
    return types.intp(values, types.intp, real, real, found, types.intp), generate


@intrinsic
def list_penalize(
    _: Any, values: Any, start: Any, counts: Any, first: Any,
    repetition: Any, inverse: Any, frequency: Any, presence: Any,
) -> Any:  # fmt: skip
    """Penalize ``values[start:]`` in place; ``counts[first:]``: occurrences in the output.

    Rounded as vLLM's CPU code does: after the product with the repetition penalty (its ``inverse``
    for positive logits), after frequency * count, and after each subtraction.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def body(
            inner: Any, values: Any, start: Any, counts: Any, first: Any,
            repetition: Any, inverse: Any, frequency: Any, presence: Any,
        ) -> Any:  # fmt: skip
            repetition, inverse, frequency, presence = (
                vec.splat(inner, scalar, vec.VF)
                for scalar in (repetition, inverse, frequency, presence)
            )
            zero, none = vec.constant(vec.VF, 0.0), vec.constant(vec.VI, 0)
            for v, logit in enumerate(vectors_of(inner, values, start, types.float32)):
                positive = inner.fcmp_ordered(">", logit, zero)
                value = inner.fmul(logit, inner.select(positive, inverse, repetition))
                at = inner.gep(counts, [offset_of(inner, first, v)])
                seen = inner.load(inner.bitcast(at, vec.VI.as_pointer()))
                seen.align = 4
                times = inner.fmul(frequency, inner.sitofp(seen, vec.VF))
                less = inner.fsub(inner.fsub(value, times), presence)
                result = inner.select(inner.icmp_signed(">", seen, none), less, value)
                vec.store_vector(inner, result, values, offset_of(inner, start, v))
            return ir.Constant(vec.I64, 0)

        pointers = {
            i: vec.data_pointer(context, builder, signature.args[i], arguments[i]) for i in (0, 2)
        }
        given = [pointers.get(i, argument) for i, argument in enumerate(arguments)]
        return vec.outlined(builder, "sipipe_penalize", vec.I64, given, body)

    real = types.float32
    signature = types.intp(values, types.intp, counts, types.intp, real, real, real, real)
    return signature, generate
