"""Operations on one block of 256 consecutive logits, in vector code.

Each takes the row's array and an element offset, reads float32, bfloat16 (as uint16 bits) or
float16 (as int16 bits) without a widened copy, and neither allocates nor checks bounds: callers
pass whole blocks only.
"""

# ruff: noqa: ARG001 - an intrinsic names its arguments for its signature; its body uses `arguments`
from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.extending import intrinsic

from sipipe.sampling import _vector as vec

_ACCUMULATORS = 4  # independent chains, so that latency does not bound a pass


def _offset(builder: Any, start: Any, vector: int) -> Any:
    return builder.add(start, ir.Constant(vec.I64, vector * vec.LANES))


def _fold(parts: list[Any], operation: Any) -> Any:
    while len(parts) > 1:
        parts = [operation(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _maxima(context: Any, builder: Any, signature: Any, vectors: Any) -> Any:
    """The tuple (maximum, whether any is NaN) over ``vectors``, an iterable of values."""
    best: list[Any] = []
    bad: list[Any] = []
    for index, value in enumerate(vectors):
        nan = builder.fcmp_unordered("uno", value, value)
        if index < _ACCUMULATORS:
            best.append(value)
            bad.append(nan)
        else:
            lane = index % _ACCUMULATORS
            best[lane] = vec.maximum(builder, value, best[lane])
            bad[lane] = builder.or_(bad[lane], nan)
    top = _fold(best, lambda a, b: vec.maximum(builder, a, b))
    nan = _fold(bad, builder.or_)
    return context.make_tuple(
        builder,
        signature.return_type,
        [vec.reduce_maximum(builder, top), vec.any_lane(builder, nan)],
    )


@intrinsic
def element(_: Any, x: Any, index: Any) -> Any:
    """``x[index]`` as float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]
        pointer = vec.data_pointer(context, builder, kind, arguments[0])
        value = builder.load(builder.gep(pointer, [arguments[1]]))
        return vec.widen(builder, value, kind.dtype, 1)

    return types.float32(x, types.intp), generate


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
def block_max(_: Any, x: Any, start: Any) -> Any:
    """(maximum, any NaN) of ``x[start : start + 256]``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]
        pointer = vec.data_pointer(context, builder, kind, arguments[0])
        vectors = (
            vec.load_vector(builder, pointer, _offset(builder, arguments[1], v), kind.dtype)
            for v in range(vec.VECTORS)
        )
        return _maxima(context, builder, signature, vectors)

    return types.Tuple((types.float32, types.boolean))(x, types.intp), generate


@intrinsic
def block_copy(_: Any, x: Any, start: Any, y: Any, target: Any) -> Any:
    """Widen ``x[start : start + 256]`` into float32 ``y[target:]``; (maximum, any NaN)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]
        source = vec.data_pointer(context, builder, kind, arguments[0])
        sink = vec.data_pointer(context, builder, signature.args[2], arguments[2])

        def vectors() -> Any:
            for v in range(vec.VECTORS):
                value = vec.load_vector(
                    builder, source, _offset(builder, arguments[1], v), kind.dtype
                )
                vec.store_vector(builder, value, sink, _offset(builder, arguments[3], v))
                yield value

        return _maxima(context, builder, signature, vectors())

    returned = types.Tuple((types.float32, types.boolean))
    return returned(x, types.intp, y, types.intp), generate


@intrinsic
def block_mask(_: Any, y: Any, start: Any, words: Any, first: Any) -> Any:
    """Set ``y[start + i]`` to -inf where bit i of ``words[first : first + 8]`` (int32) is 0.

    Returns (maximum, any NaN) of what is left.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sink = vec.data_pointer(context, builder, signature.args[0], arguments[0])
        mask = vec.data_pointer(context, builder, signature.args[2], arguments[2])
        halves = builder.bitcast(
            builder.gep(mask, [arguments[3]]), ir.IntType(vec.LANES).as_pointer()
        )
        nothing = vec.constant(vec.VF, float("-inf"))

        def vectors() -> Any:
            for v in range(vec.VECTORS):
                bits = builder.load(builder.gep(halves, [ir.Constant(vec.I64, v)]))
                bits.align = 2
                where = _offset(builder, arguments[1], v)
                value = vec.load_vector(builder, sink, where, types.float32)
                value = builder.select(builder.bitcast(bits, vec.VB), value, nothing)
                vec.store_vector(builder, value, sink, where)
                yield value

        return _maxima(context, builder, signature, vectors())

    returned = types.Tuple((types.float32, types.boolean))
    return returned(y, types.intp, words, types.intp), generate


def _exponentials(
    context: Any, builder: Any, signature: Any, arguments: Any, sink: Any | None
) -> Any:
    kind = signature.args[0]
    pointer = vec.data_pointer(context, builder, kind, arguments[0])
    reference = vec.splat(builder, arguments[2], vec.VF)
    scale = vec.splat(builder, arguments[3], vec.VF)
    sums: list[Any] = []
    for v in range(vec.VECTORS):
        where = _offset(builder, arguments[1], v)
        value = vec.load_vector(builder, pointer, where, kind.dtype)
        power = builder.fmul(builder.fsub(value, reference), scale)
        weight = vec.exp2(builder, power)
        if sink is not None:
            vec.store_vector(builder, weight, sink, where)
        if v < _ACCUMULATORS:
            sums.append(weight)
        else:
            sums[v % _ACCUMULATORS] = builder.fadd(sums[v % _ACCUMULATORS], weight)
    return vec.reduce_sum(builder, _fold(sums, builder.fadd))


@intrinsic
def block_exp_sum(_: Any, x: Any, start: Any, reference: Any, scale: Any) -> Any:
    """Sum of ``2 ** ((x - reference) * scale)`` over ``x[start : start + 256]``, float32.

    ``reference`` must be no smaller than any of them.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _exponentials(context, builder, signature, arguments, None)

    return types.float32(x, types.intp, types.float32, types.float32), generate


@intrinsic
def block_exp(_: Any, x: Any, start: Any, reference: Any, scale: Any, y: Any) -> Any:
    """Like `block_exp_sum`, and the terms themselves into ``y`` at the same offsets."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sink = vec.data_pointer(context, builder, signature.args[4], arguments[4])
        return _exponentials(context, builder, signature, arguments, sink)

    return types.float32(x, types.intp, types.float32, types.float32, y), generate


@intrinsic
def block_gather(
    _: Any, x: Any, start: Any, first: Any, threshold: Any, ids: Any, values: Any, count: Any
) -> Any:
    """Append the logits >= ``threshold`` of a block to ``values`` and their ids to ``ids``.

    ``first`` is the token id of ``x[start]``, ``count`` how many are there already; returns the
    new count. Both arrays need room for 16 more than they end up holding.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]
        source = vec.data_pointer(context, builder, kind, arguments[0])
        threshold = vec.splat(builder, arguments[3], vec.VF)
        ids = vec.data_pointer(context, builder, signature.args[4], arguments[4])
        values = vec.data_pointer(context, builder, signature.args[5], arguments[5])
        count = arguments[6]
        base = vec.splat(builder, builder.trunc(arguments[2], vec.I32), vec.VI)
        base = builder.add(base, ir.Constant(vec.VI, list(range(vec.LANES))))
        for v in range(vec.VECTORS):
            value = vec.load_vector(builder, source, _offset(builder, arguments[1], v), kind.dtype)
            mask = builder.fcmp_ordered(">=", value, threshold)
            vec.compress(builder, value, mask, values, count)
            names = builder.add(base, vec.constant(vec.VI, v * vec.LANES))
            vec.compress(builder, names, mask, ids, count)
            count = builder.add(count, vec.count_lanes(builder, mask))
        return count

    signature = types.intp(x, types.intp, types.intp, types.float32, ids, values, types.intp)
    return signature, generate


@intrinsic
def block_count(_: Any, x: Any, start: Any, shift: Any, offset: Any, threshold: Any) -> Any:
    """How many of ``(x - shift) - offset``, in float32, are >= ``threshold`` in a block."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]
        pointer = vec.data_pointer(context, builder, kind, arguments[0])
        shift = vec.splat(builder, arguments[2], vec.VF)
        offset = vec.splat(builder, arguments[3], vec.VF)
        threshold = vec.splat(builder, arguments[4], vec.VF)
        total = ir.Constant(vec.I64, 0)
        for v in range(vec.VECTORS):
            value = vec.load_vector(builder, pointer, _offset(builder, arguments[1], v), kind.dtype)
            value = builder.fsub(builder.fsub(value, shift), offset)
            mask = builder.fcmp_ordered(">=", value, threshold)
            total = builder.add(total, vec.count_lanes(builder, mask))
        return total

    signature = types.intp(x, types.intp, types.float32, types.float32, types.float32)
    return signature, generate
