"""The output projection shared out against the best cut of the layers, on emulated devices.

    python -m benchmarks.vocabulary_emulated [sockets|gpus] [--quick] [--requests 64] [--slower 4]

``gpus``: ``sipipe emulate`` with either, an engine each, in slow motion, so that two cores can drive
the stages; p + 1 microbatches in flight. ``sockets``: a stage is what it is on CPUs (device thread, links, its part of the product in pieces, BIC-L), but
a forward pass or a piece only takes the time that the planner computes for it, as a thread that
sleeps. All stages are threads of this process; one more thread takes the logits and hands the next
iteration out when drawing and scheduling would be done. So this says in which order stages work and
wait at four and eight sockets, and nothing of what the engine's own processes cost.
"""

from __future__ import annotations

import argparse
import itertools
import socket
import threading
import time
from collections.abc import Callable, Sequence
from queue import Queue
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sipipe.worker.steps import StageSteps

from benchmarks.emulation import emulated
from benchmarks.harness import report
from sipipe.cli.emulate import BUSY
from sipipe.engine.layers.cut import fill, kv_lost, layer_split
from sipipe.ipc.link.endpoint import open_receiver, open_sender
from sipipe.ipc.ring.logits import LogitsChannel, LogitsReader, LogitsWriter
from sipipe.messages.link import LinkEndpoint
from sipipe.messages.logits import LogitsShape
from sipipe.observe.phases import DEVICE_PHASES
from sipipe.tools.emulation.emulate import emulation
from sipipe.tools.planner import hardware
from sipipe.tools.planner.costs import DatasheetCosts, datasheet_costs
from sipipe.tools.planner.hardware import Cluster
from sipipe.tools.planner.models import load_model
from sipipe.tools.planner.placement import Placement, place
from sipipe.tools.planner.workload import Microbatch, Workload
from sipipe.worker.double_buffer import DoubleBuffer
from sipipe.worker.head import PIECE
from sipipe.worker.logits import LogitsHandover
from sipipe.worker.vocabulary import SharedHead

MODELS, STAGES, DEVICE = ("llama-3.1-8b", "qwen2.5-7b"), (4, 8), "xeon-8468"
GPUS = (
    ("llama-8b-4xh100", 4, 8),
    ("llama-8b-8xh100", 8, 16),
    ("qwen2.5-7b-4xh100", 4, 8),
    ("qwen2.5-7b-8xh100", 8, 16),
)
"""Profile, stages, how many times as long devices take."""
VOCABULARY, HIDDEN, CONTEXT = 640, 16, 1000
"""Columns and sizes of what is really sent (times are of the true ones), and tokens behind each."""
BETWEEN = 2e-3
"""Seconds from the last logits to the next scheduling output: assumed."""
WARM, COUNTED = 3, 12
"""Rounds, in which each microbatch gets a token, before and while time is taken."""
BOUND = 60


class Device:
    """The layers and the product of a stage, in seconds by rows."""

    def __init__(self, costs: DatasheetCosts, stage: Any, slower: float) -> None:
        self._costs, self._stage, self._slower = costs, stage, slower
        self.first, self.head = stage.is_first, None
        self._multiplied = 0.0
        one, many = self.seconds(1)[1], self.seconds(33)[1]
        self.per_row = (many - one) / 32
        self.fixed = one - self.per_row
        bytes_ = costs.facts.embedding_parameters * costs.facts.activation_bytes * stage.head
        width = round(VOCABULARY * stage.head) or 1
        count = min(width, max(1, -int(-bytes_ // (PIECE * max(1, costs.cluster.device.cores)))))
        edges = np.linspace(0, width, count + 1).astype(int).tolist()
        self.pieces = [slice(*pair) for pair in itertools.pairwise(edges)]

    def seconds(self, rows: int) -> tuple[float, float]:
        """Of the layers, and of the product."""
        work = Microbatch(batch=rows, tokens=rows, context=CONTEXT)
        parts = self._costs.forward(self._stage, work, gather=False)
        head = parts["logits"] * self._slower
        return sum(parts.values()) * self._slower - head, head

    def joins(self, rows: int) -> bool:
        return self.per_row * rows <= self.fixed

    def compute(self, rows: torch.Tensor, piece: int = 0, into: Any = None) -> torch.Tensor:
        parts = len(self.pieces) if into is not None else 1
        seconds = self.seconds(len(rows))[1] / parts
        self._multiplied += seconds
        time.sleep(seconds)
        columns = self.pieces[piece]
        return torch.zeros(len(rows), columns.stop - columns.start) if into is None else into

    def prepare(self, rows: int, slot: int, buffer_set: int, iteration: int) -> Any:
        del buffer_set
        return SimpleNamespace(
            iteration=iteration, slot=slot, sampled=np.arange(rows), num_tokens=rows,
            num_reqs=rows, prompt_chunks=(),
        )  # fmt: skip

    def forward(
        self, inputs: Any, _: Any, between: Callable[[float], None] = lambda _: None
    ) -> dict[str, torch.Tensor]:
        layers, each = self._stage.layers, self.seconds(inputs.num_tokens)[0] / self._stage.layers
        ends = time.monotonic()
        for layer in range(layers):
            before = self._multiplied
            between(1 - layer / layers)
            # Stages share this process: what one loses to others' threads it does not lose to a pass.
            ends += each + self._multiplied - before
            time.sleep(max(0.0, ends - time.monotonic()))
        return {"hidden_states": torch.zeros(inputs.num_tokens, HIDDEN)}

    def rows(self, _: Any, hidden: dict[str, torch.Tensor]) -> torch.Tensor:
        return hidden["hidden_states"]


def link() -> tuple[Any, Any]:
    endpoint = LinkEndpoint(kind="shm", buffer_tokens=512, depth=12, stall_timeout=BOUND)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return open_sender(endpoint, ours), open_receiver(endpoint, theirs)


class Whole:
    """The last stage's own product, of all columns."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def compute(self, hidden: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        time.sleep(self._device.seconds(len(hidden))[1])
        return into


def run(
    costs: DatasheetCosts, placement: Placement, microbatches: int, requests: int, slower: float
) -> tuple[float, list[float]]:
    """Seconds in which each request gets a token, and the share in which each stage is busy."""
    p, shared, rows = placement.p, placement.shares_head, -(-requests // microbatches)
    devices = [Device(costs, stage, slower) for stage in placement.stages]
    widths = [device.pieces[-1].stop for device in devices] if shared else [VOCABULARY]
    shape = LogitsShape(vocab=sum(widths), bounds=(0, *itertools.accumulate(widths)))
    channel = LogitsChannel(
        "emulated", shape, rows=rows * (microbatches + 1), entries=microbatches + 2, readers=["s"]
    )
    links = [link() for _ in range(p - 1)]
    heads = [link() for _ in range(p - 1)] if shared else []
    busy = [0] * p
    stages: list[Any] = []
    handovers = []
    for index, device in enumerate(devices):

        def record(phase: Any, inputs: Any, began: int, ended: int = 0, s: int = index) -> None:
            if phase in DEVICE_PHASES and inputs.iteration >= WARM * microbatches:
                busy[s] += (ended or time.monotonic_ns()) - began

        last = index == p - 1
        writes = shared or last
        handover = None
        if writes:
            writer = LogitsWriter(channel.endpoint, index if shared else 0)
            handovers.append(handover := LogitsHandover(writer))
        steps = StageSteps(
            device,  # type: ignore[arg-type]
            Whole(device) if last else None,  # type: ignore[arg-type]
            links[index - 1][1] if index else None,
            None if last else links[index][0],
            handover,
            report=None,
            record=record,
            stall_timeout=BOUND,
        )
        device.prompt_logprobs = lambda *_: {}  # type: ignore[attr-defined]
        if shared:
            final = [ends[0] for ends in heads] if last else []
            mine = None if last else heads[index][1]
            assert handover is not None
            steps.shared = SharedHead(final, mine, device, handover, record, BOUND)  # type: ignore[arg-type]
        buffer = DoubleBuffer(
            steps, sets=2, stall_timeout=BOUND,
            interrupt=steps.interrupt, meanwhile=steps.meanwhile,
        )  # fmt: skip
        stages.append((buffer, handover, Queue()))
    seconds = _drive(stages, channel, microbatches, rows, slower)
    for ends in links + heads:
        for end in ends:
            end.close()
    for handover in handovers:
        handover.close()
    channel.close()
    return seconds / COUNTED / slower, [share / 1e9 / seconds for share in busy]


def _drive(
    stages: Sequence[Any], channel: LogitsChannel, microbatches: int, rows: int, slower: float
) -> float:
    """Seconds of the rounds that count."""

    def follow(buffer: DoubleBuffer, handover: LogitsHandover | None, orders: Queue[Any]) -> None:
        while (order := orders.get()) is not None:
            iteration, ready = order
            time.sleep(max(0.0, ready - time.monotonic()))
            if handover is not None:
                handover.expect(iteration, iteration % (microbatches + 1) * rows)
            buffer.prepare(iteration, 0, rows)

    threads = [
        threading.Thread(target=target, args=args, daemon=True)
        for stage in stages
        for target, args in ((follow, stage), (stage[0].run, ()))
    ]
    for thread in threads:
        thread.start()
    reader = LogitsReader(channel.endpoint, "s")
    began = 0.0
    total = (WARM + COUNTED) * microbatches

    def order(iteration: int, ready: float) -> None:
        for *_, orders in stages:
            orders.put((iteration, ready))

    for iteration in range(microbatches):
        order(iteration, 0.0)
    for iteration in range(total):
        with reader.receive():
            pass
        now = time.monotonic()
        if iteration + 1 == WARM * microbatches:
            began = now
        if iteration + microbatches < total:
            order(iteration + microbatches, now + BETWEEN * slower)
    seconds = time.monotonic() - began
    for buffer, _, orders in stages:
        orders.put(None)
        buffer.close()
    for thread in threads:
        thread.join(BOUND)
    reader.close()
    return seconds


def cuts(
    costs: DatasheetCosts, p: int, rows: int
) -> dict[str, tuple[tuple[int, ...], tuple[float, ...]]]:
    """Layers of the stages and parts of the projection, by what microbatches of ``rows`` take."""
    layers = costs.facts.layers

    def times(cut: tuple[int, ...], heads: tuple[float, ...] = ()) -> list[tuple[float, float]]:
        stages = place(layers, p, 1, p, cut, heads).stages
        return [Device(costs, stage, 1.0).seconds(rows) for stage in stages]

    even = layer_split(layers, p)
    uneven = [(*layer_split(layers - last, p - 1), last) for last in range(even[-1], 0, -1)]
    best = min(uneven, key=lambda cut: max(map(sum, times(cut))))
    parts, _ = fill([stage[0] for stage in times(even)], [times(even)[-1][1]] * p)
    return {"even layers": (even, ()), "best cut": (best, ()), "shared": (even, parts)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", nargs="?", choices=("sockets", "gpus"), help="default: both")
    parser.add_argument("--quick", action="store_true", help="the first model at four stages")
    parser.add_argument("--requests", type=int, default=64, help="decoding (default: 64)")
    parser.add_argument("--slower", type=float, default=4, help="stretches all times (default: 4)")
    args = parser.parse_args()
    if args.what != "gpus":
        _sockets(args)
    if args.what != "sockets":
        _gpus(args)


def _gpus(args: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    for profile, p, slow in GPUS[: 1 if args.quick else None]:
        made = emulation(profile, p, jitter=0.0)
        costs = datasheet_costs(made.facts, made.cluster, Workload())
        even, best = (
            cuts(costs, p, args.requests // p)[title][0] for title in ("even layers", "best cut")
        )
        usual = tuple(stage.layers for stage in made.placement.stages)
        ways = {
            f"best cut {best}": f"--layers {','.join(map(str, best))}",
            f"default cut {usual}": "",
            f"shared {even}": "--vocabulary shared",
        }
        base: dict[int, float] = {}
        for title, way in ways.items():
            counts = [args.requests, 2 * args.requests]
            options = f"--profile {profile} --pp {p} {way} --jitter 0.02"
            options += f" --slow-motion {slow} --requests {counts[0]},{counts[1]}"
            result = emulated(options, tokens=60)
            for requests, load in zip(counts, result["loads"], strict=True):
                speed = slow * load["tokens_per_s"]
                base.setdefault(requests, speed)
                rows.append(
                    {
                        "profile": f"{profile} --pp {p}",
                        "engine": title,
                        "requests": requests,
                        "slow motion": slow,
                        "tokens/s at full speed": round(speed),
                        "of the best cut": round(speed / base[requests], 2),
                        "KV cache tokens": result["profile"]["kv_tokens"],
                        "stages busy, %": ", ".join(f"{100 * s:.0f}" for s in load["busy_share"]),
                        "this machine's cores busy, %": round(100 * load["busy"]),
                        "": "VOID" if load["busy"] > BUSY else "valid",
                    }
                )
    report(
        "vocabulary_emulated",
        "Emulated H100, p + 1 microbatches in flight, while all requests decode",
        rows,
        note="slow motion: devices take so many times as long, tokens/s are multiplied by it; "
        "pass times deviate by 2 %; a product and a pass of one GPU run at half their speed beside one another; VOID: the machine "
        "was too busy to emulate",
        file="vocabulary-gpus",
    )


def _sockets(args: argparse.Namespace) -> None:
    rows = []
    for name, p in list(itertools.product(MODELS, STAGES))[: 1 if args.quick else None]:
        facts = load_model(name)
        cluster = Cluster(
            device=hardware.device(DEVICE), hosts=1, devices_per_host=p,
            network=hardware.network(400.0), cores_per_host=400,
        )  # fmt: skip
        costs = datasheet_costs(facts, cluster, Workload())
        base = 0.0
        for title, (cut, heads) in cuts(costs, p, args.requests // p).items():
            placement = place(facts.layers, p, 1, p, cut, heads)
            found = {
                k: run(costs, placement, k, args.requests, args.slower) for k in (p - 1, p, p + 1)
            }
            k = min(found, key=lambda k: found[k][0])
            seconds, busy = found[k]
            base = seconds if title == "best cut" else base
            rows.append(
                {
                    "model": name,
                    "p": p,
                    "engine": f"{title} ({', '.join(map(str, cut))})",
                    "microbatches": k,
                    "ms a token": round(seconds * 1e3, 1),
                    "of the best cut": round(base / seconds, 2) if base else "",
                    "KV cache of even": f"{1 - kv_lost(facts, cut):.0%}",
                    "stages busy, %": f"{min(busy):.0%}-{max(busy):.0%}".replace("%", ""),
                }
            )
    report(
        "vocabulary_emulated",
        f"Emulated {DEVICE} sockets, {args.requests} decoding requests of {CONTEXT} tokens",
        rows,
        note=f"times by data sheet; {BETWEEN * 1e3:g} ms between logits and the next iteration",
        file="vocabulary-sockets",
    )


if __name__ == "__main__":
    main()
