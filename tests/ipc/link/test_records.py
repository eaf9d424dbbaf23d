"""Records: what is not one is never taken for one."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from sipipe.ipc.link.records import RECORD_BYTES, Kind, Record, RecordCodec, RecordError

RECORD = Record(Kind.DATA, 2, 1, 5, 77, 512, 0x0123456789ABCDEF)


@given(
    st.builds(
        Record,
        st.sampled_from(list(Kind)),
        st.integers(0, 2**16 - 1),
        st.integers(0, 2**32 - 1),
        *[st.integers(0, 2**64 - 1)] * 4,
    )
)
def test_round_trip(record):
    packed = RecordCodec(b"secret").pack(record)
    assert len(packed) == RECORD_BYTES
    assert RecordCodec(b"secret").unpack(packed + b"what follows") == record


@given(st.integers(0, RECORD_BYTES * 8 - 1))
def test_one_wrong_bit_is_noticed(bit):
    packed = bytearray(RecordCodec(b"secret").pack(RECORD))
    packed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(RecordError):
        RecordCodec(b"secret").unpack(packed)


def test_a_record_of_another_link_is_refused():
    with pytest.raises(RecordError, match="check word"):
        RecordCodec(b"another").unpack(RecordCodec(b"secret").pack(RECORD))


def test_too_short():
    with pytest.raises(RecordError, match="no record"):
        RecordCodec(b"secret").unpack(b"SPST")
