"""Made-up traces of a pipeline, with stock vLLM's order of work or SiPipe's.

For tests and benchmarks that need long timelines. The times are drawn, not measured.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sipipe.observe.format import CPU, RECORD, SUFFIX, Header, encode_header
from sipipe.observe.phases import WAIT_PHASES, Phase

_MS = 1_000_000
_CPU_STEP = 200 * _MS
_ORIGIN = 1_000 * _MS


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """The pipeline to make up; times in milliseconds."""

    stages: int = 4
    inflight: int = 4
    samplers: int = 2
    iterations: int = 2000
    stock: bool = False
    """Stock vLLM's order: prepare on the device's path, blocking hand-off, sampling on the last
    stage. Otherwise SiPipe's."""
    forward: float = 9.0
    prepare: float = 1.4
    transfer: float = 0.5
    sample: float = 3.0
    """Per microbatch: on the last stage of stock, by all samplers together otherwise."""
    batch: int = 32
    prefill_every: int = 90
    """Every so many iterations one carries a prefill chunk of 512 tokens."""


class _Process:
    def __init__(self, role: str, index: int, slots: int) -> None:
        self.role, self.index, self.slots = role, index, slots
        self.rows: list[tuple[int, int, int, int, int, int, int, int]] = []

    def add(self, phase: Phase, i: int, start: float, end: float, batch: int, tokens: int) -> None:
        self.rows.append((round(start), round(end), i, batch, tokens, phase, 0, i % self.slots))

    def write(self, directory: Path, spec: Example) -> None:
        """One trace file, with CPU samples made from the phases that use the CPU."""
        records = np.array(self.rows, RECORD)
        works = records[~np.isin(records["phase"], WAIT_PHASES)]
        edges = np.arange(0, records["end_ns"].max() + _CPU_STEP, _CPU_STEP)
        spent, _ = np.histogram(
            works["start_ns"], edges, weights=(works["end_ns"] - works["start_ns"]) / 1000
        )
        samples = np.zeros(len(spent), RECORD)
        samples["start_ns"], samples["end_ns"] = edges[:-1], edges[1:]
        samples["iteration"], samples["phase"] = spent, CPU
        every = np.concatenate([records, samples])
        every["start_ns"] += _ORIGIN
        every["end_ns"] += _ORIGIN
        header = Header(
            role=self.role,
            index=self.index,
            pid=os.getpid(),
            host="example",
            stages=spec.stages,
            inflight=spec.inflight,
            run="example",
            label="stock vLLM (made up)" if spec.stock else "SiPipe (made up)",
            model="made-up 70B",
            monotonic_ns=_ORIGIN,
            realtime_ns=_ORIGIN,
        )
        name = f"{self.role}-{self.index}-0-example{SUFFIX}"
        (directory / name).write_bytes(encode_header(header) + every.tobytes())


def write_example(directory: str | os.PathLike[str], spec: Example) -> None:
    """Write a trace directory for ``spec`` (files of an earlier example are replaced)."""
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    p = spec.stages
    executor = _Process("executor", 0, spec.inflight)
    stages = [_Process("stage", s, spec.inflight) for s in range(p)]
    drawing = 0 if spec.stock else spec.samplers
    samplers = [_Process("sampler", k, spec.inflight) for k in range(drawing)]
    draw = _noise(np.random.default_rng(0))
    skew = 1 + 0.04 * np.sin(np.arange(p) * 2.1)  # stages are never quite even
    free = [0.0] * p  # when a stage's device is free ...
    ready = [0.0] * p  # ... and when its preparation may go on
    sampler_free = [0.0] * len(samplers)
    done: list[float] = []
    now = 0.0
    for i in range(spec.iterations):
        prefill = spec.prefill_every and i % spec.prefill_every == spec.prefill_every - 1
        b, tokens = spec.batch, spec.batch + (512 if prefill else 0)
        if i >= spec.inflight:
            old = i - spec.inflight
            executor.add(Phase.GATHER, old, now, max(now, done[old]), b, b)
            now = max(now, done[old])
            end = now + draw(0.12)
            executor.add(Phase.UPDATE, old, now, end, b, b)
            now = end
        end = now + draw(0.18)
        executor.add(Phase.SCHEDULE, i, now, end, b, tokens)
        now = end + draw(0.04)
        executor.add(Phase.DISPATCH, i, end, now, b, tokens)
        hidden = now
        for s, stage in enumerate(stages):
            length = draw(spec.forward * skew[s] * (1.9 if prefill else 1.0)) + draw(0.05)
            idle = free[s] if spec.stock else ready[s]
            at = max(idle, now)
            stage.add(Phase.WAIT_SCHEDULING, i, idle, at, b, tokens)
            if spec.stock and s:
                stage.add(Phase.WAIT_HIDDEN, i, at, max(at, hidden), b, tokens)
                at = max(at, hidden)
            prepared = at + draw(spec.prepare)
            stage.add(Phase.PREPARE, i, at, prepared, b, tokens)
            if s and not spec.stock:
                begun = max(free[s], prepared)
                stage.add(Phase.WAIT_HIDDEN, i, begun, max(begun, hidden), b, tokens)
            start = max(free[s], prepared, hidden) + draw(0.02)
            end = start + length
            stage.add(Phase.FORWARD, i, start, end, b, tokens)
            ready[s] = start
            if s < p - 1:
                hidden = end + draw(spec.transfer if spec.stock else spec.transfer / 4)
                blocked = hidden if spec.stock else end + draw(0.02)
                stage.add(Phase.SEND, i, end, blocked, b, tokens)
                free[s] = blocked if spec.stock else end
                continue
            after = end + draw(0.6)
            stage.add(Phase.LOGITS, i, end, after, b, b)
            if spec.stock:
                free[s] = after + draw(spec.sample)
                stage.add(Phase.SAMPLE, i, after, free[s], b, b)
                done.append(free[s] + draw(0.1))
                continue
            free[s] = after
            ends = []
            for k, sampler in enumerate(samplers):
                begun = max(sampler_free[k], free[s])
                share = b // len(samplers)
                sampler.add(Phase.WAIT_LOGITS, i, sampler_free[k], begun, share, share)
                sampler_free[k] = begun + draw(spec.sample / len(samplers) / 6)
                sampler.add(Phase.SAMPLE, i, begun, sampler_free[k], share, share)
                ends.append(sampler_free[k])
            done.append(max(ends, default=free[s]) + draw(0.1))
    for process in (executor, *stages, *samplers):
        process.write(path, spec)


def _noise(rng: np.random.Generator) -> Callable[[float], float]:
    """Durations in ns that scatter by some percent around a mean in ms, drawn in blocks."""
    block: list[float] = []

    def draw(mean: float) -> float:
        if not block:
            block.extend((1 + 0.05 * np.abs(rng.standard_normal(4096))).tolist())
        return mean * _MS * block.pop()

    return draw
