"""Making links: the choice of transport, and what is refused."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch

from sipipe.errors import ConfigError, ResourceError, UnsupportedError
from sipipe.ipc.link.endpoint import create_link, open_receiver, open_sender


@pytest.mark.parametrize(("same_host", "kind"), [(True, "shm"), (False, "socket")])
def test_the_choice_of_transport(same_host, kind):
    link = create_link(max_tokens=1, same_host=same_host, address=("10.0.0.2", 29_000), name="a")
    assert link.kind == kind
    assert link.describe() == f"link a ({kind})"


@pytest.mark.parametrize(("same_host", "kind"), [(True, "cuda_ipc"), (False, "nccl")])
def test_the_choice_of_transport_between_gpus(same_host, kind):
    link = create_link(
        max_tokens=1, same_host=same_host, address=("10.0.0.2", 29_000), device="cuda"
    )
    assert link.kind == kind
    assert link.transport == f"{kind} (untested on a GPU)"
    assert create_link("shm", max_tokens=1).transport == "shm"


@pytest.mark.parametrize("kind", ["cuda_ipc", "nccl"])
def test_transports_between_gpus_need_gpus(kind):
    with pytest.raises(UnsupportedError, match=f"transport='{kind}' joins stages on CUDA devices"):
        create_link(kind, max_tokens=1)


def test_an_endpoint_is_a_small_value_that_hides_its_secret():
    link = create_link("shm", max_tokens=8)
    assert pickle.loads(pickle.dumps(link)) == link
    assert len(pickle.dumps(link)) < 1000
    assert repr(link.secret) not in repr(link)


def test_every_socket_link_has_a_port_of_its_own():
    ports = {create_link("socket", max_tokens=1).address[1] for _ in range(20)}
    assert len(ports) == 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "rdma"}, r"transport='rdma': choose auto, shm, socket, cuda_ipc or nccl"),
        ({"depth": 1}, "depth=1"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"shards": 2, "shard": 2}, "shard=2 of shards=2"),
        ({"same_host": False}, "needs the address"),
        ({"same_host": False, "kind": "shm"}, "one host"),
    ],
)
def test_what_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        create_link(**{"max_tokens": 4, **arguments})


def test_opening_twice_names_the_link():
    link = create_link("shm", max_tokens=1, name="stage0-1.r0")
    with (
        open_receiver(link),
        pytest.raises(ResourceError, match=r"stage0-1\.r0.*is it open already"),
    ):
        open_receiver(link)


def test_a_port_that_is_taken_names_the_port():
    link = create_link("socket", max_tokens=1)
    with (
        open_receiver(link),
        pytest.raises(ResourceError, match=rf"{link.address[1]}.*another port"),
    ):
        open_receiver(link)


def test_a_tensor_on_another_device_is_refused():
    link = create_link("shm", max_tokens=4)
    with (
        open_sender(link) as sender,
        pytest.raises(UnsupportedError, match=r"carries CPU and CUDA tensors and 'h' is on meta"),
    ):
        sender.send(0, 2, {"h": torch.zeros(2, 3, device="meta")})
    assert not sender.statistics().data_messages


def test_numba_is_loaded_when_a_sender_is_opened():
    """Not before: vLLM's workers stumble over it while they are initialized."""
    code = (
        "import sys, sipipe.ipc.link.endpoint; assert not {'numba', 'llvmlite'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
