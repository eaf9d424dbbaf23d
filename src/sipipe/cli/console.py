"""The console that all commands print tables with."""

from typing import Any

from rich import console


class Console(console.Console):
    """Rich's, for which names that hold brackets or colons are only names."""

    def __init__(self, **more: Any) -> None:
        super().__init__(markup=False, emoji=False, **more)

    def on_broken_pipe(self) -> None:
        """Rich would exit with 1; :func:`sipipe.cli.main` knows that this is no error."""
        raise BrokenPipeError
