"""Where things are in a ring's shared memory, and which byte each lock stands for.

    word (8 bytes, little endian)          one writer per word
    ┌──────────────────────────────┐
    │ 0  identity (2 words)        │  creator, once
    │ 2  closed, readers' version  │  owner
    ├──────────────────────────────┤
    │ writer r: closed, published  │  writer rank r              RANKS x 64 bytes
    ├──────────────────────────────┤
    │ reader k: declared, start,   │  owner                      READERS x 128 bytes
    │           generation         │
    │           ────── 64 ───────  │
    │           attached, cursor,  │  reader k
    │           left               │
    ├──────────────────────────────┤
    │ entry e, rank r: commit word,│  writer rank r, while it    entries x ranks x 64 bytes
    │           5 header words     │  holds the entry's lock
    ├──────────────────────────────┤
    │ payload of entry e           │  the same                   entries x entry bytes,
    ├──────────────────────────────┤                             page aligned
    │ payload of all entries       │  as the channel says        arena bytes
    └──────────────────────────────┘

    lock byte e * ranks + r    entry e, region of rank r: exclusive while it is written or next in
                               turn, shared by each reader that is at it
    lock byte LIFE + k         held by reader k while it is attached

A ring of N entries is used over and over: use n lies in entry n mod N. An entry's commit word is
n + 1 when use n is complete, and 0 when it was never used.
"""

import msgspec

from sipipe.ipc.memory import PAGE, Endpoint, round_up

READERS = 256  # records of readers, at most; a reader that is started again has the same one
LIFE = 1 << 32

CLOSED = 2
VERSION = 3
_WRITERS = 8
WRITER_WORDS = 8
W_CLOSED = 0
W_PUBLISHED = 1
READER_WORDS = 16
R_DECLARED = 0
R_START = 1
R_GENERATION = 2
R_ATTACHED = 8
R_CURSOR = 9
R_LEFT = 10
ENTRY_WORDS = 8
E_COMMIT = 0
E_HEADER = 1
HEADER_WORDS = 5
READ_WORDS = E_HEADER + HEADER_WORDS


class Layout(msgspec.Struct, frozen=True):
    """The offsets that follow from a ring's sizes."""

    entries: int
    """N, at least 3: with two, a reader at one entry and a writer at the other would each wait
    for the entry that the other holds."""
    entry_bytes: int
    """Payload bytes of an entry."""
    ranks: int = 1
    """Writers; each writes its own region of every entry."""
    arena: int = 0
    """Payload bytes that belong to no entry: an entry's header says what of it is its own."""

    def __post_init__(self) -> None:
        assert self.entries >= 3, self
        assert min(self.entry_bytes + self.arena, self.ranks) >= 1, self

    def writer_word(self, rank: int) -> int:
        return _WRITERS + rank * WRITER_WORDS

    def reader_word(self, reader: int) -> int:
        return self.writer_word(self.ranks) + reader * READER_WORDS

    def entry_word(self, entry: int, rank: int) -> int:
        return self.reader_word(READERS) + (entry * self.ranks + rank) * ENTRY_WORDS

    @property
    def words(self) -> int:
        """Words before the payload."""
        return self.entry_word(self.entries, 0)

    @property
    def payload(self) -> int:
        """Byte offset of entry 0's payload."""
        return round_up(self.words * 8, PAGE)

    @property
    def stride(self) -> int:
        """Bytes from one entry's payload to the next: whole cache lines, pages if above one."""
        return round_up(self.entry_bytes, PAGE if self.entry_bytes >= PAGE else 64)

    @property
    def payload_bytes(self) -> int:
        return self.entries * self.stride + self.arena

    @property
    def size(self) -> int:
        """Bytes of shared memory that the ring takes, a multiple of the page size."""
        return round_up(self.payload + self.payload_bytes, PAGE)


class RingEndpoint(msgspec.Struct, frozen=True):
    """Endpoint by which a writer or reader attaches."""

    memory: Endpoint
    layout: Layout
    readers: tuple[str, ...]
    """Their names, by record."""
