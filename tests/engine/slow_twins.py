"""As :mod:`sampler_twins`, with a part that is slow on purpose, so that who is the quicker one is
known. ``SLOW_PART`` is ``device``, drawing there; ``copy``, of logits to the host; or ``whole``, that
copy and vLLM's sampler, but not the kernel that draws."""

import itertools
import os
import time

from sampler_twins import Twins  # noqa: F401
from vllm.v1.worker.gpu.sample import gumbel, sampler

from sipipe.messages.measured import TIMES
from sipipe.worker.device import HostDevice

SLOW_PART = os.environ["SLOW_PART"]


def slow(seconds, function, calls=None):
    """``seconds`` are far above everything else that is measured, on a loaded machine too; after
    ``calls`` it is as quick as ever."""
    count = itertools.count()

    def wrapped(*args, **kwargs):
        if calls is None or next(count) < calls:
            time.sleep(seconds)
        return function(*args, **kwargs)

    return wrapped


if SLOW_PART == "device":
    sampler.gumbel_sample = gumbel.gumbel_sample = slow(0.3, gumbel.gumbel_sample)
else:
    HostDevice.fetch = slow(0.6, HostDevice.fetch, 1 + TIMES)
if SLOW_PART == "whole":
    sampler.gumbel_sample = slow(1.2, sampler.gumbel_sample)
