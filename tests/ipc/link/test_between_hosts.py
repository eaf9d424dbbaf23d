"""Links between two hosts (network namespaces): what they carry, and what a lost host looks like."""

from __future__ import annotations

import re
import signal
import time

import pytest

BOUND = 60.0
NOTICED = 30.0  # seconds; promised are 5, 11 of a process that is stopped

PRELUDE = """
import sys, torch
from sipipe.errors import SiPipeError
from sipipe.messages.link import LinkEndpoint
from sipipe.ipc.link.endpoint import open_sender, open_receiver
address = sys.argv[1]
link = LinkEndpoint(kind="zeromq", buffer_tokens=512, address=address, port=29600, stall_timeout=60)
def hidden(i): return {"h": torch.full((1 + i * 37 % 512, 4096), i, dtype=torch.bfloat16)}
def end(call):
    try:
        call()
    except SiPipeError as error:
        print(type(error).__name__, error, flush=True)
"""
RECEIVES = """
receiver = open_receiver(link, None)
for i in range(40):
    sent = hidden(i)
    assert torch.equal(receiver.take(i, len(sent["h"]), 60)["h"], sent["h"]), i
    receiver.release(i)
print("received", flush=True)
end(lambda: receiver.take(40, 1, 60))
"""
SENDS = """
sender = open_sender(link, None)
for i in range(40):
    sender.send(i, len(hidden(i)["h"]), hidden(i))
print("sent", flush=True)
def wait():
    while sender._transport.next_release(60) is not None:
        pass
end(wait)
"""


@pytest.fixture
def ends(cluster, monkeypatch):
    """A receiver on the second host and a sender on the first, when 40 frames have arrived."""
    monkeypatch.setenv("SIPIPE_SECRET", "a secret of the tests")
    here, there = cluster.hosts
    receiver = there.python(PRELUDE + RECEIVES, there.address)
    sender = here.python(PRELUDE + SENDS, there.address)
    assert sender.stdout.readline() == "sent\n"
    assert receiver.stdout.readline() == "received\n"
    yield sender, receiver
    for host in cluster.hosts:
        host.cable("up")
        host.mute(False)
        host.end_all()


def noticed(process) -> str:
    """What the process says, within the bound."""
    began = time.monotonic()
    line = process.stdout.readline().strip()
    assert time.monotonic() - began < NOTICED
    return line


@pytest.mark.ci
@pytest.mark.parametrize("how", ["cut", pytest.param("half open", marks=pytest.mark.slow)])
def test_both_ends_notice_a_cable_that_is_cut(cluster, ends, how):
    if how == "cut":
        cluster.hosts[0].cable("down")
    else:
        cluster.hosts[1].mute(True)
    for end in ends:
        assert re.match(r"PeerDiedError .* \(it was silent for [0-9.]+ s[,)]", noticed(end))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "seen"),
    [
        (signal.SIGKILL, "(closed|reset) the connection"),
        (signal.SIGSTOP, r"was silent for 1[0-9.]+ s, while its machine answered"),
    ],
)
def test_a_stage_that_is_killed_or_stopped(cluster, ends, number, seen):
    (process,) = cluster.hosts[0].processes()
    process.send_signal(number)
    assert re.match(rf"PeerDiedError .* \(it {seen}\);", noticed(ends[1]))
