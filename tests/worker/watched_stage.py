"""A check of token safety: stages of SiPipe's path that raise at the first unsafe use of a set of
input buffers.

The first time that a set is written while it is read, read while it is written, written before its
last contents were read, or read with contents of another iteration, the offending call raises
:class:`TokenSafetyError`, which names the set and both iterations. Rejected: checksums of the
buffers, which find an overlap only when the values differ.
"""

import threading
from contextlib import contextmanager

from sipipe.worker import loaded_stage, sampled_stage

READ = "nothing new"


class TokenSafetyError(Exception):
    """Input buffers were about to be written while the device may read them, or the reverse."""


class WatchedStage(sampled_stage.SampledStage):
    """In the place of a stage of SiPipe's path (:func:`watch`)."""

    def __init__(self, *args) -> None:
        self._held = [READ] * sampled_stage.SETS
        """What each set of input buffers holds."""
        self._transition = threading.Lock()
        super().__init__(*args)

    def prepare(self, header, buffer_set, output):
        """The preparing thread's."""
        ours = f"iteration {header.number}"
        what = f"inputs of {ours} would overwrite input buffer set {buffer_set}"
        with self._use(buffer_set, what, READ, f"{ours}, being written", ours):
            return super().prepare(header, buffer_set, output)

    def run(self, inputs) -> None:
        """The device thread's."""
        ours = f"iteration {inputs.iteration}"
        what = f"the device would read {ours} from input buffer set {inputs.buffer_set}"
        with self._use(inputs.buffer_set, what, ours, f"{ours}, being read", READ):
            super().run(inputs)

    @contextmanager
    def _use(self, buffer_set, what, before, during, after):
        """``what`` may be done where the set holds ``before``, and makes it ``after``."""
        with self._transition:
            held = self._held[buffer_set]
            if held != before:
                raise TokenSafetyError(f"token safety: {what}, which holds {held}")
            self._held[buffer_set] = during
        yield
        self._held[buffer_set] = after


def watch() -> None:
    """All stages that this process opens from now on are watched."""
    loaded_stage.SampledStage = WatchedStage
