"""Process groups made in a worker share one gloo device, which only this host reaches."""

from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from sipipe.errors import ResourceError
from sipipe.worker.hooks.world import one_gloo_device


def gloo_threads() -> int:
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return names.count("gloo_tcp_loop")


def listens() -> set:
    """Addresses that this process listens at."""
    connections = psutil.Process().net_connections("inet")
    return {it.laddr for it in connections if it.status == "LISTEN"}


def rank_main(rank, store):
    inherited = listens()  # what tests before have left open in this test's process
    with one_gloo_device():
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        groups = [dist.new_group([0, 1], backend="gloo") for _ in range(4)]
    assert gloo_threads() == 1
    assert {address.ip for address in listens() - inherited} == {"127.0.0.1"}
    for number, group in enumerate(groups):
        value = torch.full((1000,), rank + number, dtype=torch.float32)
        dist.all_reduce(value, group=group)
        assert (value == 1 + 2 * number).all()
    other = dist.new_group([0, 1], backend="gloo")  # outside: torch's own again
    assert gloo_threads() == 2
    dist.barrier(other)
    dist.destroy_process_group()


def test_groups_share_a_device(tmp_path):
    # Not spawned: each would import vLLM for eight seconds.
    mp.start_processes(rank_main, args=(str(tmp_path / "store"),), nprocs=2, start_method="fork")


def disturbed_rank(rank, store):
    words = "cannot connect to each other by gloo .*something else has connected to their ports"
    with one_gloo_device(), pytest.raises(ResourceError, match=words) as raised:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=1),
        )
    assert "/gloo/" not in str(raised.value)


def test_a_rank_that_nobody_connects_to_says_what_may_be_wrong(tmp_path):
    mp.start_processes(
        disturbed_rank, args=(str(tmp_path / "store"),), nprocs=1, start_method="fork"
    )
