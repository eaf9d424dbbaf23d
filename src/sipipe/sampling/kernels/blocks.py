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

from sipipe.sampling.kernels import _vector as vec

_ACCUMULATORS = 4  # independent chains, so that latency does not bound a pass


def _offset(builder: Any, start: Any, vector: int) -> Any:
    return builder.add(start, ir.Constant(vec.I64, vector * vec.LANES))


def _vectors(builder: Any, source: Any, start: Any, element: Any) -> Any:
    """The 16 vectors of the block at ``source[start:]``, as float32, one after the other."""
    for v in range(vec.VECTORS):
        yield vec.load_vector(builder, source, _offset(builder, start, v), element)


def _fold(parts: list[Any], operation: Any) -> Any:
    while len(parts) > 1:
        parts = [operation(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _maxima(builder: Any, vectors: Any) -> Any:
    """The pair (maximum, whether any is NaN) over ``vectors``, an iterable of values."""
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
    pair = ir.Constant(vec.PEAK, ir.Undefined)
    pair = builder.insert_value(pair, vec.reduce_maximum(builder, top), 0)
    return builder.insert_value(pair, vec.any_lane(builder, nan), 1)


def _peak(context: Any, builder: Any, signature: Any, pair: Any) -> Any:
    parts = [builder.extract_value(pair, 0), builder.extract_value(pair, 1)]
    return context.make_tuple(builder, signature.return_type, parts)


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

        def body(inner: Any, source: Any, start: Any) -> Any:
            return _maxima(inner, _vectors(inner, source, start, kind.dtype))

        source = vec.data_pointer(context, builder, kind, arguments[0])
        pair = vec.outlined(
            builder, f"sipipe_max_{kind.dtype}", vec.PEAK, [source, arguments[1]], body
        )
        return _peak(context, builder, signature, pair)

    return types.Tuple((types.float32, types.boolean))(x, types.intp), generate


@intrinsic
def block_copy(_: Any, x: Any, start: Any, y: Any, target: Any) -> Any:
    """Widen ``x[start : start + 256]`` into float32 ``y[target:]``; (maximum, any NaN)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]

        def body(inner: Any, source: Any, start: Any, sink: Any, target: Any) -> Any:
            def vectors() -> Any:
                for v, value in enumerate(_vectors(inner, source, start, kind.dtype)):
                    vec.store_vector(inner, value, sink, _offset(inner, target, v))
                    yield value

            return _maxima(inner, vectors())

        source = vec.data_pointer(context, builder, kind, arguments[0])
        sink = vec.data_pointer(context, builder, signature.args[2], arguments[2])
        values = [source, arguments[1], sink, arguments[3]]
        pair = vec.outlined(builder, f"sipipe_copy_{kind.dtype}", vec.PEAK, values, body)
        return _peak(context, builder, signature, pair)

    returned = types.Tuple((types.float32, types.boolean))
    return returned(x, types.intp, y, types.intp), generate


@intrinsic
def block_mask(_: Any, y: Any, start: Any, words: Any, first: Any) -> Any:
    """Set ``y[start + i]`` to -inf where bit i of ``words[first : first + 8]`` (int32) is 0.

    Returns (maximum, any NaN) of what is left.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def body(inner: Any, sink: Any, start: Any, mask: Any, first: Any) -> Any:
            pointer = ir.IntType(vec.LANES).as_pointer()
            halves = inner.bitcast(inner.gep(mask, [first]), pointer)
            nothing = vec.constant(vec.VF, float("-inf"))

            def vectors() -> Any:
                for v, value in enumerate(_vectors(inner, sink, start, types.float32)):
                    bits = inner.load(inner.gep(halves, [ir.Constant(vec.I64, v)]))
                    bits.align = 2
                    kept = inner.select(inner.bitcast(bits, vec.VB), value, nothing)
                    vec.store_vector(inner, kept, sink, _offset(inner, start, v))
                    yield kept

            return _maxima(inner, vectors())

        sink = vec.data_pointer(context, builder, signature.args[0], arguments[0])
        mask = vec.data_pointer(context, builder, signature.args[2], arguments[2])
        values = [sink, arguments[1], mask, arguments[3]]
        pair = vec.outlined(builder, "sipipe_mask", vec.PEAK, values, body)
        return _peak(context, builder, signature, pair)

    returned = types.Tuple((types.float32, types.boolean))
    return returned(y, types.intp, words, types.intp), generate


def _exponentials(
    builder: Any, source: Any, start: Any, reference: Any, scale: Any, element: Any, sink: Any
) -> Any:
    reference = vec.splat(builder, reference, vec.VF)
    scale = vec.splat(builder, scale, vec.VF)
    sums: list[Any] = []
    for v, value in enumerate(_vectors(builder, source, start, element)):
        weight = vec.exp2(builder, builder.fmul(builder.fsub(value, reference), scale))
        if sink is not None:
            vec.store_vector(builder, weight, sink, _offset(builder, start, v))
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
        kind = signature.args[0]

        def body(inner: Any, source: Any, start: Any, reference: Any, scale: Any) -> Any:
            return _exponentials(inner, source, start, reference, scale, kind.dtype, None)

        source = vec.data_pointer(context, builder, kind, arguments[0])
        values = [source, *arguments[1:]]
        return vec.outlined(builder, f"sipipe_exp_sum_{kind.dtype}", vec.F32, values, body)

    return types.float32(x, types.intp, types.float32, types.float32), generate


@intrinsic
def block_exp(_: Any, x: Any, start: Any, reference: Any, scale: Any, y: Any) -> Any:
    """Like `block_exp_sum`, and the terms themselves into ``y`` at the same offsets."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]

        def body(inner: Any, source: Any, start: Any, reference: Any, scale: Any, sink: Any) -> Any:
            return _exponentials(inner, source, start, reference, scale, kind.dtype, sink)

        source = vec.data_pointer(context, builder, kind, arguments[0])
        sink = vec.data_pointer(context, builder, signature.args[4], arguments[4])
        values = [source, *arguments[1:4], sink]
        return vec.outlined(builder, f"sipipe_exp_{kind.dtype}", vec.F32, values, body)

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

        def body(
            inner: Any, source: Any, start: Any, first: Any, threshold: Any,
            ids: Any, values: Any, count: Any,
        ) -> Any:  # fmt: skip
            threshold = vec.splat(inner, threshold, vec.VF)
            base = vec.splat(inner, inner.trunc(first, vec.I32), vec.VI)
            base = inner.add(base, ir.Constant(vec.VI, list(range(vec.LANES))))
            for v, value in enumerate(_vectors(inner, source, start, kind.dtype)):
                mask = inner.fcmp_ordered(">=", value, threshold)
                vec.compress(inner, value, mask, values, count)
                names = inner.add(base, vec.constant(vec.VI, v * vec.LANES))
                vec.compress(inner, names, mask, ids, count)
                count = inner.add(count, vec.count_lanes(inner, mask))
            return count

        source = vec.data_pointer(context, builder, kind, arguments[0])
        ids = vec.data_pointer(context, builder, signature.args[4], arguments[4])
        values = vec.data_pointer(context, builder, signature.args[5], arguments[5])
        given = [source, *arguments[1:4], ids, values, arguments[6]]
        return vec.outlined(builder, f"sipipe_gather_{kind.dtype}", vec.I64, given, body)

    signature = types.intp(x, types.intp, types.intp, types.float32, ids, values, types.intp)
    return signature, generate


@intrinsic
def block_count(_: Any, x: Any, start: Any, shift: Any, offset: Any, threshold: Any) -> Any:
    """How many of ``(x - shift) - offset``, in float32, are >= ``threshold`` in a block."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]

        def body(
            inner: Any, source: Any, start: Any, shift: Any, offset: Any, threshold: Any
        ) -> Any:
            shift, offset, threshold = (
                vec.splat(inner, scalar, vec.VF) for scalar in (shift, offset, threshold)
            )
            total = ir.Constant(vec.I64, 0)
            for value in _vectors(inner, source, start, kind.dtype):
                score = inner.fsub(inner.fsub(value, shift), offset)
                mask = inner.fcmp_ordered(">=", score, threshold)
                total = inner.add(total, vec.count_lanes(inner, mask))
            return total

        source = vec.data_pointer(context, builder, kind, arguments[0])
        values = [source, *arguments[1:]]
        return vec.outlined(builder, f"sipipe_count_{kind.dtype}", vec.I64, values, body)

    signature = types.intp(x, types.intp, types.float32, types.float32, types.float32)
    return signature, generate


@intrinsic
def block_mass(_: Any, values: Any, weights: Any, start: Any, threshold: Any) -> Any:
    """(sum of ``weights``, how many) where float32 ``values`` >= ``threshold``, in a block."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pair = ir.LiteralStructType([vec.F32, vec.I64])

        def body(inner: Any, values: Any, weights: Any, start: Any, threshold: Any) -> Any:
            threshold = vec.splat(inner, threshold, vec.VF)
            zero = vec.constant(vec.VF, 0.0)
            sums: list[Any] = []
            count = ir.Constant(vec.I64, 0)
            each = zip(
                _vectors(inner, values, start, types.float32),
                _vectors(inner, weights, start, types.float32),
                strict=True,
            )
            for v, (value, weight) in enumerate(each):
                mask = inner.fcmp_ordered(">=", value, threshold)
                kept = inner.select(mask, weight, zero)
                count = inner.add(count, vec.count_lanes(inner, mask))
                if v < _ACCUMULATORS:
                    sums.append(kept)
                else:
                    sums[v % _ACCUMULATORS] = inner.fadd(sums[v % _ACCUMULATORS], kept)
            total = vec.reduce_sum(inner, _fold(sums, inner.fadd))
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
