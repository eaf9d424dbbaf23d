"""``python benchmarks/delayed_cable.py PID PID``: a cable between two network namespaces that delays.

Where the kernel has no netem: a network device "wire" in the namespace of each process, and this
process between them, which hands each packet on after the delay. A line on standard input sets the
delay in seconds, one way; the answer is "ready". Ends with standard input.
"""

import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 1, 0x1000
MTU = 60_000
"""Large, because each packet costs this process the same."""


def end_in(pid: str) -> int:
    """The device in a process's namespace; it stays there when this process goes on to another."""
    space = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(space, 0):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(space)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"wire", IFF_TUN | IFF_NO_PI))
    subprocess.run(["ip", "link", "set", "wire", "mtu", str(MTU)], check=True)
    return device


def main() -> None:
    one, other = map(end_in, sys.argv[1:3])
    to = {one: other, other: one}
    under_way: deque[tuple[float, int, bytes]] = deque()
    delay = 0.0
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        ready = select.select([one, other, 0], [], [], wait)[0]
        now = time.monotonic()
        for device in ready:
            if device == 0:
                line = os.read(0, 64)
                if not line:
                    return
                delay = float(line)
                print("ready", flush=True)
            else:
                under_way.append((now + delay, to[device], os.read(device, MTU)))
        while under_way and under_way[0][0] <= now:
            _, device, packet = under_way.popleft()
            with suppress(OSError):  # the device is down, and the packet lost
                os.write(device, packet)


if __name__ == "__main__":
    main()
