"""Two workers that find each other, in whatever order they start."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from sipipe.errors import ResourceError, StallError
from sipipe.ipc.link import rendezvous
from sipipe.ipc.link.endpoint import create_link

LINK = create_link(max_tokens=1, name="stage0-1.r0", start_timeout=60.0)


def meet() -> None:
    accepted = []
    accepting = threading.Thread(target=lambda: accepted.append(rendezvous.accept(LINK)))
    accepting.start()
    with rendezvous.connect(LINK) as ours:
        accepting.join(60)
        with accepted[0] as theirs:
            ours.send(b"x")
            assert theirs.recv(9) == b"x"


def test_they_meet_and_nothing_is_left():
    meet()
    assert LINK.secret.hex() not in Path("/proc/net/unix").read_text()


def test_a_process_of_another_user_is_refused(monkeypatch):
    """Whoever comes first is another user's; the next one is ours."""
    uids = iter([os.getuid() + 1, os.getuid() + 1])
    ours = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: next(uids, ours))
    meet()


def test_opening_twice_names_the_link():
    with taken(), pytest.raises(ResourceError, match=r"stage0-1\.r0.*is it open"):
        rendezvous.accept(LINK)


def taken() -> socket.socket:
    taken = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    taken.bind(rendezvous._address(LINK))
    return taken


@pytest.mark.parametrize(("meet", "who"), [("connect", "next"), ("accept", "previous")])
def test_a_stage_that_never_starts(meet, who):
    link = create_link(max_tokens=1, start_timeout=0.05, name="stage2-3.r1")
    with pytest.raises(StallError, match=rf"stage2-3\.r1.*{who} stage did not start within 0\.05"):
        getattr(rendezvous, meet)(link)
