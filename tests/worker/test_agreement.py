"""Ranks of a stage that compare how a pass has ended, in processes of their own."""

import pytest

pytest.importorskip("vllm", reason="the module belongs to sipipe.worker")

import torch.distributed as dist
import torch.multiprocessing as mp

from sipipe.worker.agreement import are_alike
from sipipe.worker.hooks.world import one_gloo_device


def failing(number):
    """An error of ``number``: of the same place for the same numbers."""
    try:
        if number == 1:
            raise RuntimeError("GPU 1 has no memory" if dist.get_rank() else "GPU 0 has no memory")
        raise RuntimeError("another place")
    except RuntimeError as error:
        return error


def rank_main(rank, store, given_up):
    with one_gloo_device():
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    group = dist.group.WORLD
    outcomes = {
        "no error": (None, None, True),
        "the same error": (failing(1), failing(1), True),
        "errors of two places": (failing(1), failing(2), False),
        "an error of one alone": (None, failing(1), False),
        "another error of one alone": (failing(2), None, False),
    }
    for name, (*errors, alike) in outcomes.items():
        assert are_alike(group, errors[rank], 60.0) is alike, name
    # One comes alone: the other stands in a collective of the pass that this one has left out.
    if rank:
        assert not are_alike(group, failing(1), 0.5)
        given_up.set()
    assert given_up.wait(60.0)


def test_all_ranks_know_if_a_pass_has_ended_alike(tmp_path):
    # Not spawned: each would import vLLM for eight seconds.
    given_up = mp.get_context("fork").Event()
    arguments = (str(tmp_path / "store"), given_up)
    mp.start_processes(rank_main, args=arguments, nprocs=2, start_method="fork")
