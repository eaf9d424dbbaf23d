"""A sampler process: column state of its sequences, kept from BIC-I; logits in, tokens out.

Who runs here
    The main thread follows BIC-I and draws. A watcher thread sleeps on standard input, which is a
    pipe held by the executor, and ends the process when it closes.
Guarantees
    State changes of an iteration are applied before its rows are drawn, and while its logits are
    still being computed. One sub-slot of BIC-O per iteration that has rows of this sampler.
Relies on
    BIC-I's order. A drawn token is not appended here: it comes back with the scheduling output
    that accepts it, so that state is always what vLLM's scheduler says, also after a restart.

The process imports neither torch nor vLLM: it starts in a second and stays small.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from sipipe.channels import ChannelClosed, ChannelError, DispatchReader, GatherSender, LogitsReader
from sipipe.sampling import SequenceColumns, warm_up
from sipipe.service.protocol import (
    Grammar,
    Kind,
    Logprobs,
    Sampled,
    Snapshot,
    Step,
    decode_grammar,
    decode_header,
    decode_step,
    encode,
    int32_bytes,
    int32_view,
)

__all__ = ["SamplerBoot", "main"]


@dataclass(frozen=True, kw_only=True)
class SamplerBoot:
    """What a sampler process starts from; endpoints are the channels' own."""

    index: int
    name: str
    incarnation: int
    bic_i: Any
    bic_l: Any
    bic_o: Any
    vocab_size: int
    logprobs_mode: str
    trace: str | None = None
    snapshot: Snapshot | None = None


class Sampler:
    """The loop of a sampler process."""

    def __init__(self, boot: SamplerBoot) -> None:
        self._index = boot.index
        self._steps = DispatchReader.open(boot.bic_i, boot.name)
        self._logits = LogitsReader.open(boot.bic_l, boot.name)
        self._tokens = GatherSender.connect(boot.bic_o, boot.name, boot.incarnation)
        self._columns = SequenceColumns(boot.vocab_size, logprobs_mode=boot.logprobs_mode)
        self._waiting: dict[int, Step] = {}
        if boot.snapshot is not None:
            self._restore(boot.snapshot)

    def run(self) -> None:
        """Serve until the executor closes BIC-I."""
        while True:
            step: Step | None = None
            grammar: Grammar | None = None
            with self._steps.receive() as message:
                header = decode_header(message.parts[0])
                if header.kind is Kind.SCHEDULE:
                    step = decode_step(message.parts[1])
                elif header.kind is Kind.GRAMMAR:
                    grammar = decode_grammar(message.parts[1])
            if step is not None:
                self._apply(step)
                self._offer(step)
            elif grammar is not None:
                waiting = self._waiting.pop(grammar.iteration, None)
                if waiting is not None:
                    self._draw(waiting, grammar)

    def close(self) -> None:
        for channel in (self._steps, self._logits, self._tokens):
            channel.close()

    def _restore(self, snapshot: Snapshot) -> None:
        for join in snapshot.joins:
            self._columns.join(
                join.handle, join.params, int32_view(join.prompt), int32_view(join.outputs)
            )
        grammars = {grammar.iteration: grammar for grammar in snapshot.grammars}
        for step in snapshot.steps:
            if step.iteration in grammars:
                self._draw(step, grammars[step.iteration])
            else:
                self._offer(step)

    def _offer(self, step: Step) -> None:
        """Draw the step, or keep it until its bitmask comes."""
        if self._index not in int32_view(step.owners):
            return
        if step.grammar:
            self._waiting[step.iteration] = step
        else:
            self._draw(step, None)

    def _apply(self, step: Step) -> None:
        columns = self._columns
        for handle in int32_view(step.leaves).tolist():
            columns.discard(handle)
        for join in step.joins:
            if join.sampler == self._index:
                columns.join(
                    join.handle, join.params, int32_view(join.prompt), int32_view(join.outputs)
                )
        handles, tokens = int32_view(step.appended), int32_view(step.tokens)
        for handle, token in zip(handles.tolist(), tokens.tolist(), strict=True):
            if handle in columns:
                columns.append(handle, token)

    def _draw(self, step: Step, grammar: Grammar | None) -> None:
        rows = np.flatnonzero(int32_view(step.owners) == self._index).astype(np.int32)
        handles = int32_view(step.rows)[rows]
        bitmask = bitmask_rows = None
        if grammar is not None and grammar.words:
            bitmask = int32_view(grammar.bitmask).reshape(-1, grammar.words)
            found = {handle: i for i, handle in enumerate(int32_view(grammar.handles).tolist())}
            bitmask_rows = np.asarray(
                [found.get(handle, -1) for handle in handles.tolist()], np.int32
            )
        with self._logits.receive(step.iteration) as slot:
            began = time.perf_counter()
            drawn = self._columns.sample(
                handles,
                slot.array,
                rows,
                layout=slot.layout,
                bitmask=bitmask,
                bitmask_rows=bitmask_rows,
            )
            seconds = time.perf_counter() - began
        sampled = Sampled(
            step.iteration,
            int32_bytes(rows),
            int32_bytes(drawn.token_ids),
            [
                Logprobs(
                    int(rows[i]),
                    int(lp.rank),
                    int32_bytes(lp.token_ids),
                    lp.logprobs.astype("<f4", copy=False).tobytes(),
                )
                for i, lp in drawn.logprobs.items()
            ],
            [(int(rows[i]), reason) for i, reason in drawn.errors.items()],
            seconds,
        )
        self._tokens.send(step.iteration, [encode(sampled)])


def read_boot(stream: BinaryIO) -> SamplerBoot | None:
    """The boot record from the executor's pipe; None when it closed the pipe instead."""
    size = int.from_bytes(stream.read(8), "little")
    data = stream.read(size) if size else b""
    if not size or len(data) < size:
        return None
    boot = pickle.loads(data)  # from our parent, through a pipe that nobody else can write
    assert isinstance(boot, SamplerBoot)
    return boot


def main() -> int:
    """Entry point: compile, say so on standard output, boot from standard input, serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the executor decides when to stop
    warm_up()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    boot = read_boot(sys.stdin.buffer)
    if boot is None:
        return 0

    def watch() -> None:
        sys.stdin.buffer.read(1)  # returns when the executor is gone
        os._exit(0)

    threading.Thread(target=watch, name="SiPipeParent", daemon=True).start()
    sampler = None
    try:
        sampler = Sampler(boot)
        sys.stdout.write("open\n")
        sys.stdout.flush()
        sampler.run()
    except ChannelClosed:
        pass
    except ChannelError as error:
        sys.stderr.write(f"SiPipe {boot.name}: {error}\n")
        return 1
    finally:
        if sampler is not None:
            sampler.close()
    return 0
