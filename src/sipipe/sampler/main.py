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
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from sipipe.best_effort import BestEffort
from sipipe.core_binding import run_soon
from sipipe.errors import SiPipeError, say
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
from sipipe.sampler.rows_of_step import RowsOfStep, bitmask_of
from sipipe.sampler.state import SequenceColumns
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
                waiting = self._waiting
                self._waiting = None
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
            self._drafting(None, self._drafter.leave, handle)
            self._broken.pop(handle, None)
        for added in step.added:
            if added.sampler == self._index:
                self._add(added)
        appended = int32_view(step.appended).tolist()
        accepted = int32_view(step.tokens).tolist()
        mine = [
            (handle, token)
            for handle, token in zip(appended, accepted, strict=True)
            if handle in columns
        ]
        if mine:
            handles = [handle for handle, _ in mine]
            tokens = [token for _, token in mine]
            columns.append(handles, tokens)
            self._drafting(None, self._drafter.append, handles, tokens)

    def _add(self, added: Added) -> None:
        try:
            if added.error:
                raise ValueError(added.error)
            prompt = int32_view(added.prompt)
            outputs = int32_view(added.outputs)
            self._columns.join(added.handle, added.params, prompt, outputs)
        except ValueError as error:
            self._broken[added.handle] = str(error)
            return
        self._drafting(None, self._drafter.join, added.handle, prompt, outputs)

    def _draw(self, step: Step, grammar: Grammar | None) -> None:
        """Draw this sampler's rows of an iteration and send its answer.

        Where this sampler owes the iteration for a dead one, requests are drawn one by one, and each
        is named before: if one ends this process too, the engine knows which.
        """
        one_by_one = step.iteration <= self._owed
        owned = RowsOfStep.owned_by(self._index, step)
        rows = owned.subset(self._is_known(owned)) if one_by_one else owned
        broken = self._is_broken(rows)
        errors = self._errors_of(rows.subset(broken))
        rows = rows.subset(~broken)
        bitmask = bitmask_of(grammar)
        if grammar is not None and bitmask is not None:
            rows = rows.restricted_by(grammar)
        shares = self._columns.shares(rows.handles, 0 if one_by_one else FRAME_LOGPROBS)
        parts = [rows.subset(share) for share in shares]
        # What needs no logits is done while they are computed; not where requests are tried one_by_one: a
        # death while this sampler waits for logits is no request's doing.
        draw = None if one_by_one else self._prepare(parts[0], bitmask)
        entry = self._wait_for_logits(step, len(rows))
        if not len(owned):
            if entry is not None:
                entry.release()
            return
        if entry is None and one_by_one:
            # The predecessor had answered, and all other samplers have since.
            self._say(Trying(None))
            return
        assert entry is not None, "logits of this sampler's rows were not kept"
        began = time.monotonic_ns()
        with entry:
            for part in parts:
                if draw is None:
                    if one_by_one and len(part):
                        self._say(Trying(int(part.handles[0])))
                    draw = self._prepare(part, bitmask)
                result = draw(entry.array)
                draw = None
                drafts = self._drafting(
                    [],
                    self._drafter.propose,
                    part.handles,
                    part.rows,
                    result.token_ids,
                    step.worth,
                )
                if part is not parts[-1]:
                    self._send(step.iteration, part.rows, result, [], drafts, more=True)
        if one_by_one:
            self._say(Trying(None))
        self._record(Phase.SAMPLE, step, began, time.monotonic_ns(), len(rows))
        self._send(step.iteration, parts[-1].rows, result, errors, drafts, more=False)

    def _is_known(self, rows: RowsOfStep) -> npt.NDArray[np.bool_]:
        """Mask of the rows whose request is still there: a snapshot may owe a row of a request that
        was aborted, which nobody waits for."""
        return np.asarray(
            [handle in self._columns or handle in self._broken for handle in rows.handles.tolist()],
            bool,
        )

    def _is_broken(self, rows: RowsOfStep) -> npt.NDArray[np.bool_]:
        """Mask of the rows whose request no sampler can draw for."""
        if not self._broken:
            return np.zeros(len(rows), bool)
        return np.asarray([handle in self._broken for handle in rows.handles.tolist()], bool)

    def _errors_of(self, rows: RowsOfStep) -> list[tuple[int, str]]:
        """Row and reason, for rows whose request no sampler can draw for."""
        pairs = zip(rows.rows.tolist(), rows.handles.tolist(), strict=True)
        return [(row, self._broken[handle]) for row, handle in pairs]

    def _prepare(
        self, part: RowsOfStep, bitmask: npt.NDArray[np.int32] | None
    ) -> Callable[[npt.NDArray[Any]], SampleResult]:
        """Do what drawing ``part`` needs before the logits; the result takes them."""
        return self._columns.prepare(
            part.handles,
            part.rows,
            bitmask=bitmask,
            bitmask_rows=part.bitmask_rows,
            follows=part.follows,
        )

    def _wait_for_logits(self, step: Step, rows: int) -> ReceivedLogits | None:
        """The logits of the iteration; None if BIC-L began later for this sampler."""
        began = time.monotonic_ns()
        while self._entry is None or self._entry.iteration < step.iteration:
            self._entry = self._logits.receive()
        self._record(Phase.WAIT_LOGITS, step, began, time.monotonic_ns(), rows)
        return self._entry if self._entry.iteration == step.iteration else None

    def _send(
        self,
        iteration: int,
        rows: npt.NDArray[np.int32],
        result: SampleResult,
        errors: list[tuple[int, str]],
        drafts: list[tuple[int, bytes]],
        *,
        more: bool,
    ) -> None:
        """Send one frame of the answer; ``more`` frames of the same iteration may follow."""
        drawn = result.token_ids != NOT_DRAWN
        logprobs = [
            Logprobs(
                row=int(rows[i]),
                rank=int(scores.rank),
                token_ids=int32_bytes(scores.token_ids),
                values=scores.logprobs.astype("<f4", copy=False).tobytes(),
            )
            for i, scores in result.logprobs.items()
        ]
        failed = [(int(rows[i]), reason) for i, reason in result.errors.items()]
        frame = Sampled(
            iteration=iteration,
            rows=int32_bytes(rows[drawn]),
            tokens=int32_bytes(result.token_ids[drawn]),
            logprobs=logprobs,
            errors=errors + failed,
            drafts=drafts,
        )
        self._tokens.send(iteration, encode(frame), more=more)

    def _record(self, phase: Phase, step: Step, start: int, end: int, rows: int) -> None:
        self._recorder.record(phase, step.iteration, self._slot, start, end, rows, rows)


def show(name: str) -> None:
    """Set the name that `ps` and `top` show; as in vLLM, the whole title only where a library is."""
    with suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write(name)
    with suppress(ImportError):
        from setproctitle import setproctitle

        setproctitle(f"sipipe.sampler {name}")


def main(parent: Parent, tokens: str, dtype: str, name: str) -> int:
    """Be a sampler; the arguments are those of :mod:`sipipe.sampler.__main__`."""
    sender = GatherSender(socket.socket(fileno=int(tokens)))
    show(name)
    sampler = None
    try:
        warm_up([dtype])
        warm_up_ngrams()
        if name == SPARE:
            parent.say(Warm())
        boot: SamplerBoot = parent.receive()
        name = sampler_name(boot.index)
        show(name)
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
        say(f"SiPipe {name}: {error}")
        return 1
    finally:
        parent.let_end()
        if sampler is not None:
            sampler.close()
    return 0
