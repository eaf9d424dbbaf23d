"""``python -m sipipe.sampler PIPE TOKENS DTYPE``: what the engine starts as a sampler.

Descriptors of the control pipe and of BIC-O, and what to compile for while the workers load the
model.
"""

import sys

from sipipe.ipc.parent import Parent

# Numba imports scipy.linalg, where there is one, for matrix products that no kernel has: 15 MB and
# a fifth of a second. Nothing else runs in this process.
sys.modules["scipy.linalg"] = None  # type: ignore[assignment]

if __name__ == "__main__":
    # Before what takes a second to import: a snapshot that is longer than the pipe is read at once.
    parent = Parent(int(sys.argv[1]))
    from sipipe.sampler.main import main

    sys.exit(main(parent, *sys.argv[2:]))
