"""Bit for bit what vLLM's own send_tensor_dict delivers, over chains of stages."""

from __future__ import annotations

import importlib.util
import os
import pickle
import socket
from pathlib import Path

import pytest
from tests.engine.forks import Forked

from sipipe.messages.link import LinkEndpoint

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


@pytest.mark.parametrize(("pp", "tp"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_same_bits_as_stock(tmp_path: Path, pp: int, tp: int) -> None:
    links = {
        (stage, rank): LinkEndpoint(
            kind="shm", buffer_tokens=128, name=f"stage{stage}-{stage + 1}.r{rank}"
        )
        for stage in range(pp - 1)
        for rank in range(tp)
    }
    file = tmp_path / "links"
    file.write_bytes(pickle.dumps(links))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_DIST_IDENT": f"sipipe-{port}"}
    environment["GLOO_SOCKET_IFNAME"] = "lo"
    sockets: list[list[socket.socket]] = [[] for _ in range(pp * tp)]
    for rank in range(tp * (pp - 1)):  # in this order: from the previous stage, to the next
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sockets[rank].append(ours)
        sockets[rank + tp].append(theirs)
    processes = []
    for rank, ends in enumerate(sockets):
        descriptors = [end.fileno() for end in ends]
        arguments = [str(argument) for argument in (rank, pp, tp, port, file)]
        with (tmp_path / f"out{rank}").open("w") as out:
            chain = Path(__file__).with_name("stage_chain.py")
            processes.append(Forked(chain, arguments, env=environment, out=out, ends=descriptors))
        for end in ends:
            end.close()
    try:
        for process in processes:
            process.wait(400)
    finally:
        for process in processes:
            process.kill()
    for rank in range(pp * tp):
        said = (tmp_path / f"out{rank}").read_text()
        expected = 0 if rank < tp else 28
        assert said.endswith(f"equal {expected}\n"), f"rank {rank}: {said[-3000:]}"
