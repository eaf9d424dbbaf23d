"""Agreement of the ranks of a stage on work that has collectives, and whose order no message says.

A draft head's layers are split over the ranks of the last stage. Each rank hears of drafts and of
iterations in its own time, and a pass may raise on one of them. A rank that goes on to its next
collective while another is still in the one before would be taken for that one's partner: sums of other
layers, and wrong tokens.

Who runs here: the device thread.
Guarantees: all ranks do the same work in the same order, and what one of them has left out, all have.
Rejected: drafts that end the engine at any error, because most errors come at the same place on every
    rank, and cost that pass alone.
"""

from __future__ import annotations

import traceback
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import ParamSpec, TypeVar

import torch
from torch.distributed import ProcessGroup, ReduceOp
from vllm.distributed import get_tp_group

from sipipe.best_effort import BestEffort
from sipipe.errors import SiPipeError
from sipipe.messages.stage_place import StagePlace
from sipipe.worker.double_buffer import Work

P = ParamSpec("P")
T = TypeVar("T")

ALONE_SECONDS = 10.0
"""Seconds that a rank whose pass has failed waits for the others. Those that have not failed may stand
in a collective of the head until this rank has ended."""


class RanksDifferError(SiPipeError):
    """A draft head's pass failed on some ranks of a stage, and not on all in the same way."""


def agreement(place: StagePlace) -> Callable[[Work], Work]:
    """A function by which all ranks of a stage do what its first one does next."""
    if place.tp_size == 1:
        return lambda work: work
    group = get_tp_group()
    word = torch.zeros(1, dtype=torch.int64)

    def agree(work: Work) -> Work:
        word.fill_(work)
        # wait: none here, the engine's for an iteration; the first rank, which gets the same messages
        torch.distributed.broadcast(word, src=group.ranks[0], group=group.cpu_group)
        return Work(int(word))

    return agree


def comparison(place: StagePlace, seconds: float) -> Callable[[Exception | None], None]:
    """A function that each rank of a stage calls after the same pass of a head.

    Args:
        place: this rank's.
        seconds: bound of the wait for the other ranks.

    Returns a function of what the pass has raised on this rank, None: nothing. It raises
    RanksDifferError where the pass did not end in the same way on all ranks."""
    if place.tp_size == 1:
        return lambda _: None
    group = get_tp_group().cpu_group

    def compare(error: Exception | None) -> None:
        if are_alike(group, error, seconds):
            return
        if error is None:
            raise RanksDifferError(
                "a pass of the draft head failed on another rank of this stage, whose log says why, or has "
                f"not ended there within {seconds:g} s"
            )
        raise RanksDifferError(
            "a pass of the draft head failed on this rank of its stage, and not in the same way on the "
            f"others ({type(error).__name__}: {error}): leave --speculative-config out if it happens "
            "again"
        ) from error

    return compare


def are_alike(group: ProcessGroup, error: Exception | None, seconds: float) -> bool:
    """Say if the same ``error``, or None, came at the same place on all ranks of ``group``; False also
    if another rank has not called this within ``seconds``."""
    outcome = 0
    if error is not None:
        places = [
            (frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)
        ]
        outcome = 1 + zlib.crc32(f"{type(error).__name__} {places[-1:]}".encode())
        seconds = min(seconds, ALONE_SECONDS)
    largest_and_smallest = torch.tensor([outcome, -outcome], dtype=torch.int64)
    try:
        work = torch.distributed.all_reduce(
            largest_and_smallest, op=ReduceOp.MAX, group=group, async_op=True
        )
        # wait: `stall_timeout`, or 10 s (`ALONE_SECONDS`) on a rank that has failed; the other ranks
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:  # gloo's: it took too long, or a rank has ended
        return False
    return int(largest_and_smallest.sum()) == 0


def run_alike(
    compare: Callable[[Exception | None], None],
    effort: BestEffort,
    otherwise: T,
    call: Callable[P, T],
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """Run a head by ``call``, on all ranks alike; the answer is ``otherwise`` where it raises on all of
    them. Raises RanksDifferError: it did on some.

    Args:
        compare: takes what a pass of the head has raised on this rank, or None, and raises where the
            other ranks' passes ended in another way (:func:`comparison`).
    """
    failed: list[Exception] = []

    def noted() -> T:
        try:
            return call(*args, **kwargs)
        except Exception as error:
            failed.append(error)
            raise

    result = effort(otherwise, noted)
    compare(failed[0] if failed else None)
    return result
