"""As :mod:`kernel_twins`, with one part that is slow on purpose, so that who is the quicker one is
known: ``SLOW_PART`` is ``sampler``, vLLM's on the device, or ``copy``, of logits to the host."""

import os
import time

from kernel_twins import Twins  # noqa: F401
from vllm.v1.worker.gpu.sample import sampler

from sipipe.worker.device import HostDevice

PART = os.environ["SLOW_PART"]
SECONDS = {"sampler": 0.3, "copy": 0.6}[PART]
"""Far above everything else that is measured, on a loaded machine too; nothing takes that part once
it is measured."""


def slow(function):
    def wrapped(*args, **kwargs):
        time.sleep(SECONDS)
        return function(*args, **kwargs)

    return wrapped


if PART == "sampler":
    sampler.gumbel_sample = slow(sampler.gumbel_sample)
else:
    HostDevice.fetch = slow(HostDevice.fetch)
