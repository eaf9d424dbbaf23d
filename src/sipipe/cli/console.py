"""What commands print tables with."""

from collections.abc import Collection, Iterable
from typing import Any

from rich import console
from rich.table import Table


class Console(console.Console):
    """Rich's, for which names that hold brackets or colons are only names."""

    def __init__(self, **more: Any) -> None:
        super().__init__(markup=False, emoji=False, **more)

    def on_broken_pipe(self) -> None:
        """Rich would exit with 1; :func:`sipipe.cli.main` knows that this is no error."""
        raise BrokenPipeError


def table(
    columns: Iterable[str],
    rows: Iterable[Iterable[console.RenderableType]] = (),
    *,
    left: Collection[str],
    pad_edge: bool = False,
) -> Table:
    """``rows`` under ``columns``, those named in ``left`` to the left and numbers to the right."""
    made = Table(box=None, pad_edge=pad_edge)
    for name in columns:
        made.add_column(name, justify="left" if name in left else "right")
    for row in rows:
        made.add_row(*row)
    return made
