"""What the processes of ``test_processes`` do: ``python process.py JSON``."""

import json
import random
import subprocess
import sys
import time
from contextlib import closing

import msgspec

from sipipe.ipc.errors import ChannelClosed, PeerDiedError
from sipipe.ipc.ring.dispatch import DispatchReader
from sipipe.ipc.ring.layout import RingEndpoint


def body_of(number: int) -> list[bytes]:
    """The parts of message ``number``: 0 to 9,000 bytes, three entries of 4 KB at most."""
    rng = random.Random(number)
    size = rng.randrange(1 + rng.choice([0, 10, 500, 3000, 9000]))
    return [number.to_bytes(8, "little"), bytes([number % 256]) * size, b"end"]


def start(**arguments):
    """Start a reader; its standard output is a pipe."""
    return subprocess.Popen(
        [sys.executable, __file__, json.dumps(arguments)], stdout=subprocess.PIPE, text=True
    )


def say(what):
    print(what, flush=True)


def reader(endpoint, name, first, delay):
    """Check every message; say how it ended and after how many."""
    rng = random.Random(name)
    expected = first
    with closing(DispatchReader(msgspec.convert(endpoint, RingEndpoint), name)) as channel:
        say("open")
        try:
            while True:
                with channel.receive() as message:
                    assert message.sequence == expected, (message.sequence, expected)
                    if rng.random() < delay:
                        time.sleep(rng.random() * 0.002)
                    assert [bytes(part) for part in message.parts] == body_of(expected)
                    expected += 1
        except (ChannelClosed, PeerDiedError) as end:
            say(f"{type(end).__name__} {expected}")


if __name__ == "__main__":
    reader(**json.loads(sys.argv[1]))
