"""Making links: the choice of transport, and what is refused."""

from __future__ import annotations

import pickle

import pytest
import torch

from sipipe.errors import ConfigError, UnsupportedError
from sipipe.ipc.link.endpoint import create_link, open_sender


@pytest.mark.parametrize(
    ("device", "kind", "text"),
    [("cpu", "shm", "shm"), ("cuda", "cuda_ipc", "cuda_ipc (untested on a GPU)")],
)
def test_the_choice_of_transport(device, kind, text):
    link = create_link(max_tokens=1, device=device, name="a")
    assert link.kind == kind
    assert link.describe() == f"link a ({kind})"
    assert link.transport == text


def test_gpu_tensors_by_way_of_host_memory():
    link = create_link("shm", max_tokens=1, device="cuda")
    assert link.transport == "shm (untested on a GPU)"


def test_cuda_ipc_needs_gpus():
    with pytest.raises(UnsupportedError, match="transport='cuda_ipc' joins stages on CUDA devices"):
        create_link("cuda_ipc", max_tokens=1)


def test_an_endpoint_is_a_small_value():
    link = create_link("shm", max_tokens=8)
    assert pickle.loads(pickle.dumps(link)) == link
    assert len(pickle.dumps(link)) < 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "rdma"}, r"transport='rdma': choose auto, shm or cuda_ipc"),
        ({"depth": 1}, "depth=1"),
        ({"max_tokens": 0}, "max_tokens=0"),
    ],
)
def test_what_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        create_link(**{"max_tokens": 4, **arguments})


def test_a_tensor_on_another_device_is_refused(pair):
    link = create_link("shm", max_tokens=4)
    with (
        open_sender(link, pair[0]) as sender,
        pytest.raises(UnsupportedError, match=r"carries CPU and CUDA tensors and 'h' is on meta"),
    ):
        sender.send(0, 2, {"h": torch.zeros(2, 3, device="meta")})
