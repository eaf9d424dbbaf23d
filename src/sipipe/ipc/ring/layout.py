"""Where things are in a ring's shared memory, and which byte each lock stands for.

    word (8 bytes, little endian)          one writer per word
    ┌──────────────────────────────┐
    │ 0  identity (2 words)        │  creator, once
    │ 2  slots, slot bytes, ranks  │  creator, once
    │ 6  closed, readers' version   │  owner
    │ 8  words for the framing     │  creator, once (dispatch: -, logits: V, B, dtype, layout, shard)
    ├──────────────────────────────┤
    │ writer r: attached, closed,  │  writer rank r              RANKS x 64 bytes
    │           published          │
    ├──────────────────────────────┤
    │ reader k: state, start,      │  owner                      READERS x 192 bytes
    │           generation, name   │
    │           ────── 64 ───────  │
    │           attached, cursor,  │  reader k
    │           left               │
    ├──────────────────────────────┤
    │ slot s, rank r: ticket,      │  writer rank r, while it    slots x ranks x 64 bytes
    │           5 stamp words      │  holds the slot's lock
    ├──────────────────────────────┤
    │ payload of slot s            │  the same                   slots x slot bytes, page aligned
    └──────────────────────────────┘

    lock byte s * ranks + r    slot s, region of rank r: exclusive while it is written or next in
                               turn, shared by each reader that is at it
    lock byte LIFE + k         held by reader k while it is attached
    lock byte OWNER            held by the owner while it lives

A ticket is the number of a slot's use plus one: ticket n + 1 stands in slot n mod N and says that
use n is complete. 0 says never used.
"""

from __future__ import annotations

import dataclasses

from sipipe.ipc.errors import ChannelConfigError
from sipipe.ipc.memory import PAGE

__all__ = ["Layout", "required_bytes"]

READERS = 64  # places for readers, some of them used again after a restart
LIFE = 1 << 32
OWNER = 1 << 33

# Words of the header.
SLOTS, SLOT_BYTES, RANKS, CLOSED, TABLE, FRAMING = 2, 3, 4, 6, 7, 8
_WRITERS = 16
WRITER_WORDS = 8
W_ATTACHED, W_CLOSED, W_PUBLISHED = 0, 1, 2
READER_WORDS = 24
R_STATE, R_START, R_GENERATION, R_NAME = 0, 1, 2, 3  # the name is R_NAME .. 15: 104 bytes
R_ATTACHED, R_CURSOR, R_LEFT = 16, 17, 18
NAME_BYTES = (R_ATTACHED - R_NAME) * 8
SLOT_WORDS = 8
S_TICKET, S_STAMP = 0, 1
STAMPS = 5

# Values of a reader's state word.
FREE, DECLARED, REMOVED = 0, 1, 2


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """The offsets that follow from a ring's three sizes."""

    slots: int
    """N, at least 3: with two, a reader at one slot and a writer at the other would each wait
    for the slot that the other holds."""

    slot_bytes: int
    """Payload bytes of a slot."""

    ranks: int = 1
    """Writers; each writes its own region of every slot."""

    def __post_init__(self) -> None:
        if self.slots < 3:
            raise ChannelConfigError(f"a channel needs 3 slots or more, not {self.slots}")
        if self.slot_bytes < 1 or self.ranks < 1:
            raise ChannelConfigError("a channel needs a slot of 1 byte or more and a writer")

    @property
    def stride(self) -> int:
        """Bytes from one slot's payload to the next: whole cache lines, pages if above one."""
        unit = PAGE if self.slot_bytes >= PAGE else 64
        return -(-self.slot_bytes // unit) * unit

    @property
    def header_words(self) -> int:
        return self.slot_word(self.slots, 0)

    @property
    def payload(self) -> int:
        """Byte offset of slot 0's payload."""
        return -(-self.header_words * 8 // PAGE) * PAGE

    @property
    def size(self) -> int:
        return self.payload + self.slots * self.stride

    def writer_word(self, rank: int) -> int:
        return _WRITERS + rank * WRITER_WORDS

    def reader_word(self, reader: int) -> int:
        return _WRITERS + self.ranks * WRITER_WORDS + reader * READER_WORDS

    def slot_word(self, slot: int, rank: int) -> int:
        return self.reader_word(READERS) + (slot * self.ranks + rank) * SLOT_WORDS


def required_bytes(*, slots: int, slot_bytes: int, ranks: int = 1) -> int:
    """Shared memory of one ring, to be summed up and checked before anything is started.

    A dispatch channel has ``slots`` and ``slot_bytes`` as given to it; a logits channel's slot
    has vocab x batch x bytes of its dtype (``LogitsChannel.required_bytes`` knows).
    """
    return -(-Layout(slots, slot_bytes, ranks).size // PAGE) * PAGE
