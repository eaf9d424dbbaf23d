"""Copies are copies, whatever their length and place; who sees the word sees what was copied."""

from __future__ import annotations

import threading
import time

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from sipipe.ipc.link.memory_kernels import await_word, copy, publish

MILLISECOND = 1_000_000


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2000), st.integers(0, 130), st.integers(0, 130), st.booleans())
def test_any_length_from_anywhere_to_anywhere(length, shift, to_shift, stream):
    source = np.random.default_rng(length).integers(0, 256, length + 200, np.uint8)
    target = np.zeros(length + 400, np.uint8)
    start = -target.ctypes.data % 64 + to_shift  # from a line's beginning, where it can be streamed
    copy(target.ctypes.data + start, source.ctypes.data + shift, length, stream)
    assert bytes(target[start : start + length]) == bytes(source[shift : shift + length])
    assert not target[:start].any()
    assert not target[start + length :].any()


def test_whoever_sees_the_word_sees_the_copy():
    rounds, length = 300, 100_000
    words = np.zeros(2, np.uint64)  # of the writer, of the reader
    there, back = words.ctypes.data, words.ctypes.data + 8
    target = np.zeros(length + 64, np.uint8)
    to = target.ctypes.data + -target.ctypes.data % 64
    seen = target[to - target.ctypes.data :][:length]
    scratch = np.zeros(2, np.int64)

    def write() -> None:
        scratch = np.zeros(2, np.int64)
        for n in range(1, rounds + 1):
            source = np.full(length, n % 251, np.uint8)
            copy(to, source.ctypes.data, length, n % 2 == 0)
            publish(there, n)
            while not await_word(back, n, MILLISECOND, scratch):
                pass

    writer = threading.Thread(target=write)
    writer.start()
    for n in range(1, rounds + 1):
        while not await_word(there, n, MILLISECOND, scratch):
            pass
        assert (seen == n % 251).all()
        publish(back, n)
    writer.join(60)


def test_a_word_that_does_not_come():
    words, scratch = np.zeros(1, np.uint64), np.zeros(2, np.int64)
    began = time.monotonic()
    assert not await_word(words.ctypes.data, 1, 20 * MILLISECOND, scratch)
    assert time.monotonic() - began >= 0.019
    assert await_word(words.ctypes.data, 0, 0, scratch)
