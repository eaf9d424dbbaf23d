"""Links as the engine describes them, and what is refused."""

from __future__ import annotations

import pytest
from tests.ipc.link.conftest import HERE, free_port

from sipipe.errors import StallError
from sipipe.ipc.link import zeromq
from sipipe.ipc.link.endpoint import open_sender
from sipipe.messages.link import LinkEndpoint


@pytest.mark.parametrize(
    ("device", "kind", "text"),
    [
        ("cpu", "shm", "shm"),
        ("cuda", "shm", "shm (untested between GPUs)"),
        ("cuda", "cuda_ipc", "cuda_ipc (untested between GPUs)"),
    ],
)
def test_a_link_in_a_start_up_line(device, kind, text):
    link = LinkEndpoint(kind=kind, buffer_tokens=1, device=device, name="a")
    assert link.describe() == f"link a ({kind})"
    assert link.transport == text


def test_a_stage_that_cannot_be_reached_is_named_at_the_start(monkeypatch):
    """And not by the first request, after the stall timeout."""
    monkeypatch.setenv("SIPIPE_SECRET", "a secret of the tests")
    monkeypatch.setattr(zeromq, "MEET_SECONDS", 0.3)
    port = free_port(HERE)
    link = LinkEndpoint(kind="zeromq", buffer_tokens=4, name="a", address=HERE, port=port)
    with pytest.raises(StallError, match=rf"next stage was not reached at {HERE}:{port} within 0"):
        open_sender(link, None, lambda _: None)
