"""The fixed header that every packet of a link begins with.

``DATA`` announces one frame and is the only packet of a steady iteration. ``SCHEMA`` precedes the
first frame of a new tensor schema and has its description as body. ``RELEASE`` flows backwards
and gives a frame's buffer back. ``HELLO`` comes first, from both sides. ``BYE`` ends the link in
good order: an end of the connection without it is a dead peer.
"""

import enum
import struct
import zlib
from typing import NamedTuple

from sipipe.ipc.link.errors import TransferMismatchError
from sipipe.messages.link import LinkEndpoint

_FIELDS = struct.Struct("<BQQIQ")
_CHECK_BYTES = 4
HEADER_BYTES = _FIELDS.size + _CHECK_BYTES


class Kind(enum.IntEnum):
    """What a packet says."""

    SCHEMA = 1
    DATA = 2
    RELEASE = 3
    HELLO = 4
    BYE = 5


class Header(NamedTuple):
    """One header; fields that a kind does not need are 0."""

    kind: int
    frame: int = 0
    """Counts the frames of a link from 0. Frame f lies in buffer f modulo ``depth``.
    HELLO: the process that speaks."""
    iteration: int = 0
    num_tokens: int = 0
    fingerprint: int = 0
    """Of the tensor schema."""


class HeaderCodec:
    """Packs and checks the packets of one link.

    The check is a CRC-32 of header and body that starts from the link's name, so that damaged
    bytes, or a packet of another link, are never taken for a header.
    """

    def __init__(self, endpoint: LinkEndpoint) -> None:
        self._link = endpoint.describe()
        self._seed = zlib.crc32(endpoint.name.encode())

    def pack(self, header: Header, body: bytes = b"") -> bytes:
        """A packet: fields, check, body."""
        fields = _FIELDS.pack(*header)
        check = zlib.crc32(fields, self._seed)
        if body:
            check = zlib.crc32(body, check)
        return fields + check.to_bytes(_CHECK_BYTES, "little") + body

    def unpack(self, packet: memoryview) -> Header:
        """The header of a whole packet; the body is ``packet[HEADER_BYTES:]``.

        Raises:
            TransferMismatchError: it is no packet of this link, or damaged.
        """
        size = _FIELDS.size
        if len(packet) >= HEADER_BYTES:
            check = zlib.crc32(packet[:size], self._seed)
            if len(packet) > HEADER_BYTES:
                check = zlib.crc32(packet[HEADER_BYTES:], check)
            if check == int.from_bytes(packet[size:HEADER_BYTES], "little"):
                return Header(*_FIELDS.unpack_from(packet))
        raise TransferMismatchError(
            f"{self._link}: a packet of {len(packet)} bytes is damaged or of another link"
        )
