"""Token-safe execution as data: who may start what, and when (paper section 4.2).

Two executors share a worker. The **CPU executor** prepares the inputs of iterations in order, each
into input version ``iteration mod versions``; the **device executor** runs them in the same order.
Two indicators tie them together: CI, the last iteration whose inputs are prepared, and GI, the
last that the device has taken. Both start at -1.

This module is a table and a function: no thread, no clock, no I/O. Drivers are in
:mod:`sipipe.worker.executor`; the diagram in ``docs/execution.md`` is made from :data:`TABLE`.

What must hold, whatever the drivers do (checked over all reachable states in
``tests/stage/test_machine.py``):

* GI <= CI, and both only grow;
* a version that is being written is neither being read nor holds inputs not read yet;
* nothing queues without bound: CI - GI <= versions.

Difference from the paper: there, the CPU executor starts when CI == GI, and the device raises GI
when it takes an input, which with two versions leaves exactly one version free. Here the rule is
that a version is free (:meth:`Status.free_version`). For two versions and a busy device it is the
paper's; it also covers one version (prepare and run in turn) and more than two; and while the
device waits for hidden states with nothing taken, it lets the next inputs be prepared.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType


class Role(enum.Enum):
    """One of the two executors."""

    CPU = "CPU executor"
    DEVICE = "device executor"


class State(enum.Enum):
    """Where an executor is."""

    WAIT = "wait"
    RUNNING = "running"
    STOPPED = "stopped"


class Event(enum.Enum):
    """What its driver tells an executor."""

    START = "start"
    """Take the next iteration. The driver has one in its queue."""
    FINISH = "finish"
    """The iteration is done: inputs written, or read for the last time."""
    STOP = "stop"
    """An error in either executor, or shutdown. Final."""


@dataclass(frozen=True, slots=True)
class Status:
    """Both executors and both indicators."""

    versions: int
    cpu: State = State.WAIT
    device: State = State.WAIT
    ci: int = -1
    """Last iteration whose inputs are prepared."""
    gi: int = -1
    """Last iteration that the device has taken."""

    def state(self, role: Role) -> State:
        """Where ``role`` is."""
        return self.cpu if role is Role.CPU else self.device

    @property
    def free_version(self) -> bool:
        """Whether the version of iteration CI + 1 holds nothing that is or will be read."""
        held = self.ci - self.gi + (self.device is State.RUNNING)
        return held < self.versions

    @property
    def input_ready(self) -> bool:
        """Whether prepared inputs wait for the device."""
        return self.ci > self.gi

    @property
    def writing(self) -> int | None:
        """The iteration that the CPU executor prepares now."""
        return self.ci + 1 if self.cpu is State.RUNNING else None

    @property
    def reading(self) -> int | None:
        """The iteration that the device runs now."""
        return self.gi if self.device is State.RUNNING else None

    def version(self, iteration: int) -> int:
        """The input version of an iteration."""
        return iteration % self.versions


@dataclass(frozen=True, slots=True)
class Transition:
    """One row of the table."""

    to: State
    guard: Callable[[Status], bool] | None = None
    guard_text: str = ""
    ci: int = 0
    """Added to CI."""
    gi: int = 0
    """Added to GI."""

    def allowed(self, status: Status) -> bool:
        """Whether the guard holds."""
        return self.guard is None or self.guard(status)


TABLE: Mapping[tuple[Role, State, Event], Transition] = MappingProxyType(
    {
        (Role.CPU, State.WAIT, Event.START): Transition(
            State.RUNNING, lambda status: status.free_version, "a version is free"
        ),
        (Role.CPU, State.RUNNING, Event.FINISH): Transition(State.WAIT, ci=1),
        (Role.CPU, State.WAIT, Event.STOP): Transition(State.STOPPED),
        (Role.CPU, State.RUNNING, Event.STOP): Transition(State.STOPPED),
        (Role.DEVICE, State.WAIT, Event.START): Transition(
            State.RUNNING, lambda status: status.input_ready, "CI > GI", gi=1
        ),
        (Role.DEVICE, State.RUNNING, Event.FINISH): Transition(State.WAIT),
        (Role.DEVICE, State.WAIT, Event.STOP): Transition(State.STOPPED),
        (Role.DEVICE, State.RUNNING, Event.STOP): Transition(State.STOPPED),
    }
)
"""Every transition there is. (To "remain in R" as the paper has it is FINISH and START at once.)"""


def may(status: Status, role: Role, event: Event) -> bool:
    """Whether ``event`` is listed for ``role`` in its state, and its guard holds."""
    transition = TABLE.get((role, status.state(role), event))
    return transition is not None and transition.allowed(status)


def fire(status: Status, role: Role, event: Event) -> Status:
    """The status after ``event``.

    Raises:
        AssertionError: the event is not listed in this state, or its guard does not hold; a bug
            of the driver.
    """
    state = status.state(role)
    transition = TABLE.get((role, state, event))
    assert transition is not None, f"{role.value}: no {event.value} in state {state.value}"
    assert transition.allowed(status), (
        f"{role.value}: {event.value} needs that {transition.guard_text} "
        f"(CI {status.ci}, GI {status.gi}, {status.versions} versions)"
    )
    moved = replace(status, ci=status.ci + transition.ci, gi=status.gi + transition.gi)
    if role is Role.CPU:
        return replace(moved, cpu=transition.to)
    return replace(moved, device=transition.to)


def mermaid() -> str:
    """Both machines as a Mermaid state diagram, from the table."""
    return "\n".join(("stateDiagram-v2", *_diagram_lines())) + "\n"


def _diagram_lines() -> Iterator[str]:
    for role in Role:
        prefix = role.name.lower()
        yield f'    state "{role.value}" as {prefix} {{'
        yield f"        [*] --> {prefix}_{State.WAIT.value}"
        for state in State:
            yield f'        state "{state.value}" as {prefix}_{state.value}'
        for (owner, state, event), transition in TABLE.items():
            if owner is not role:
                continue
            text = event.value
            if transition.guard_text:
                text += f" [{transition.guard_text}]"
            effects = [
                f"{name} + {amount}"
                for name, amount in (("CI", transition.ci), ("GI", transition.gi))
                if amount
            ]
            if effects:
                text += " / " + ", ".join(effects)
            yield f"        {prefix}_{state.value} --> {prefix}_{transition.to.value}: {text}"
        yield "    }"
