"""Real processes: many messages, with random kills of readers."""

import contextlib
import random
import select
import signal
import time

import msgspec
import pytest

from sipipe.errors import StallError
from sipipe.ipc.ring.dispatch import DispatchProducer

from . import process


def absent(children):
    """Readers that are declared and have not come yet: each says so when it has."""
    outputs = [child.stdout for child in children.values()]
    return len(select.select(outputs, [], [], 0)[0]) < len(outputs)


def stress(messages, kills, readers):
    rng = random.Random(messages)
    kill_at = sorted(rng.sample(range(messages // 10, messages), kills))
    names = [f"reader{i}" for i in range(readers)]
    producer = DispatchProducer("stress", 8, 4096, names)
    endpoint = msgspec.to_builtins(producer.endpoint)

    def start(name, first):
        delay = 0.002 if name == "reader0" else 0.0
        return process.start(endpoint=endpoint, name=name, first=first, delay=delay)

    children = {name: start(name, 0) for name in names}
    killed, dead = [], []
    with contextlib.closing(producer):
        number = 0
        while number < messages:
            if dead and number >= dead[0][1]:
                name, _ = dead.pop()
                children[name].wait(60)
                producer.remove_reader(name)
                producer.add_reader(name)
                children[name] = start(name, number)
            if kill_at and number >= kill_at[0] and not absent(children) and not dead:
                kill_at.pop(0)
                dead.append((rng.choice(names), number + rng.randrange(50)))
                killed.append(children[dead[0][0]])
                killed[-1].kill()
            if rng.random() < 0.002:
                time.sleep(rng.random() * 0.004)
            producer.publish(process.body_of(number), 120)
            number += 1
    for child in children.values():
        out, _ = child.communicate(timeout=120)
        if child not in killed:
            assert out.splitlines() == ["open", f"ChannelClosed {messages}"]
    for child in killed:
        child.communicate(timeout=60)
    assert len(killed) == kills


def test_random_messages_delays_and_kills():
    stress(5_000, 3, 3)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_200_000_messages():
    stress(200_000, 40, 3)


def test_a_reader_that_is_stopped_is_named():
    producer = DispatchProducer("test", 4, 4096, ["stuck"])
    child = process.start(
        endpoint=msgspec.to_builtins(producer.endpoint), name="stuck", first=0, delay=0
    )
    assert child.stdout.readline() == "open\n"
    child.send_signal(signal.SIGSTOP)

    def publish_more_than_the_ring_holds(timeout):
        for _ in range(8):
            producer.publish([b"x"], timeout)

    with pytest.raises(StallError, match="that stuck should have left"):
        publish_more_than_the_ring_holds(0.2)
    child.kill()
    child.communicate(timeout=60)
    publish_more_than_the_ring_holds(60)  # a dead one holds nobody up
    producer.close()
