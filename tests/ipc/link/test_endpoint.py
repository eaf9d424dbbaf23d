"""Links as the engine describes them, and what is refused."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

from sipipe.errors import UnsupportedError
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


def test_a_tensor_on_another_device_is_refused(pair):
    link = LinkEndpoint(kind="shm", buffer_tokens=4)
    with (
        closing(open_sender(link, pair[0])) as sender,
        pytest.raises(UnsupportedError, match=r"carries CPU and CUDA tensors and 'h' is on meta"),
    ):
        sender.send(0, 2, {"h": torch.zeros(2, 3, device="meta")})
