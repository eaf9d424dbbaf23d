"""The files through which the tensor-parallel ranks of a stage find each other."""

from collections.abc import Sequence
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def remove_rendezvous(init_methods: Sequence[str]) -> None:
    """Remove the files of ``init_methods`` once all ranks have joined, so that no kind of exit leaves
    any. vLLM's CPU communicator names its shared memory after the file, so that goes too; what is
    mapped stays usable."""
    for method in init_methods:
        rendezvous = Path(method.removeprefix("file://"))
        rendezvous.unlink(missing_ok=True)
        for segment in SHARED_MEMORY.glob(f"{rendezvous.name}-*"):
            segment.unlink(missing_ok=True)
