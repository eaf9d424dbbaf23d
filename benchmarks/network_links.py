"""Hidden states between hosts, by each transport: ``python -m benchmarks.network_links``.

Two tensors in bfloat16, 8,192 wide, cross a link between two processes, one after the other: from
``send`` until the later stage holds them. The processes are in two network namespaces of this machine,
joined by a cable, where they can be made (root), else on loopback. NIXL is left out where it is not
installed (``pip install "sipipe[nixl]"``); it goes over TCP, since a link within one machine is not what
RDMA is for.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from contextlib import closing, nullcontext
from subprocess import PIPE, Popen
from typing import Any

import torch
from tests.hosts import Cluster, why_not

from sipipe.ipc.link.endpoint import open_receiver, open_sender
from sipipe.ipc.link.nixl_agent import nixl_reach
from sipipe.messages.link import LinkEndpoint, TransportKind

WIDTH = 8192
TOKENS = (64, 1024)
TIMES = 24
WARM = 4
PORT = 29700
WAYS: dict[str, tuple[TransportKind, str]] = {
    "zeromq, encrypted": ("zeromq", ""),
    "zeromq, plain": ("zeromq", "a token"),
    "nixl over TCP, plain": ("nixl", ""),
}
"""Transport of each way, and its token where it is not encrypted."""


def main() -> None:
    """Print a table, in milliseconds."""
    os.environ["SIPIPE_SECRET"] = "a secret of the benchmark"
    apart = not why_not()
    print(f"between {'two network namespaces' if apart else 'two processes, on loopback'}")
    print(f"{'way':22}" + "".join(f"{f'{tokens} tokens, ms':>20}" for tokens in TOKENS))
    with closing(Cluster()) if apart else nullcontext() as cluster:
        for host in cluster.hosts if cluster else ():
            # UCX looks for network devices in /sys, which is that of the whole machine.
            host.start(["mount", "-t", "sysfs", "none", "/sys"]).wait()
        for way, (kind, _) in WAYS.items():
            if kind == "nixl" and not nixl_reach():
                print(f"{way:22}: NIXL is not installed")
                continue
            print(f"{way:22}{''.join(f'{text:>20}' for text in measure(way, cluster))}")


def measure(way: str, cluster: Any) -> list[str]:
    """The least and the middle time of each number of tokens."""
    ends = []
    address = cluster.hosts[1].address if cluster else "127.0.0.1"
    for number, end in ((1, "receive"), (0, "send")):
        command = [sys.executable, "-m", "benchmarks.network_links", way, end, address]
        start = cluster.hosts[number].start if cluster else Popen
        ends.append(start(command, stdout=PIPE, text=True))
    came, left = (json.loads(end.communicate(timeout=300)[0].splitlines()[-1]) for end in ends)
    found = []
    for number in range(len(TOKENS)):
        part = slice(number * TIMES + WARM, (number + 1) * TIMES)
        times = [(end - begin) * 1e3 for begin, end in zip(left[part], came[part], strict=True)]
        found.append(f"{min(times):.2f}, {statistics.median(times):.2f}")
    return found


def run_end(way: str, end: str, address: str) -> None:
    """Be one end; print when each message was sent, or had come, in seconds."""
    torch.set_num_threads(1)
    kind, token = WAYS[way]
    link = LinkEndpoint(
        kind=kind,
        name=way,
        buffer_tokens=max(TOKENS),
        address=address,
        port=PORT,
        data_port=PORT + 1 if kind == "nixl" else 0,
        token=token,
        stall_timeout=120.0,
    )
    numbered = [*enumerate(tokens for tokens in TOKENS for _ in range(TIMES))]
    times = []
    if end == "receive":
        with closing(open_receiver(link, None)) as receiver:
            for number, tokens in numbered:
                hidden = receiver.take(number, tokens)
                times.append(time.perf_counter())
                assert int(hidden["residual"][-1, -1]) == number
                receiver.release(number)
    else:
        with closing(open_sender(link, None)) as sender:
            for number, tokens in numbered:
                hidden = {
                    key: torch.full((tokens, WIDTH), number, dtype=torch.bfloat16)
                    for key in ("hidden_states", "residual")
                }
                times.append(time.perf_counter())
                sender.send(number, tokens, hidden)
                # wait: 120 s, the link's `stall_timeout`; the other end, its death
                sender.flush()
                time.sleep(0.02)
            # wait: 120 s, the link's `stall_timeout`; the other end, its death
            sender.wait_released()
    print(json.dumps(times))


if __name__ == "__main__":
    if sys.argv[1:]:
        run_end(*sys.argv[1:])
    else:
        main()
