"""Console and tables of the commands."""

import os
from collections.abc import Collection, Iterable
from typing import Any

from rich import console
from rich.table import Table


class Console(console.Console):
    """Rich's console without markup: a name that holds brackets or colons is only a name."""

    def __init__(self, **options: Any) -> None:
        # Rich takes the width from it, and would print nothing on a terminal without a size.
        if os.environ.get("COLUMNS") == "0":
            del os.environ["COLUMNS"]
        super().__init__(markup=False, emoji=False, **options)

    def on_broken_pipe(self) -> None:
        """Raise what :func:`sipipe.cli.main` takes for no error; Rich would exit with status 1."""
        raise BrokenPipeError


def table(
    columns: Iterable[str],
    rows: Iterable[Iterable[console.RenderableType]] = (),
    *,
    left: Collection[str],
    pad_edge: bool = False,
) -> Table:
    """A table of ``rows`` under ``columns``. Columns named in ``left`` are aligned to the left, others,
    of numbers, to the right."""
    result = Table(box=None, pad_edge=pad_edge)
    for name in columns:
        result.add_column(name, justify="left" if name in left else "right")
    for row in rows:
        result.add_row(*row)
    return result
