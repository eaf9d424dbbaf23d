"""A trace file: magic, header, then fixed-size records until the end of the file.

    offset 0    8 bytes   b"SIPTRACE"
           8    4 bytes   format version, little-endian
          12    4 bytes   size of everything before the first record, a multiple of 32
          16              the header as JSON, padded with spaces
    ... then records of 32 bytes (RECORD), in the order in which each thread ended them

There is one file per process, or the last two where its size is limited, and no index: a file that
ends in the middle of a record (a killed process, a full disk) is good up to there.
"""

import struct
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from sipipe.errors import SiPipeError
from sipipe.observe.phases import ROLES, Phase

MAGIC = b"SIPTRACE"
VERSION = 2
SUFFIX = ".siptrace"
OLDER = f".older{SUFFIX}"
"""Ending of the file before, where a process has begun another because of its size."""
RECORD = np.dtype(
    [
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
        ("iteration", "<u4"),
        ("batch", "<u4"),
        ("tokens", "<u4"),
        ("phase", "u1"),
        ("thread", "u1"),
        ("slot", "<u2"),
    ]
)
"""One record. ``batch`` is in sequences, times are of the recording host's monotonic clock."""
PACK = struct.Struct("<qqIIIBBH")
assert PACK.size == RECORD.itemsize == 32

# Records about the recording itself; their numbers stay clear of Phase.
CPU = 253
"""start..end, ``iteration`` = microseconds of CPU time the process used between the two."""
DROPPED = 254
"""``iteration`` records were dropped between start and end because the buffer was full."""
_LONGEST_NS = 366 * 86_400 * 10**9
"""A record further than a year from the opening of its file is damaged: a single wrong bit can put
it three centuries away, and every figure of the report with it."""

_Time = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_PREFIX = struct.Struct("<8sII")


class TraceError(SiPipeError):
    """A trace that cannot be written or used; the message is one line for the user."""


class Header(msgspec.Struct, kw_only=True, frozen=True):
    """First part of a file: the process that recorded it, and its pipeline."""

    role: str
    """``stage``, ``sampler`` or ``executor``."""
    index: int = 0
    """Which stage or sampler, from 0."""
    rank: int = 0
    """Tensor-parallel rank within the stage."""
    pid: int = 0
    host: str = ""
    boot: str = ""
    """The kernel's name of this boot: hosts may have one name."""
    stages: int = 0
    """Pipeline size p; 0 where the recorder was not told."""
    layers: int = 0
    """Decoder layers of a stage; 0 where unknown (vLLM's even cut is assumed)."""
    inflight: int = 0
    """Microbatches that the engine keeps in flight at most; 0 where unknown (p is assumed)."""
    run: str = ""
    """The same in all files of one run; files of other runs in a directory are left out."""
    label: str = "sipipe"
    """The engine, for headings: ``sipipe`` or ``stock vLLM``."""
    model: str = ""
    monotonic_ns: _Time = 0
    """The monotonic clock when the file was opened ..."""
    realtime_ns: _Time = 0
    """... and the wall clock at the same moment: aligns hosts, whose monotonic clocks differ."""
    since_ns: _Time = 0
    """From when on, on the monotonic clock, nothing is in an earlier file; 0: this is the first."""

    @property
    def name(self) -> str:
        """``stage 1``, ``stage 1 rank 2``, ``sampler 0``, ``executor``."""
        if self.role == "executor":
            return "executor"
        return f"{self.role} {self.index}" + (f" rank {self.rank}" if self.rank else "")


def encode_header(header: Header) -> bytes:
    """Everything that precedes the first record."""
    body = msgspec.json.encode(header)
    size = -(-(_PREFIX.size + len(body)) // RECORD.itemsize) * RECORD.itemsize
    return (_PREFIX.pack(MAGIC, VERSION, size) + body).ljust(size)


def read_file(path: Path) -> tuple[Header, np.ndarray, str]:
    """Header, records as they lie in the file, and a warning (empty when all is well). Raises
    TraceError: the file is not a trace file of this format, in one line naming it."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from None
    if len(data) < _PREFIX.size or data[: len(MAGIC)] != MAGIC:
        raise TraceError(f"{path}: not a SiPipe trace file, left out")
    _, version, size = _PREFIX.unpack_from(data)
    if version != VERSION:
        raise TraceError(
            f"{path}: trace format {version}, this SiPipe reads {VERSION}; left out, "
            "read it with the version that wrote it"
        )
    try:
        header = msgspec.json.decode(data[_PREFIX.size : size], type=Header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        header = None
    if header is None or size > len(data):
        raise TraceError(f"{path}: the header is damaged or cut off, left out")
    if header.role not in ROLES:
        raise TraceError(f"{path}: unknown role {header.role!r}, left out")
    count, remainder = divmod(len(data) - size, RECORD.itemsize)
    records = np.frombuffer(data, RECORD, count, size)
    warning = f"{path}: cut off in the middle of a record, the rest is used" if remainder else ""
    good = (
        (records["start_ns"] >= header.monotonic_ns - _LONGEST_NS)
        & (records["start_ns"] <= records["end_ns"])
        & (records["end_ns"] <= header.monotonic_ns + _LONGEST_NS)
        & np.isin(records["phase"], (*Phase, CPU, DROPPED))
    )
    if not good.all():
        warning = f"{path}: {int((~good).sum())} damaged records left out, the rest is used"
    return header, records[good], warning
