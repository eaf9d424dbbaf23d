"""Hosts on one machine: network, process and mount namespaces, joined by a cable.

Each host has a name, an address, a /dev/shm, process ids and a /proc of its own, and nothing else of it is
private. A host lives as long as this process does: its first process reads a pipe of ours, and
with a namespace's first process all others of it end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

ADDRESSES = ("10.77.18.1", "10.77.18.2")
_TOOLS = ("unshare", "nsenter", "ip")
_APART = ("unshare", "-n", "-m", "-p", "-u", "--fork")


def why_not() -> str:
    """Reason for which hosts cannot be made on this machine; empty if they can."""
    if os.geteuid() != 0 or not all(map(shutil.which, _TOOLS)):
        return f"needs root, {', '.join(_TOOLS)} for network namespaces"
    if subprocess.run([*_APART, "true"], check=False).returncode:
        return "this container may not make namespaces"
    return ""


class Host:
    """One host. Tests make hosts with :class:`Cluster`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._started: list[subprocess.Popen] = []
        name = f"host{address.rpartition('.')[2]}"
        setup = f"hostname {name} && mount -t tmpfs none /dev/shm && ip link set lo up"
        command = [*_APART, "--mount-proc", "--kill-child", "sh", "-c"]
        command += [f"{setup} && echo ready && exec cat"]
        self._holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"ready\n"
        self.pid = psutil.Process(self._holder.pid).children()[0].pid
        self.shm = Path("/proc", str(self.pid), "root", "dev", "shm")
        """The host's /dev/shm, as this process sees it."""

    def start(self, command: Sequence[str], **arguments: Any) -> subprocess.Popen:
        """Start a command on this host, in this process's directory."""
        inside = ["nsenter", "-t", str(self.pid), "-n", "-m", "-p", "-u", f"--wd={os.getcwd()}"]
        self._started.append(subprocess.Popen([*inside, *command], **arguments))
        return self._started[-1]

    def python(self, code: str, *arguments: str, **more: Any) -> subprocess.Popen:
        """Start Python on this host; its output is a pipe."""
        command = [sys.executable, "-c", code, *arguments]
        return self.start(command, stdout=subprocess.PIPE, text=True, **more)

    def processes(self) -> list[psutil.Process]:
        """The processes that run on this host, less its holder. The process that ``start`` returns is
        outside, and has forked the one inside."""
        namespace = os.readlink(f"/proc/{self.pid}/ns/pid")
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                # An orphan that has ended stays a zombie, since the holder reaps none.
                has_ended = process.status() == psutil.STATUS_ZOMBIE
                is_inside = os.readlink(f"/proc/{process.pid}/ns/pid") == namespace
                if is_inside and not has_ended and process.pid != self.pid:
                    processes.append(process)
        return processes

    def wait_empty(self, seconds: float) -> list[str]:
        """Wait until no process is left, ``seconds`` at most. Returns the command lines of those that
        are, and the names of files that are left in shared memory."""
        deadline = time.monotonic() + seconds
        processes = self.processes()
        while processes and time.monotonic() < deadline:
            psutil.wait_procs(processes, timeout=0.2)
            processes = self.processes()
        names = []
        for process in processes:
            with contextlib.suppress(psutil.Error):
                names.append(" ".join(process.cmdline()) or process.name())
        return names + os.listdir(self.shm)

    def plug_in(self) -> None:
        """Give the network device "wire", which has been made, this host's address."""
        self.run("ip", "addr", "add", f"{self.address}/24", "dev", "wire")
        self.cable("up")

    def cable(self, state: str) -> None:
        """Set the cable's ``state``, ``"up"`` or ``"down"``."""
        self.run("ip", "link", "set", "wire", state)

    def mute(self, yes: bool) -> None:
        """Lose all that this host sends, if ``yes``; what is sent to it arrives."""
        if not yes:
            self.run("ip", "neigh", "flush", "dev", "wire", "nud", "permanent")
            return
        for address in ADDRESSES:
            # Nobody has this hardware address.
            entry = [address, "lladdr", "02:00:00:00:00:01", "nud", "permanent", "dev", "wire"]
            self.run("ip", "neigh", "replace", *entry)

    def run(self, *command: str) -> None:
        """Run a command in this host's network, and wait for its end. It must succeed."""
        subprocess.run(["nsenter", "-t", str(self.pid), "-n", *command], check=True)

    def end_all(self) -> None:
        """Kill the processes on this host, and remove the files in shared memory that are left."""
        for process in self.processes():
            process.kill()
        for started in self._started:
            # Where the command inside is stopped, the process outside has stopped itself.
            started.send_signal(signal.SIGCONT)
            started.communicate(timeout=60)
        self._started.clear()
        for file in self.shm.iterdir():
            file.unlink()

    def close(self) -> None:
        """End the host, with everything on it."""
        self.end_all()
        self._holder.communicate(timeout=60)


class Cluster:
    """Two hosts and the cable between them, if ``connected``."""

    def __init__(self, *, connected: bool = True) -> None:
        self.hosts = [Host(address) for address in ADDRESSES]
        if connected:
            self._connect()

    def _connect(self) -> None:
        """Make the cable, and plug each end into its host."""
        ends = [f"sp{host.pid}" for host in self.hosts]
        subprocess.run(["ip", "link", "add", ends[0], "type", "veth", "peer", ends[1]], check=True)
        for end, host in zip(ends, self.hosts, strict=True):
            subprocess.run(["ip", "link", "set", end, "netns", str(host.pid)], check=True)
            host.run("ip", "link", "set", end, "name", "wire")
            host.plug_in()

    def close(self) -> None:
        """End both hosts."""
        for host in self.hosts:
            host.close()
