"""A sampler process: the state of its requests, kept from BIC-I; logits in, tokens out.

Who runs here
    The main thread follows BIC-I and draws; :class:`.Parent`'s ends the process with the engine.
Guarantees
    State changes of an iteration are applied, and its draws prepared, while its logits are still
    being computed. One answer on BIC-O per iteration that has rows of this sampler.
Relies on
    BIC-I's order. A drawn token is not appended here: it comes back with the scheduling output
    that accepts it, so that state is always what vLLM's scheduler says, also after a restart.
    BIC-L has an entry for every iteration that has rows, in BIC-I's order. This sampler passes over
    those in which it has none; after a restart BIC-L may begin later by such, which nobody kept.

A sampler that takes another's place adds each request, and draws each row that is owed, alone, and
says before which it is: if one ends it, or hangs it, the engine knows which.

The process imports neither torch nor vLLM: it starts in a second and stays small.
"""

import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from sipipe.best_effort import BestEffort
from sipipe.cores import run_soon
from sipipe.errors import SiPipeError
from sipipe.ipc.errors import ChannelClosed
from sipipe.ipc.gather import GatherSender
from sipipe.ipc.parent import Parent
from sipipe.ipc.ring.dispatch import DispatchReader
from sipipe.ipc.ring.logits import LogitsReader, ReceivedLogits
from sipipe.messages.header import Kind, decode_header
from sipipe.messages.replies import Ready, Trying, Warm
from sipipe.messages.start_records import SPARE, SamplerBoot, sampler_name
from sipipe.messages.step import (
    Added,
    Grammar,
    Logprobs,
    Sampled,
    Snapshot,
    Step,
    decode_grammar,
    decode_step,
    encode,
    int32_bytes,
    int32_view,
)
from sipipe.observe.phases import Phase
from sipipe.observe.recorder import record_process
from sipipe.sampler.drafts import drafter, warm_up_ngrams
from sipipe.sampler.kernels.rows import NOT_DRAWN
from sipipe.sampler.result import SampleResult
from sipipe.sampler.state import SequenceColumns, ahead_of
from sipipe.sampler.warmup import measure, warm_up

FRAME_LOGPROBS = 1 << 20
"""Logprobs of one frame of an answer, 8 bytes each, and one sequence's more: what bounds a sampler's
memory when many requests ask for the whole vocabulary."""


class Sampler:
    """The loop of a sampler process."""

    def __init__(
        self, boot: SamplerBoot, tokens: GatherSender, say: Callable[[Trying], None]
    ) -> None:
        settings = boot.settings
        self._index = boot.index
        self._slot = 0
        self._steps = DispatchReader(boot.bic_i, sampler_name(boot.index))
        self._logits = LogitsReader(boot.bic_l, sampler_name(boot.index))
        self._entry: ReceivedLogits | None = None
        """The entry of BIC-L that was received last."""
        self._tokens = tokens
        self._columns = SequenceColumns(
            settings.vocab_size,
            logprobs_mode=settings.logprobs_mode,
            reasoning_start_token_ids=settings.reasoning[0],
            reasoning_end_token_ids=settings.reasoning[1],
            natural_reasoning_end_token_ids=settings.reasoning[2],
        )
        self._drafter = drafter(settings.speculation, settings.vocab_size)
        self._drafting = BestEffort("proposing drafts", bounded=False)
        self._say = say
        self._owed = -1
        """The last iteration that a predecessor left."""
        self._waiting: Step | None = None
        self._broken: dict[int, str] = {}
        """Requests that no sampler can draw for, and why: their rows are errors, others go on."""
        self._recorder = record_process(settings.watched, "sampler", boot.index)

    def run(self, snapshot: Snapshot | None) -> None:
        """Serve until the engine closes BIC-I; first what a predecessor owed."""
        if snapshot is not None:
            self._restore(snapshot)
        while True:
            step: Step | None = None
            grammar: Grammar | None = None
            with self._steps.receive() as message:
                header = decode_header(message.parts[0])
                self._slot = header.slot
                if header.kind is Kind.SCHEDULE:
                    step = decode_step(message.parts[1])
                elif header.kind is Kind.GRAMMAR:
                    grammar = decode_grammar(message.parts[1])
            if step is not None:
                self._apply(step)
                self._offer(step)
            elif grammar is not None and self._waiting is not None:
                waiting, self._waiting = self._waiting, None
                assert waiting.iteration == grammar.iteration
                self._draw(waiting, grammar)

    def close(self) -> None:
        for channel in (self._steps, self._logits, self._tokens):
            channel.close()
        self._recorder.close()

    def _restore(self, snapshot: Snapshot) -> None:
        for added in snapshot.added:
            self._say(Trying(added.handle))
            self._add(added)
        self._say(Trying(None))
        self._owed = max((step.iteration for step in snapshot.steps), default=-1)
        grammars = {grammar.iteration: grammar for grammar in snapshot.grammars}
        for step in snapshot.steps:
            if step.iteration in grammars:
                self._draw(step, grammars[step.iteration])
            else:
                self._offer(step)
        if self._waiting is None:
            self._logits.catch_up()

    def _offer(self, step: Step) -> None:
        """Draw the step, or keep it until its bitmask comes, which is the next message for us."""
        assert self._waiting is None
        if not step.rows:
            return
        if step.grammar:
            self._waiting = step
        else:
            self._draw(step, None)

    def _apply(self, step: Step) -> None:
        columns = self._columns
        for handle in int32_view(step.removed).tolist():
            columns.discard(handle)
            self._drafter.leave(handle)
            self._broken.pop(handle, None)
        for added in step.added:
            if added.sampler == self._index:
                self._add(added)
        appended, accepted = int32_view(step.appended), int32_view(step.tokens)
        sent = zip(appended.tolist(), accepted.tolist(), strict=True)
        if mine := [(handle, token) for handle, token in sent if handle in columns]:
            handles, tokens = [handle for handle, _ in mine], [token for _, token in mine]
            columns.append(handles, tokens)
            self._drafter.append(handles, tokens)

    def _add(self, added: Added) -> None:
        try:
            if added.error:
                raise ValueError(added.error)
            prompt, outputs = int32_view(added.prompt), int32_view(added.outputs)
            self._columns.join(added.handle, added.params, prompt, outputs)
            self._drafter.join(added.handle, prompt, outputs)
        except ValueError as error:
            self._broken[added.handle] = str(error)

    def _draw(self, step: Step, grammar: Grammar | None) -> None:
        rows = np.flatnonzero(int32_view(step.owners) == self._index).astype(np.int32)
        handles = int32_view(step.rows)[rows]
        follows = int32_view(step.follows)[rows] if step.follows else None
        errors: list[tuple[int, str]] = []
        alone = step.iteration <= self._owed
        owned = len(rows)
        if alone:  # a snapshot may owe a row of a request that was aborted, which nobody waits for
            known = [h in self._columns or h in self._broken for h in handles.tolist()]
            rows, handles, follows = _chosen(np.asarray(known, bool), rows, handles, follows)
        if self._broken:
            broken = np.asarray([handle in self._broken for handle in handles.tolist()], bool)
            theirs = zip(rows[broken].tolist(), handles[broken].tolist(), strict=True)
            errors = [(row, self._broken[handle]) for row, handle in theirs]
            rows, handles, follows = _chosen(~broken, rows, handles, follows)
        bitmask, bitmask_rows = None, np.full(len(rows), -1, np.int32)
        if grammar is not None and grammar.words:
            bitmask = int32_view(grammar.bitmask).reshape(-1, grammar.words)
            masked = int32_view(grammar.handles)
            begins = np.flatnonzero(np.diff(masked, prepend=-1))
            found = dict(zip(masked[begins].tolist(), begins.tolist(), strict=True))
            bitmask_rows[:] = [found.get(handle, -1) for handle in handles.tolist()]
            if follows is not None:
                bitmask_rows += np.where(bitmask_rows < 0, 0, ahead_of(follows)).astype(np.int32)
        shares = self._columns.shares(handles, 0 if alone else FRAME_LOGPROBS)

        def prepared() -> Iterator[Callable[[npt.NDArray[Any]], SampleResult]]:
            for part in shares:
                if alone and len(part):
                    self._say(Trying(int(handles[part[0]])))
                yield self._columns.prepare(
                    handles[part],
                    rows[part],
                    bitmask=bitmask,
                    bitmask_rows=bitmask_rows[part],
                    follows=None if follows is None else follows[part],
                )

        draws = prepared()
        # While the logits are computed; not where requests are tried alone: a death while this one
        # waits for logits is no request's doing.
        first = [] if alone else [next(draws)]
        waited = time.monotonic_ns()
        entry = self._logits_of(step.iteration)
        began = time.monotonic_ns()
        self._record(Phase.WAIT_LOGITS, step, waited, began, len(rows))
        if not owned:
            if entry is not None:
                with entry:  # pass it over
                    return
            return
        if entry is None and alone:  # the predecessor had answered, and all others have since
            self._say(Trying(None))
            return
        assert entry is not None, "logits of this sampler's rows were not kept"
        with entry:
            for part, draw in zip(shares, chain(first, draws), strict=True):
                drawn = draw(entry.array)
                asked = handles[part], rows[part], drawn.token_ids, step.worth
                drafts = self._drafting([], self._drafter.propose, *asked)
                if more := part is not shares[-1]:
                    self._send(step.iteration, rows[part], drawn, [], drafts, more)
        if alone:
            self._say(Trying(None))
        self._record(Phase.SAMPLE, step, began, time.monotonic_ns(), len(rows))
        self._send(step.iteration, rows[part], drawn, errors, drafts, more)

    def _send(
        self,
        iteration: int,
        rows: npt.NDArray[np.int32],
        drawn: SampleResult,
        errors: list[tuple[int, str]],
        drafts: list[tuple[int, bytes]],
        more: bool,
    ) -> None:
        there = drawn.token_ids != NOT_DRAWN
        logprobs = []
        for i, found in drawn.logprobs.items():
            values = found.logprobs.astype("<f4", copy=False).tobytes()
            token_ids = int32_bytes(found.token_ids)
            logprobs.append(Logprobs(int(rows[i]), int(found.rank), token_ids, values))
        failed = [*errors, *((int(rows[i]), reason) for i, reason in drawn.errors.items())]
        tokens = int32_bytes(rows[there]), int32_bytes(drawn.token_ids[there])
        sampled = Sampled(iteration, *tokens, logprobs, failed, drafts)
        self._tokens.send(iteration, encode(sampled), more=more)

    def _record(self, phase: Phase, step: Step, start: int, end: int, rows: int) -> None:
        self._recorder.record(phase, step.iteration, self._slot, start, end, rows, rows)

    def _logits_of(self, iteration: int) -> ReceivedLogits | None:
        """The entry of ``iteration``; None if BIC-L began later for this sampler."""
        while self._entry is None or self._entry.iteration < iteration:
            self._entry = self._logits.receive()
        return self._entry if self._entry.iteration == iteration else None


def _chosen(which: npt.NDArray[np.bool_], *arrays: Any) -> Iterator[Any]:
    """Those entries of each of ``arrays``, of which some may be None."""
    return (None if array is None else array[which] for array in arrays)


def show(name: str) -> None:
    """As what `ps` and `top` show this process; as in vLLM, the whole only where a library is."""
    with suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write(name)
    with suppress(ImportError):
        from setproctitle import setproctitle

        setproctitle(f"sipipe.sampler {name}")


def main(parent: Parent, tokens: str, dtype: str, name: str) -> int:
    """Be a sampler; the arguments are those of :mod:`sipipe.sampler.__main__`."""
    sender = GatherSender(socket.socket(fileno=int(tokens)))
    show(name)
    warm_up([dtype])
    warm_up_ngrams()
    if name == SPARE:
        parent.say(Warm())
    boot: SamplerBoot = parent.receive()
    show(sampler_name(boot.index))
    sampler = None
    try:
        sampler = Sampler(boot, sender, parent.say)
        measured = {}
        if boot.measure:
            measured = measure(boot.measure, boot.settings.vocab_size, boot.bic_l.shape.dtype)
        parent.say(Ready(measured))
        run_soon()
        sampler.run(boot.snapshot)
    except (ChannelClosed, SystemExit):
        pass
    except SiPipeError as error:
        sys.stderr.write(f"SiPipe {sampler_name(boot.index)}: {error}\n")
        return 1
    finally:
        parent.let_end()
        if sampler is not None:
            sampler.close()
    return 0
