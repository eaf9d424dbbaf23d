"""Rows that run without Python: what they do equals what Python would, whoever runs them."""

from __future__ import annotations

import os
import socket
import threading

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from sipipe.ipc.link.frames import MAX_PARTS, FrameQueue, RowKind
from sipipe.ipc.link.records import RECORD_BYTES, Kind, Record, RecordCodec

numbers = st.integers(0, 2**64 - 1)
records = st.builds(
    Record,
    st.just(int(Kind.DATA)),
    st.integers(0, 2**16 - 1),
    st.integers(0, 2**32 - 1),
    *[numbers] * 4,
)


def fill(row, kind, codec, record, seal, sources, places):
    row.write(
        int(kind),
        seal,
        [source.ctypes.data for source in sources],
        places,
        codec.fields(*record[1:]),
    )


@settings(max_examples=30, deadline=None)
@given(records, numbers, st.lists(st.integers(0, 300), max_size=MAX_PARTS), st.binary(max_size=16))
def test_a_copied_frame(record, seal, sizes, secret):
    codec = RecordCodec(secret)
    sources = [np.random.default_rng(n).integers(0, 256, n, np.uint8) for n in sizes]
    targets = [np.zeros(n + 8, np.uint8) for n in sizes]
    sealed = np.zeros(1, np.uint64)
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    frames = FrameQueue(2)
    with near, far:
        places = [n for t, s in zip(targets, sizes, strict=True) for n in (t.ctypes.data, s)]
        places += [sealed.ctypes.data, near.fileno()]
        fill(frames.own, RowKind.COPY, codec, record, seal, sources, tuple(places))
        assert frames.own.run() == 0
        assert far.recv(1000) == codec.pack(record)
    frames.close()
    assert int(sealed[0]) == seal
    for source, target in zip(sources, targets, strict=True):
        assert bytes(target) == bytes(source) + bytes(8)


@pytest.mark.parametrize("cores", [1, 2])
def test_streamed_frames_leave_in_order(monkeypatch, cores):
    """Larger than the socket's buffer, so that sends are cut short."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    codec, frames = RecordCodec(b"secret"), FrameQueue(3)
    near, far = socket.socketpair()
    data = [np.full(300_000 + n, n, np.uint8) for n in range(4)]
    results = []

    def transmit():
        for _ in range(4):
            results.append(frames.step())

    thread = threading.Thread(target=transmit)
    thread.start()
    with near, far:
        for n, part in enumerate(data):
            places = (0, part.nbytes, 0, near.fileno())
            record = Record(int(Kind.DATA), sequence=n)
            if n == 2:
                frames.row().leave_to_python()
            else:
                fill(frames.row(), RowKind.STREAM, codec, record, n, [part], places)
            frames.ring()
            if n == 2:
                continue
            wanted = RECORD_BYTES + part.nbytes + 8
            got = bytearray()
            while len(got) < wanted:
                got += far.recv(wanted - len(got))
            assert codec.unpack(got) == record
            assert bytes(got[RECORD_BYTES:-8]) == bytes(part)
            assert int.from_bytes(got[-8:], "little") == n
        thread.join(60)
    frames.close()
    assert results == [0, 0, None, 0]


def test_a_send_that_fails_says_why():
    frames = FrameQueue(2)
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    far.close()
    with near:
        sealed = np.zeros(1, np.uint64)
        places = (sealed.ctypes.data, near.fileno())
        record = Record(int(Kind.DATA))
        fill(frames.own, RowKind.COPY, RecordCodec(b""), record, 0, [], places)
        # A row without tensors is one for Python only in the queue; run() does what it says.
        assert frames.own.run() != 0
    frames.close()
