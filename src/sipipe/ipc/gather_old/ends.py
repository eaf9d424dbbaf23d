"""A context manager that closes."""

from __future__ import annotations

from typing import Self


class End:
    """Something that is closed."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
