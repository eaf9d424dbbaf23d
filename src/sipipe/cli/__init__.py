"""The `sipipe` command. Subcommands are imported when they run."""


def main() -> int:
    """Entry point of the `sipipe` command; returns the exit status."""
    raise SystemExit("sipipe: not built yet")
