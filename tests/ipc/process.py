"""What the processes of ``test_processes`` do: ``python process.py ROLE JSON``."""

import json
import os
import random
import socket
import subprocess
import sys
import time
from contextlib import closing

import msgspec

from sipipe.ipc.errors import ChannelClosed, ChannelError, ChannelPeerDied
from sipipe.ipc.gather import GatherReceiver, GatherSender
from sipipe.ipc.ring.dispatch import DispatchProducer, DispatchReader
from sipipe.ipc.ring.layout import RingEndpoint
from sipipe.ipc.ring.logits import LogitsChannel, LogitsEndpoint, LogitsReader, LogitsWriter
from sipipe.messages.logits import LogitsShape


def body_of(number: int) -> list[bytes]:
    """The parts of message ``number``: 0 to 9,000 bytes, three entries of 4 KB at most."""
    rng = random.Random(number)
    size = rng.randrange(1 + rng.choice([0, 10, 500, 3000, 9000]))
    return [number.to_bytes(8, "little"), bytes([number % 256]) * size, b"end"]


def start(role, inherited=(), **arguments):
    """Start one of these processes; its standard output is a pipe."""
    return subprocess.Popen(
        [sys.executable, __file__, role, json.dumps(arguments)],
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=inherited,
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
        except (ChannelClosed, ChannelPeerDied) as end:
            say(f"{type(end).__name__} {expected}")


def sampler(dispatch, logits, gather, name):
    """A sampler without the sampling, until anything ends."""
    try:
        schedule = DispatchReader(msgspec.convert(dispatch, RingEndpoint), name)
        reader = LogitsReader(msgspec.convert(logits, LogitsEndpoint), name)
        sender = GatherSender(socket.socket(fileno=gather))
        say("open")
        while True:
            with schedule.receive() as message, reader.receive() as received:
                assert message.sequence == received.iteration
                sender.send(received.iteration, bytes(received.array[:, 0].data))
    except ChannelError as end:
        say(type(end).__name__)


def engine(directory, samplers):
    """Everything that an engine has: all three channels and its samplers, until it is killed."""
    names = [f"sampler{i}" for i in range(samplers)]
    producer = DispatchProducer("bic-i", readers=names, directory=directory)
    logits = LogitsChannel(
        "bic-l", LogitsShape(vocab=1000), rows=2, entries=4, readers=names, directory=directory
    )
    pairs = [socket.socketpair() for _ in names]
    receiver = GatherReceiver([here for here, _ in pairs])
    children = [
        start(
            "sampler",
            inherited=[there.fileno()],
            dispatch=msgspec.to_builtins(producer.endpoint),
            logits=msgspec.to_builtins(logits.endpoint),
            gather=there.fileno(),
            name=name,
        )
        for name, (_, there) in zip(names, pairs, strict=True)
    ]
    for child, (_, there) in zip(children, pairs, strict=True):
        there.close()
        assert child.stdout.readline() == "open\n"
    say(json.dumps({"samplers": [child.pid for child in children]}))
    writer = LogitsWriter(logits.endpoint)
    iteration = 0
    while True:
        receiver.expect(iteration, range(samplers))
        producer.publish([b"schedule"], 60)
        with writer.acquire(iteration, 2, 0, 60) as region:
            region[...] = iteration
        assert receiver.collect(60)[0] == iteration
        iteration += 1
        if iteration == 5:
            say("running")
        os.sched_yield()


if __name__ == "__main__":
    roles = {"reader": reader, "sampler": sampler, "engine": engine}
    roles[sys.argv[1]](**json.loads(sys.argv[2]))
