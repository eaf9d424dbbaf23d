"""Where tokens are drawn, on CPUs or on the last stage's device: ``"cpu_sampling": "auto"``.

Every way is set up and measured on the loaded model, with max_num_seqs / m sequences a microbatch,
and the times between two microbatches compared (:mod:`sipipe.messages.period`; docs/gpu.md has the
model). Where the device draws all rows nothing comes after the last stage, and a round over m is
never above the slowest stage.

What all ways have alike is left out: attention over a context, scheduling, links.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sipipe.engine.layers.cut import layer_split
from sipipe.messages.measured import MIXES
from sipipe.messages.period import passing, period

WORTH_IT = 0.03
"""Part of the time between two microbatches that a way has to save to be taken."""

Layers = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of one microbatch."""

    sequences: int
    """Of the microbatch."""
    inflight: int
    """Microbatches in flight with CPU samplers, m."""
    layers: Layers
    """Decoder layers of each stage, as they are loaded."""
    stages: tuple[float, ...]
    """Each stage's layers."""
    projection: float
    """The output projection as samplers need it, each rank its columns."""
    device: Mapping[str, float]
    """The output projection, gathered, and vLLM's sampler, by mix of parameters."""
    plain: Mapping[str, float]
    """The output projection, gathered, and the kernel that draws, by mixes of rows that ask for no
    more than a temperature: those that are drawn on the device where each row has its place."""
    copy: float
    """Logits to where the samplers read them."""
    copied: int
    """Bytes of the logits."""
    draws: Mapping[str, float]
    """All samplers at once, by mix."""

    def on_cpus(self, layers: Layers, mix: str) -> float:
        """Seconds between two microbatches, with CPU samplers and this cut."""
        stages, after = self._stages(layers, self.projection), (self.copy, self.draws[mix])
        return period((*stages, *after), passing(stages) + sum(after), self.inflight)

    def per_row(self, layers: Layers, mix: str) -> float:
        """The same where each row has its place."""
        if mix not in self.plain:
            return self.on_cpus(layers, mix)
        return max(self._stages(layers, self.plain[mix]))

    def on_device(self, layers: Layers, mix: str) -> float:
        """The same with vLLM's sampler on the last stage."""
        return max(self._stages(layers, self.device[mix]))

    def _stages(self, layers: Layers, ending: float) -> list[float]:
        """Stage times if the layers were cut like this, at each stage's own speed."""
        moved = zip(self.stages, layers, self.layers, strict=True)
        stages = [seconds * here / loaded for seconds, here, loaded in moved]
        stages[-1] += ending
        return stages


@dataclass(frozen=True, kw_only=True)
class Way:
    """Where tokens are drawn, under the cut that suits it best."""

    layers: Layers
    periods: dict[str, float]
    """Seconds between two microbatches, by mix."""
    loaded: float
    """Their mean under the cut that is loaded."""

    @property
    def mean(self) -> float:
        return statistics.fmean(self.periods.values())


WAYS = {
    "off": "vLLM's sampler draws on the last stage's device",
    "on": "CPU samplers draw",
    "per_row": "each row has its place, CPU samplers or the last stage's device",
}
"""What each setting of ``cpu_sampling`` means, the one that asks for least first."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What was measured, and what follows."""

    costs: Costs
    cpus: Way
    rows: Way
    device: Way

    @property
    def draws(self) -> str:
        """The setting to go on with: of :data:`WAYS` the next one where it saves 3 % in the mean
        and costs as much with no mix."""
        found = "off"
        for name in ("on", "per_row"):
            way, other = self._way(name), self._way(found)
            if way.mean <= other.mean * (1 - WORTH_IT) and all(
                way.periods[mix] <= other.periods[mix] * (1 + WORTH_IT) for mix in MIXES
            ):
                found = name
        return found

    def _way(self, name: str) -> Way:
        return {"off": self.device, "on": self.cpus, "per_row": self.rows}[name]

    def __str__(self) -> str:
        """One line with the numbers and the choice."""
        costs, ways = self.costs, (self.cpus, self.rows, self.device)
        draws = self.draws
        periods = "; ".join(f"{m} {_ms(*(way.periods[m] for way in ways))}" for m in MIXES)
        rows = ", ".join(f"{costs.draws[mix] / costs.sequences * 1e6:.3g}" for mix in MIXES)
        line = (
            f"cpu_sampling auto: {WAYS[draws]}. Measured at {costs.sequences} sequences a "
            "microbatch, ms between microbatches with CPU samplers, by row, and with vLLM's "
            f"sampler, with layers {', '.join(str(list(way.layers)) for way in ways)}: {periods}. "
            f"Stages {_ms(*costs.stages)} ms, projection {_ms(costs.projection)} ms; projection and "
            f"rows of no more than a temperature {_ms(*costs.plain.values())} ms; projection with "
            f"vLLM's sampler {_ms(*costs.device.values())} ms; logits to the host "
            f"{_ms(costs.copy)} ms ({costs.copied / costs.copy / 1e9:.3g} GB/s); all samplers at "
            f"once {rows} us a row"
        )
        way = self._way(draws)
        if way.mean > way.loaded * (1 - WORTH_IT):
            return line
        saved = f"{1 - way.mean / way.loaded:.0%}"
        return f'{line}; "layers": {list(way.layers)} would save {saved} of that (KV cache aside)'


def choose(costs: Costs, *, recut: bool) -> Choice:
    """Compare the ways, each under its best cut; ``recut``: the user has not fixed the cut."""
    cuts, stages, total = [costs.layers], len(costs.layers), sum(costs.layers)
    if recut and stages > 1:
        # Of equally good ones the first counts: the one that is loaded, then those like it.
        lasts = sorted(range(1, total - stages + 2), key=lambda last: abs(last - costs.layers[-1]))
        cuts += [(*layer_split(total - last, stages - 1), last) for last in lasts]

    def best(period: Callable[[Layers, str], float]) -> Way:
        loaded = statistics.fmean(period(costs.layers, mix) for mix in MIXES)
        ways = (
            Way(layers=cut, periods={mix: period(cut, mix) for mix in MIXES}, loaded=loaded)
            for cut in cuts
        )
        return min(ways, key=lambda way: way.mean)

    return Choice(
        costs=costs,
        cpus=best(costs.on_cpus),
        rows=best(costs.per_row),
        device=best(costs.on_device),
    )


def _ms(*seconds: float) -> str:
    return ", ".join(f"{each * 1e3:.3g}" for each in seconds)
