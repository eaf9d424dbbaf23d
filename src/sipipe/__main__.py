"""``python -m sipipe``: the same as the ``sipipe`` command."""

from sipipe.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
