"""Bit for bit what vLLM's own send_tensor_dict delivers, over chains of stages."""

from __future__ import annotations

import importlib.util
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sipipe.ipc.link.endpoint import create_link

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


@pytest.mark.parametrize(("pp", "tp"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_same_bits_as_stock(tmp_path: Path, pp: int, tp: int) -> None:
    links = {
        (stage, rank): create_link(max_tokens=512, name=f"stage{stage}-{stage + 1}.r{rank}")
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
        processes.append(
            subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("stage_chain.py"))]
                + [str(argument) for argument in (rank, pp, tp, port, file, *descriptors)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
                pass_fds=descriptors,
            )
        )
        for end in ends:
            end.close()
    try:
        outputs = [process.communicate(timeout=400) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank, (process, (stdout, stderr)) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 0, f"rank {rank}: {stderr[-3000:]}"
        expected = 0 if rank < tp else 28
        assert f"equal {expected}" in stdout, f"rank {rank}: {stdout}"
