"""``python -m sipipe.service``: what the executor starts as a sampler process."""

import sys

from sipipe.service.sampler import main

if __name__ == "__main__":
    sys.exit(main())
