"""A connection between two hosts without a network: in the place of ``Connection``, in one process."""

from __future__ import annotations

import queue
from collections import defaultdict
from typing import ClassVar

from sipipe.ipc.errors import PeerDiedError


class Wire:
    """One end; the other is the one with the same port. What is sent is there at once."""

    ends: ClassVar[dict] = defaultdict(lambda: (queue.SimpleQueue(), queue.SimpleQueue()))
    """To the listening end and to the other one, by port."""

    def __init__(self, address, port, *, listens, who, token="", lost=None):
        to_listener, to_other = self.ends[port]
        self.who = who
        self.refused = self.ended = False
        self.out, self.back = (to_other, to_listener) if listens else (to_listener, to_other)

    @property
    def usable(self):
        return not self.ended

    def wait_for_peer(self, timeout):
        return True

    def send(self, *parts):
        if self.ended:
            raise self.died()
        self.out.put([bytes(part) for part in parts])

    def receive(self, timeout, place=None):
        try:
            first, *rest = self.back.get(bool(timeout), timeout)
        except queue.Empty:
            return None
        if place is None:
            return [first, *rest]
        for target, part in zip(place(first), rest, strict=True):
            target.cast("B")[:] = part
        return [first]

    def died(self):
        return PeerDiedError(f"{self.who} died")

    def interrupt(self, goodbye=b""):
        if goodbye and not self.ended:
            self.send(goodbye)
        self.ended = True

    def close(self):
        self.ended = True
