"""``python -m tests.faults``: runs :mod:`tests.faults.suite`, also as a file."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.faults.suite import main

    sys.exit(main())
