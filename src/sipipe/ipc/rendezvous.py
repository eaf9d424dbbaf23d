"""The files through which the tensor-parallel ranks of a stage find each other."""

from collections.abc import Sequence
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def remove_rendezvous(init_methods: Sequence[str]) -> None:
    """Remove the files through which the ranks of each stage found each other.

    Once all ranks have joined nobody opens them again, so that nothing is left of them after any
    kind of exit. vLLM's CPU communicator names its shared memory after the file; a segment that is
    mapped stays usable without its name.
    """
    for method in init_methods:
        rendezvous = Path(method.removeprefix("file://"))
        rendezvous.unlink(missing_ok=True)
        for segment in SHARED_MEMORY.glob(f"{rendezvous.name}-*"):
            segment.unlink(missing_ok=True)
