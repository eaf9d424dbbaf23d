"""``python -m sipipe.sampler``: what the executor starts as a sampler process."""

import sys

# Numba imports scipy.linalg, where there is one, for matrix products that no kernel has: 15 MB and
# a fifth of a second. Nothing else runs in this process.
sys.modules["scipy.linalg"] = None  # type: ignore[assignment]

from sipipe.sampler.main import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
