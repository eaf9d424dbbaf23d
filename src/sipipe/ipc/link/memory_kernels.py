"""Copies into memory that two processes share, and the word that says when one is complete.

Compiled, without the GIL; imported when a link is opened, not before: a vLLM worker must not have
Numba loaded while it is initialized. Who runs here: the sender's caller or thread, and the
receiver's, in two processes. The writer calls :func:`copy` and then :func:`publish`, the
reader :func:`await_word`: who sees the word sees everything copied before it (release and acquire,
and a fence behind stores that pass the caches by).
"""

# ruff: noqa: ARG001 - an intrinsic names its arguments for its signature; its body uses `arguments`
from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["await_word", "copy", "publish"]

_LINE = 64
_LINES = 4  # copied in one turn of the loop
_VECTOR = ir.VectorType(ir.IntType(64), _LINE // 8)
_X86 = platform.machine().lower() in ("x86_64", "amd64")
_SPINS = 32  # looks at the word between two looks at the clock, a microsecond or two

_memcpy: Any = types.ExternalFunction("memcpy", types.uintp(types.uintp, types.uintp, types.uintp))
_sched_yield: Any = types.ExternalFunction("sched_yield", types.int32())
_clock: Any = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.uintp))


def _x86(builder: Any, name: str) -> None:
    """An x86 instruction without operands; nothing elsewhere."""
    if _X86:
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [])


@intrinsic
def _stream_lines(_: Any, to: Any, source: Any) -> Any:
    """Copy ``_LINES`` cache lines to ``to``, a whole line's address, past the caches."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointers = [builder.inttoptr(address, _VECTOR.as_pointer()) for address in arguments]
        hint = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        vectors = []
        for line in range(_LINES):
            at = builder.gep(pointers[1], [ir.Constant(ir.IntType(64), line)])
            vectors.append(builder.load(at, align=1))
        for line, vector in enumerate(vectors):
            at = builder.gep(pointers[0], [ir.Constant(ir.IntType(64), line)])
            builder.store(vector, at, align=_LINE).set_metadata("nontemporal", hint)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), generate


@intrinsic
def _stream_fence(_: Any) -> Any:
    """Whatever was streamed comes before every later store."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _x86(builder, "llvm.x86.sse.sfence")
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _store_release(_: Any, address: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        builder.store_atomic(arguments[1], pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), generate


@intrinsic
def _load_acquire(_: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.uint64(types.uint64), generate


@intrinsic
def _relax(_: Any) -> Any:
    """Tell the core that this is a loop that waits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _x86(builder, "llvm.x86.sse2.pause")
        return context.get_dummy_value()

    return types.void(), generate


def _copy(to: Any, source: Any, nbytes: Any, stream: Any) -> None:
    step = np.uint64(_LINES * _LINE)
    done = np.uint64(0)
    if stream and to % np.uint64(_LINE) == 0:
        while done + step <= nbytes:
            _stream_lines(to + done, source + done)
            done += step
    if done < nbytes:
        _memcpy(to + done, source + done, nbytes - done)


def _publish(address: Any, word: Any) -> None:
    _stream_fence()
    _store_release(address, word)


def _now(scratch: Any) -> Any:
    """Nanoseconds."""
    _clock(np.int32(1), np.uint64(scratch.ctypes.data))
    return scratch[0] * np.int64(1_000_000_000) + scratch[1]


_WORD = types.uint64
copy: Any = njit([types.void(_WORD, _WORD, _WORD, types.boolean)], nogil=True, cache=True)(_copy)
"""``copy(to, source, nbytes, stream)``; ``stream``: past the caches, for much data, which would
drive everything else out of them."""
publish: Any = njit([types.void(_WORD, _WORD)], nogil=True, cache=True)(_publish)
"""``publish(address, word)``: what this thread has copied so far is seen by whoever sees ``word``
in the 8 bytes at ``address``, which is a multiple of 8."""
_read_clock: Any = njit(nogil=True, cache=True)(_now)


def _await_word(address: Any, word: Any, nanoseconds: Any, scratch: Any) -> Any:
    if _load_acquire(address) == word:
        return True
    end = _read_clock(scratch) + nanoseconds
    while _read_clock(scratch) < end:
        for _ in range(_SPINS):
            if _load_acquire(address) == word:
                return True
            _relax()
        _sched_yield()  # to the writer, should it share this core
    return _load_acquire(address) == word


await_word: Callable[[int, int, int, Any], bool] = njit(
    [types.boolean(_WORD, _WORD, types.int64, types.int64[::1])], nogil=True, cache=True
)(_await_word)
"""``await_word(address, word, nanoseconds, scratch)``: look at the 8 bytes at ``address`` until
they are ``word``, for so long at most; whether they are. ``scratch``: two int64 of the caller's."""
