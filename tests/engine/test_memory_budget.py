"""The budget against the memory that channels of the same sizes map, and against what is free."""

from __future__ import annotations

import mmap
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sipipe.engine import memory_budget
from sipipe.engine.bus import ring_sizes
from sipipe.engine.logits_room import rows_needed
from sipipe.errors import ResourceError
from sipipe.ipc import memory
from sipipe.ipc.ring.dispatch import DispatchProducer
from sipipe.ipc.ring.logits import LogitsChannel
from sipipe.messages.logits import LogitsShape
from sipipe.observe.live import LivePage, PageHeader

SIZES = {
    "stages": 3,
    "ranks": 1,
    "samplers": 2,
    "inflight": 4,
    "vocabulary": 5_003,
    "dtype": "bfloat16",
    "sequences": 24,
    "tokens": 700,
    "hidden": 48,
}


def mapped() -> dict[str, int]:
    """Bytes of each memory file that this process maps, by inode; a file mapped twice counts once."""
    sizes: dict[str, int] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *name = line.split(maxsplit=5)
        if name and name[0].startswith("/memfd:sipipe"):
            first, last = (int(address, 16) for address in span.split("-"))
            sizes[inode] = max(sizes.get(inode, 0), last - first)
    return sizes


def opened(make) -> tuple[object, int]:
    """What ``make`` returns, and the bytes of the memory files that it has mapped."""
    before = mapped()
    made = make()
    after = mapped()
    return made, sum(size for inode, size in after.items() if inode not in before)


def test_the_budget_is_what_the_channels_map():
    parts = {part.what: part.size for part in memory_budget.memory_budget(**SIZES)}
    inflight, readers = SIZES["inflight"], ["sampler0", "sampler1"]
    made, size = opened(lambda: DispatchProducer("bic-i", **ring_sizes(inflight)))
    assert size == parts.pop("BIC-I")
    made.close()
    made, size = opened(
        lambda: LogitsChannel(
            "bic-l",
            LogitsShape(vocab=SIZES["vocabulary"], dtype=SIZES["dtype"]),
            rows=rows_needed(SIZES["sequences"], inflight),
            entries=memory_budget.logits_entries(inflight),
            readers=readers,
        )
    )
    assert size == parts.pop("logits")
    made.close()
    made, size = opened(lambda: LivePage.create(PageHeader(stages=3, samplers=2)))
    assert size == -(-parts.pop("figures") // mmap.PAGESIZE) * mmap.PAGESIZE
    made.close()
    made, size = opened(_links)
    assert size == parts.pop("hidden states")
    for end in made:
        end.close()
    assert not parts


def test_only_what_there_is_counts():
    parts = {part.what for part in memory_budget.memory_budget(**SIZES | {"samplers": 0})}
    assert "logits" not in parts
    for more in ({"stages": 1}, {"on_gpu": True}):
        parts = {part.what for part in memory_budget.memory_budget(**SIZES | more)}
        assert "hidden states" not in parts


def test_the_sum_of_all_parts_has_to_be_there(monkeypatch):
    parts = memory_budget.memory_budget(**SIZES)
    needed = sum(part.size for part in parts)
    monkeypatch.setattr(memory, "free_bytes", lambda: needed)
    memory_budget.check_budget(parts)
    monkeypatch.setattr(memory, "free_bytes", lambda: needed - 1)
    with pytest.raises(ResourceError, match=r"memory has .* MiB free, too little") as it:
        memory_budget.check_budget(parts)
    assert "\n" not in str(it.value)


IN_A_CONTAINER = """
import os
from sipipe.engine import memory_budget
from sipipe.ipc.ring.logits import LogitsChannel
from sipipe.messages.logits import LogitsShape
info = os.statvfs("/dev/shm")
assert info.f_bavail * info.f_frsize <= 1 << 20
sizes = dict(stages=2, ranks=1, samplers=1, inflight=3, vocabulary=32_000, dtype="bfloat16",
             sequences=64, tokens=256, hidden=256)
budget = memory_budget.memory_budget(**sizes)
assert sum(part.size for part in budget) > 8 << 20
memory_budget.check_budget(budget)
LogitsChannel("bic-l", LogitsShape(vocab=32_000, dtype="bfloat16"), rows=128, entries=5).close()
print("fits")
"""


def test_channels_fit_beside_a_dev_shm_that_is_too_small():
    unshare = shutil.which("unshare")
    if unshare is None or os.geteuid() != 0:
        pytest.skip("only root mounts a /dev/shm of its own")
    mount = "mount -t tmpfs -o size=1m none /dev/shm"
    if subprocess.run([unshare, "-m", "sh", "-c", mount], check=False).returncode:
        pytest.skip("mount namespaces are not allowed here")
    done = subprocess.run(
        [
            unshare,
            "-m",
            "sh",
            "-c",
            f'{mount} && exec "$0" -c "$1"',
            sys.executable,
            IN_A_CONTAINER,
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "fits\n", done.stderr


def _links() -> list:
    """Both ends of the links between the stages, with a microbatch on its way."""
    import torch

    from sipipe.ipc.link.endpoint import open_receiver, open_sender
    from sipipe.messages.link import LinkEndpoint, buffer_tokens

    ends = []
    for stage in range(SIZES["stages"] - 1):
        link = LinkEndpoint(
            kind="shm",
            buffer_tokens=buffer_tokens(SIZES["sequences"], SIZES["tokens"]),
            depth=max(2, SIZES["inflight"]),
            name=f"stage{stage}-{stage + 1}.r0",
        )
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sender, receiver = open_sender(link, pair[0]), open_receiver(link, pair[1])
        hidden = torch.zeros(3, SIZES["hidden"], dtype=torch.bfloat16)
        sender.send(0, 3, {"hidden_states": hidden, "residual": hidden})
        receiver.take(0, 3)
        ends += [sender, receiver]
    return ends
