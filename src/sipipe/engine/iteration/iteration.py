"""Record of one iteration, in parts by who writes them and when.

| part | written by | when, and under what |
| --- | --- | --- |
| :class:`Scheduled` | the engine thread | once, when the scheduler has made the output; frozen |
| :class:`Begun` | whoever begins it | once, under ``Iterations._lock``; frozen |
| :class:`OnBus` | whoever publishes | under ``Bus.order``, but ``planned``: under ``Iterations._lock`` |
| :class:`Answers` | the gather thread, the events thread | under ``Iterations._lock`` |
| :class:`Outcome` | the thread that delivered the last answer | before the future is resolved |

So a frozen part may be read by any thread once it is there, and the others by who holds the lock; the
outcome by the engine thread, which has waited for the future.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import ClassVar

from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from sipipe.engine.iteration.work import Work
from sipipe.engine.scheduling.times import Load
from sipipe.messages.replies import IterationReport
from sipipe.messages.step import Grammar, Sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """Decision of the scheduler. The defaults are those of a scheduler that is not SiPipe's."""

    output: SchedulerOutput
    slot: int | None = None
    """Microbatch whose turn it is; None: it follows from the iteration's number."""
    turn: int = 0
    """Number of the turn among those of all slots, empty ones counted."""
    load: Load = field(default_factory=Load)
    """Parts of the work in it, by which its time is predicted."""
    asks: int = 0
    """Drafts that a head is asked for behind each of its tokens; 0: it is not asked."""
    began_ns: int = 0
    """Begin of scheduling it, in monotonic nanoseconds; 0: it was not observed."""
    ended_ns: int = 0
    """End of scheduling it."""

    @property
    def rows(self) -> int:
        """Rows of logits at most: one for each request, and one for each draft."""
        return len(self.output.num_scheduled_tokens) + self.drafts

    @property
    def drafts(self) -> int:
        """Draft tokens in it."""
        return sum(map(len, self.output.scheduled_spec_decode_tokens.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """Facts that are fixed when the iteration begins: it has a number from then on."""

    number: int
    """Place in BIC-I's order, from 0."""
    slot: int
    """Microbatch whose turn it is."""
    work: Work
    """Work of samplers and workers."""
    logits_row: int
    """First of its rows of BIC-L; -1: it has none."""
    movers: int
    """Workers that report what their KV connectors have done; 0 without a connector."""
    began: float
    """Begin in seconds of the stall clock; the stall bound counts from here."""


NOT_BEGUN = Begun(number=-1, slot=0, work=Work(), logits_row=-1, movers=0, began=0.0)
"""State of an iteration that waits."""


@dataclass(slots=True, kw_only=True)
class OnBus:
    """State of what has been published of the iteration."""

    planned: bool = False
    """True once workers have it, but for its tokens."""
    published_ns: int = 0
    """Time when it was on BIC-I, in monotonic nanoseconds; the wait for its tokens begins then."""
    bitmask_given: bool = False
    """True once EngineCore has asked for its tokens, and has brought ``bitmask``."""
    bitmask: GrammarOutput | None = None
    """Tokens that structured output allows; None: no request of it has a grammar."""
    grammar: Grammar | None = None
    """The bitmask as samplers have got it."""


@dataclass(slots=True, kw_only=True)
class Answers:
    """Answers that have come."""

    tokens: Sequence[Sampled] | None = None
    """Frames of all samplers; None while any is out."""
    report: IterationReport | None = None
    """Report of the last stage; None while it is out, or where none is asked for."""
    moved: dict[int, KVConnectorOutput | None] = field(default_factory=dict)
    """Outputs of KV connectors that have come, by rank."""
    complete: bool = False
    """True once all are in."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Results besides the tokens, which the scheduler takes with them."""

    errors: dict[str, str] = field(default_factory=dict)
    """Reason of each request that fails with this iteration."""
    tainted: bool = False
    """True where logits of some row had no distribution: there may be NaN in the KV cache."""
    drawn: dict[str, int] = field(default_factory=dict)
    """Number of tokens of each request that got any."""
    drafts: dict[str, list[int]] = field(default_factory=dict)
    """Drafts that samplers, or a head in the same pass, propose to come behind a request's tokens."""


@dataclass(slots=True, eq=False)
class Iteration:
    """One scheduling output on its way, until its result has been taken in."""

    scheduled: Scheduled
    begun: Begun = NOT_BEGUN
    on_bus: OnBus = field(default_factory=OnBus)
    answers: Answers = field(default_factory=Answers)
    outcome: Outcome = field(default_factory=Outcome)
    future: Future[ModelRunnerOutput] = field(default_factory=Future)
    """Resolved once: with the output when all answers are in, or with what stopped the engine."""
    may_be_long: ClassVar[bool] = False
    """The stall bound holds, whatever the workers say."""

    def __str__(self) -> str:
        return f"iteration {self.number} waits for {self.late}"

    @property
    def output(self) -> SchedulerOutput:
        """The scheduler's output."""
        return self.scheduled.output

    @property
    def number(self) -> int:
        """Place in BIC-I's order; -1 before it begins."""
        return self.begun.number

    @property
    def work(self) -> Work:
        """Work of samplers and workers; none before it begins."""
        return self.begun.work

    @property
    def began(self) -> float:
        """Begin in seconds of the stall clock."""
        return self.begun.began

    @property
    def slot(self) -> int:
        """Microbatch whose turn it is; 0 where that is not known before it begins."""
        return self.begun.slot if self.begun is not NOT_BEGUN else self.scheduled.slot or 0

    @property
    def late(self) -> str:
        """Those whose answers are missing, for a message; empty when it is complete."""
        answers = self.answers
        work = self.work
        reported = work.prompt_logprobs or work.on_device or not work.samplers
        missing = []
        if answers.report is None and reported and work.request_ids:
            missing.append("the last stage")
        if len(answers.moved) < self.begun.movers:
            missing.append("the KV connectors of all workers")
        if answers.tokens is None and work.samplers:
            missing.append("samplers " + ", ".join(map(str, work.samplers)))
        return " and ".join(missing)
