"""The budget against the memory that channels of the same sizes map, and against what is free."""

from __future__ import annotations

import mmap
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from sipipe.config import SiPipeConfig
from sipipe.cores import CorePlan
from sipipe.engine.iteration.bus import ENTRY_BYTES, ring_entries
from sipipe.engine.layers.decoder import Decoder
from sipipe.engine.layers.vocabulary import Vocabulary
from sipipe.engine.setup import memory_budget
from sipipe.engine.setup.record import Setup
from sipipe.errors import ResourceError
from sipipe.ipc import memory
from sipipe.ipc.ring.dispatch import DispatchProducer
from sipipe.ipc.ring.logits import LogitsChannel
from sipipe.messages.logits import LogitsShape
from sipipe.observe.live import LivePage, PageHeader

VOCABULARY = 5_003
HIDDEN = 48


def setup_of(*, stages=3, samplers=2, device="cpu") -> Setup:
    """The setup of an engine with 4 microbatches in flight."""
    model = SimpleNamespace(
        get_vocab_size=lambda: VOCABULARY, get_hidden_size=lambda: HIDDEN, dtype="torch.bfloat16"
    )
    vllm_config = SimpleNamespace(
        model_config=model,
        device_config=SimpleNamespace(device_type=device),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=stages, tensor_parallel_size=1, data_parallel_size=1
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=24, max_num_batched_tokens=700),
        speculative_config=None,
    )
    return Setup(
        vllm_config=vllm_config,
        config=SiPipeConfig(inflight=4),
        reason="",
        decoder=Decoder(layers=stages, bonds=(), facts=None),
        layers=(1,) * stages,
        vocabulary=Vocabulary(),
        cores=CorePlan(workers=(((),),) * stages, samplers=((),) * samplers, scheduler=()),
        node=0,
        host_stages=range(stages),
        kv_bytes=None,
    )


def mapped(pid: int | str = "self") -> dict[tuple[str, str], int]:
    """Bytes of each memory file that a process maps, by name and inode; one mapped twice counts once."""
    sizes: dict[tuple[str, str], int] = {}
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        match = re.match(r"(\w+)-(\w+) \S+ \S+ \S+ (\d+) +/memfd:(sipipe\S*)", line)
        if match is not None:
            start, end, inode, name = match.groups()
            size = int(end, 16) - int(start, 16)
            sizes[name, inode] = max(sizes.get((name, inode), 0), size)
    return sizes


def opened(make) -> tuple[object, int]:
    """The result of ``make``, and the bytes of the memory files that it has mapped."""
    before = mapped()
    made = make()
    after = mapped()
    return made, sum(size for file, size in after.items() if file not in before)


def test_the_budget_is_what_the_channels_map():
    setup = setup_of()
    parts = memory_budget.memory_budget(setup)
    made, size = opened(lambda: DispatchProducer("bic-i", ring_entries(setup.slots), ENTRY_BYTES))
    assert size == parts.pop("iterations")
    made.close()
    made, size = opened(
        lambda: LogitsChannel(
            "bic-l",
            LogitsShape(vocab=VOCABULARY, dtype=setup.dtype),
            rows=setup.logits_rows,
            entries=memory_budget.logits_entries(setup.slots),
            readers=["sampler0", "sampler1"],
        )
    )
    assert size == parts.pop("logits")
    made.close()
    made, size = opened(lambda: LivePage.create(PageHeader(stages=3, samplers=2)))
    assert size == -(-parts.pop("metrics") // mmap.PAGESIZE) * mmap.PAGESIZE
    made.close()
    made, size = opened(lambda: _links(setup))
    assert size == parts.pop("hidden states")
    for end in made:
        end.close()
    assert not parts


def test_only_what_there_is_counts():
    assert "logits" not in memory_budget.memory_budget(setup_of(samplers=0))
    for setup in (setup_of(stages=1), setup_of(device="cuda")):
        assert "hidden states" not in memory_budget.memory_budget(setup)


def test_the_sum_of_all_parts_has_to_be_there(monkeypatch):
    parts = memory_budget.memory_budget(setup_of())
    needed = sum(parts.values())
    monkeypatch.setattr(memory, "free_bytes", lambda: needed)
    memory_budget.check_budget(parts)
    monkeypatch.setattr(memory, "free_bytes", lambda: needed - 1)
    with pytest.raises(ResourceError, match=r"memory has .* MiB free, too little") as it:
        memory_budget.check_budget(parts)
    assert "\n" not in str(it.value)


IN_A_CONTAINER = """
import os
from sipipe.engine.setup import memory_budget
from sipipe.ipc.ring.logits import LogitsChannel
from sipipe.messages.logits import LogitsShape
info = os.statvfs("/dev/shm")
assert info.f_bavail * info.f_frsize <= 1 << 20
memory_budget.check_budget({"logits": 8 << 20})
LogitsChannel("bic-l", LogitsShape(vocab=32_000, dtype="bfloat16"), rows=128, entries=5).close()
print("fits")
"""


def test_channels_fit_beside_a_dev_shm_that_is_too_small():
    unshare = shutil.which("unshare")
    if unshare is None or os.geteuid() != 0:
        pytest.skip("only root mounts a /dev/shm of its own")
    shell = [unshare, "-m", "sh", "-c"]
    mount = "mount -t tmpfs -o size=1m none /dev/shm"
    if subprocess.run([*shell, mount], check=False).returncode:
        pytest.skip("mount namespaces are not allowed here")
    command = [*shell, f'{mount} && exec "$0" -c "$1"', sys.executable, IN_A_CONTAINER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "fits\n", done.stderr


def _links(setup: Setup) -> list:
    """Both ends of the links between the stages, with a microbatch on its way."""
    import torch

    from sipipe.ipc.link.endpoint import open_receiver, open_sender
    from sipipe.messages.link import LinkEndpoint

    ends = []
    for stage in range(setup.stages - 1):
        link = LinkEndpoint(
            kind="shm",
            buffer_tokens=setup.link_tokens,
            depth=max(2, setup.slots),
            name=f"stage{stage}-{stage + 1}.r0",
        )
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sender, receiver = open_sender(link, pair[0]), open_receiver(link, pair[1])
        hidden = torch.zeros(3, HIDDEN, dtype=torch.bfloat16)
        sender.send(0, 3, {"hidden_states": hidden, "residual": hidden})
        receiver.take(0, 3)
        ends += [sender, receiver]
    return ends
