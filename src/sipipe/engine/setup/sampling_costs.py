"""Choice of the place where tokens are drawn, on CPUs or on the last stage's device, for
``"cpu_sampling": "auto"``.

docs/gpu.md, "Who draws", describes what is measured and how it is compared. Where the device draws all
rows, nothing comes after the last stage.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from sipipe.messages.measured import MIXES
from sipipe.messages.period import passing, period

WORTH_IT = 0.03
"""Part of the time between two microbatches that a way has to save to be taken."""

WAYS = {
    "off": "vLLM's sampler draws on the last stage's device",
    "on": "CPU samplers draw",
    "per_row": "each row has its place, CPU samplers or the last stage's device",
}
"""Meaning of each setting of ``cpu_sampling``, the one that asks for least first."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of one microbatch, in seconds, as they were measured."""

    sequences: int
    """Sequences of the microbatch; with a draft head its rows, those of drafts included."""
    inflight: int
    """Microbatches in flight with CPU samplers, m."""
    stages: tuple[float, ...]
    """Seconds of each stage's layers."""
    projection: float
    """Seconds of the output projection as samplers need it, where each rank has its columns."""
    device: Mapping[str, float]
    """Seconds of the output projection, gathered, and of vLLM's sampler, by mix of parameters."""
    plain: Mapping[str, float]
    """Seconds of the output projection, gathered, and of the kernel that draws, by mixes of rows that
    ask for no more than a temperature. Where each row has its place, the device draws those."""
    copy: float
    """Seconds of the copy of the logits to where the samplers read them."""
    copied: int
    """Bytes of the logits."""
    draws: Mapping[str, float]
    """Seconds of all samplers at once, by mix."""
    head: float | None = None
    """Seconds of a draft head's passes on the last stage's device, behind the tokens; None: there is no
    head. Samplers verify all rows or none, so no row has its own place then."""

    def on_cpus(self, mix: str) -> float:
        """Seconds between two microbatches, with CPU samplers."""
        # A head's passes end the turn of a microbatch, and take the last stage's device as its layers do.
        return self._period(self.projection, self.copy, self.draws[mix])

    def per_row(self, mix: str) -> float:
        """Seconds between two microbatches where each row has its place."""
        return self._period(self.plain[mix]) if mix in self.plain else self.on_cpus(mix)

    def on_device(self, mix: str) -> float:
        """Seconds between two microbatches with vLLM's sampler on the last stage."""
        return self._period(self.device[mix])

    def _period(self, ending: float, *after: float) -> float:
        """Seconds between two microbatches, where the last stage's layers are followed by ``ending`` on
        the same device, and the stage by ``after``."""
        stages = (*self.stages[:-1], self.stages[-1] + ending + (self.head or 0.0))
        return period((*stages, *after), passing(stages) + sum(after), self.inflight)

    @property
    def ways(self) -> list[str]:
        """Ways to choose from, the one that asks for least first."""
        return [way for way in WAYS if self.head is None or way != "per_row"]

    @cached_property
    def periods(self) -> dict[str, list[float]]:
        """Seconds between two microbatches, by way and mix."""
        ways = {"off": self.on_device, "on": self.on_cpus, "per_row": self.per_row}
        return {way: [ways[way](mix) for mix in MIXES] for way in self.ways}

    @property
    def choice(self) -> str:
        """The setting to run with. A way takes the place of one that asks for less if it saves 3 % of
        the mean over all mixes, and costs no mix as much."""
        best, *candidates = self.ways
        for name in candidates:
            if self._is_worth_it(self.periods[name], self.periods[best]):
                best = name
        return best

    def _is_worth_it(self, periods: list[float], former: list[float]) -> bool:
        """True if a way with ``periods`` is to take the place of one with the ``former`` periods."""
        if statistics.fmean(periods) > statistics.fmean(former) * (1 - WORTH_IT):
            return False
        pairs = zip(periods, former, strict=True)
        return all(seconds <= before * (1 + WORTH_IT) for seconds, before in pairs)

    def __str__(self) -> str:
        """One line with the numbers and the choice."""
        names = {"on": "with CPU samplers", "per_row": "by row", "off": "with vLLM's sampler"}
        chosen_from = [name for name in names if name in self.ways]
        ways = [self.periods[name] for name in chosen_from]
        by_mix = zip(MIXES, zip(*ways, strict=True), strict=True)
        periods = "; ".join(f"{mix} {_ms(*times)}" for mix, times in by_mix)
        head = "" if self.head is None else f"the draft head {_ms(self.head)} ms, "
        rows = ", ".join(f"{self.draws[mix] / self.sequences * 1e6:.3g}" for mix in MIXES)
        return (
            f"cpu_sampling auto: {WAYS[self.choice]}. Measured at {self.sequences} sequences a "
            f"microbatch, ms expected between microbatches {', '.join(names[name] for name in chosen_from)}: "
            f"{periods}. Stages {_ms(*self.stages)} ms, {head}projection "
            f"{_ms(self.projection)} ms; projection and rows of no more than a temperature "
            f"{_ms(*self.plain.values())} ms; projection with vLLM's sampler "
            f"{_ms(*self.device.values())} ms; logits to the host {_ms(self.copy)} ms "
            f"({self.copied / self.copy / 1e9:.3g} GB/s); all samplers at once {rows} us a row"
        )


def _ms(*times: float) -> str:
    """Seconds as text in milliseconds."""
    return ", ".join(f"{seconds * 1e3:.3g}" for seconds in times)
