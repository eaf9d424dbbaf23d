"""Requests that no sampler survives, by their seed, planted in the samplers of a test.

Python imports this file by itself where its directory is on ``PYTHONPATH``.
"""

import os
import signal
import sys

DIES, HANGS, CANNOT_BE_ADDED = 666, 667, 668


def plant() -> None:
    from sipipe.sampler.state import SequenceColumns

    join, prepare = SequenceColumns.join, SequenceColumns.prepare
    planted = {}

    def poisoned_join(self, handle, params, *args, **kwargs):
        if params.seed == CANNOT_BE_ADDED:
            os.kill(os.getpid(), signal.SIGSEGV)
        if params.seed in (DIES, HANGS):
            planted[handle] = params.seed
        return join(self, handle, params, *args, **kwargs)

    def poisoned_prepare(self, handles, *args, **kwargs):
        draw = prepare(self, handles, *args, **kwargs)

        def poisoned_draw(*args):
            for handle in map(int, handles):
                if planted.get(handle) == DIES:
                    os.kill(os.getpid(), signal.SIGSEGV)
                while planted.get(handle) == HANGS:
                    pass  # computes for ever
            return draw(*args)

        return poisoned_draw

    SequenceColumns.join, SequenceColumns.prepare = poisoned_join, poisoned_prepare


if "sipipe.sampler" in sys.orig_argv:
    plant()
