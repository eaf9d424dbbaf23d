"""What can be set about how microbatches are formed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from sipipe.errors import ConfigError

__all__ = ["SlotSettings"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlotSettings:
    """Tunables of :class:`sipipe.scheduling.SlotPolicy`. The defaults suit most deployments."""

    max_moves: int = 4
    """Sequences that one visit may move to another slot to level decode counts, 0 or more.
    A moved sequence waits once for up to m - 1 microbatches. 0: slots level by arrivals only."""

    min_sequences: int = 0
    """Decoding sequences a microbatch should have before another slot is opened. 0: as many
    slots as make a rotation shortest by the stage times measured so far. 1: up to m sequences run
    in microbatches of one each."""

    prefill_spread: int = 0
    """Microbatches over which pending prompt tokens are spread. 0: with all m slots open 4 m + 4 up
    to 24, then 2 m + 8; with fewer, twice as many as are open. More are smoother for decoding
    sequences and later for first tokens."""

    min_chunk_tokens: int = 0
    """Prompt tokens below which a chunk is not cut further. 0: with all m slots open 64 / m, and 24
    or more; with fewer, 96."""

    burst_tokens: int = 256
    """Prompt tokens that a microbatch may take while nothing decodes, 0 or more; the more
    decodes beside what arrives, the less of it counts."""

    kv_reserve: float = 0.02
    """Share of the KV cache, 0 to below 1, kept free for the growth of decoding sequences: no
    new request is admitted while less is free and something else runs."""

    context_unit: int = 4096
    """Tokens of context whose attention costs a decode step as much as one more sequence does,
    1 or more. Slots with equal counts are levelled by it."""

    def __post_init__(self) -> None:
        for name, least in (
            ("max_moves", 0),
            ("min_sequences", 0),
            ("prefill_spread", 0),
            ("min_chunk_tokens", 0),
            ("burst_tokens", 0),
            ("context_unit", 1),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(
                    f'sipipe config: "microbatches.{name}" must be a whole number of {least} '
                    f"or more, not {value!r}"
                )
        reserve = self.kv_reserve
        if isinstance(reserve, bool) or not isinstance(reserve, int | float):
            reserve = -1.0
        if not 0 <= reserve < 1:
            raise ConfigError(
                'sipipe config: "microbatches.kv_reserve" must be a number from 0 to below 1, '
                f"not {self.kv_reserve!r}"
            )

    def resolved(self, slots: int, active: int | None = None) -> SlotSettings:
        """The same with the defaults that depend on the microbatches in flight, ``slots``, and on
        how many of them are open, ``active`` (None: all)."""
        if active is None or active == slots:
            spread = max(min(4 * slots + 4, 24), 2 * slots + 8)
            chunk = max(24, 64 // slots)
        else:  # a closed slot's visits carry prompts that delay no decoding sequence
            spread, chunk = 2 * active, 96
        return dataclasses.replace(
            self,
            prefill_spread=self.prefill_spread or spread,
            min_chunk_tokens=self.min_chunk_tokens or chunk,
        )

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any] | None) -> SlotSettings:
        """Settings from the mapping under ``"microbatches"``; missing keys keep their default.

        Raises:
            ConfigError: one line that names the key, the value and what is allowed.
        """
        if settings is None:
            return cls()
        if not isinstance(settings, Mapping):
            raise ConfigError(
                'sipipe config: "microbatches" must be an object such as {"max_moves": 4}, '
                f"not {settings!r}"
            )
        known = [field.name for field in dataclasses.fields(cls)]
        for key in settings:
            if key not in known:
                raise ConfigError(
                    f'sipipe config: unknown key "microbatches.{key}" (known: {", ".join(known)})'
                )
        return cls(**settings)
