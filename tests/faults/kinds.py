"""What is done to engines: the kinds of faults, and a scenario of each from a random generator.

A scenario is what :class:`tests.faults.rig.Run` runs: settings, faults planned in a process at a
step of its life (:mod:`tests.faults.plan`), by name and by how often it was started again, and
faults from outside after so many steps of the engine's loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from random import Random

SAMPLERS, STAGES = ("sampler0", "sampler1"), ("stage0.0", "stage1.0")
CHILDREN = (*SAMPLERS, *STAGES)
START_SAMPLER = ("born", "warm up", "boot", "attach to BIC-I", "attach to BIC-L", "say")
START_SUCCESSOR = (*START_SAMPLER, "restore")
BUSY_SAMPLER = ("hear", "let go", "apply", "draw", "answer")
START_WORKER = ("born", "boot", "load", "say", "serve", "describe", "open")
BUSY_WORKER = {
    "stage0.0": ("hear", "let go", "prepare", "run", "forward", "send", "hand on"),
    "stage1.0": (
        *("hear", "let go", "prepare", "run", "receive", "forward", "logits", "hand on"),
        "publish",
    ),
}
OWN_WORKER = {
    "stage0.0": ("hear", "let go", "run", "forward", "send"),
    "stage1.0": ("hear", "let go", "run", "receive", "forward", "sample"),
}
PRODUCT = {"stage0.0": ("rows", "product"), "stage1.0": ("spread", "product")}
"""Where the output projection is shared out."""
MOVES = ("load blocks", "store blocks", "say what moved")
START_ENGINE = ("start", "listen", "load models", "make channels", "open samplers")
BUSY_ENGINE = ("schedule", "dispatch", "resolve", "record")
FOR_EVER = 1e9


def scenario(own=False, bound=120.0, spare=1e9, **more):
    """``own``: vLLM's sampler draws. Other settings of SiPipe's by ``sipipe``. ``spare``: seconds
    until there is a spare sampler."""
    sipipe = {"samplers": 2, "inflight": 3, "stall_timeout": 60, "start_timeout": 90}
    sipipe |= {"cores": "off", "vocabulary": "last", **more.pop("sipipe", {})}
    sipipe |= {"cpu_sampling": "off" if own else "on"}
    return {"sipipe": sipipe, "own": own, "bound": bound, "spare": spare, **more}


def fault(at, what="kill", nth=0, **more):
    return {"at": at, "what": what, "nth": nth, **more}


@dataclasses.dataclass(frozen=True)
class Kind:
    """One row of the table."""

    name: str
    make: Callable[[Random], dict]
    scenarios: int
    """In a whole run."""
    ends: str = ""
    """Pattern of the error with which an engine has to end."""
    may_end: str = ""
    """Of one with which it may; both empty: it goes on."""


def later(make):
    """``make(rng, ...)`` as ``make(...)``, which waits for the random generator."""
    return lambda *asked, **more: lambda rng: make(rng, *asked, **more)


def steps(rng, count):
    """Steps of the engine's loop, apart from each other."""
    return sorted(rng.sample(range(3, 90, 6), count))


# ---- kills -------------------------------------------------------------------------------------


def busy_samplers(rng):
    """Three deaths of each: a fifth within a minute would end the engine."""
    return scenario(
        planned={
            name: [[fault(rng.choice(BUSY_SAMPLER), nth=rng.randrange(1, 12))] for _ in range(3)]
            for name in SAMPLERS
        }
    )


def idle_samplers(rng):
    """One stream has its row with one of them; and both when nothing is asked."""
    return scenario(
        streams=1,
        outside=[
            {"name": rng.choice(SAMPLERS), "what": "kill", "step": step} for step in (2, 15, 1000)
        ],
        settle=0.5,
    )


def sampler_and_successor(rng):
    name = rng.choice(SAMPLERS)
    first = fault(rng.choice(BUSY_SAMPLER), nth=rng.randrange(1, 25))
    return scenario(planned={name: [[first], [fault("born")]]})


def restarting_sampler(rng):
    name = rng.choice(SAMPLERS)
    first = fault(rng.choice(BUSY_SAMPLER), nth=rng.randrange(1, 25))
    then = [[fault(rng.choice(START_SUCCESSOR))] for _ in range(2)]
    return scenario(planned={name: [[first], *then]})


def both_samplers(rng):
    step = rng.randrange(3, 60)
    return scenario(outside=[{"name": n, "what": "kill", "step": step} for n in SAMPLERS])


@later
def struck_samplers(rng, what, **more):
    """Three times one of them."""
    outside = [{"name": rng.choice(SAMPLERS), "what": what, "step": s} for s in steps(rng, 3)]
    return scenario(outside=outside, **more)


spared_samplers = struck_samplers("kill", spare=0.0)
"""There may be a spare for each death."""


def dying_sampler(rng):
    """Five times is too often."""
    name = rng.choice(SAMPLERS)
    return scenario(planned={name: [[fault("hear", nth=rng.randrange(8))] for _ in range(8)]})


@later
def struck_spare(rng, what, **more):
    """At any step of its life, before a sampler dies or when it has its place."""
    strikes = [[fault(rng.choice(START_SUCCESSOR), what, **more)] for _ in range(2)]
    dies = {"name": rng.choice(SAMPLERS), "what": "kill", "step": rng.randrange(20, 60)}
    return scenario(spare=0.0, planned={"spare": strikes}, outside=[dies])


@later
def busy_worker(rng, own, what="kill", stall=60, **more):
    name = rng.choice(STAGES)
    at = rng.choice((OWN_WORKER if own else BUSY_WORKER)[name])
    # A worker hears of calls before it hears of iterations.
    first = 20 if at in ("hear", "let go") else 0
    struck = fault(at, what, first + rng.randrange(40), **more)
    return scenario(own, planned={name: [[struck]]}, sipipe={"stall_timeout": stall})


@later
def idle_worker(rng, own):
    return scenario(
        own, outside=[{"name": rng.choice(STAGES), "what": "kill", "step": 1000}], settle=5
    )


def worker_and_sampler(rng):
    step = rng.randrange(3, 60)
    names = [rng.choice(SAMPLERS), rng.choice(STAGES)]
    rng.shuffle(names)
    return scenario(outside=[{"name": n, "what": "kill", "step": step} for n in names])


def everybody(rng):
    step = rng.randrange(3, 60)
    names = [*CHILDREN]
    rng.shuffle(names)
    return scenario(outside=[{"name": n, "what": "kill", "step": step} for n in names])


def ending(rng):
    """Somebody dies while the engine ends."""
    return scenario(streams=4, engine=[fault("shut down", "pull", name=rng.choice(CHILDREN))])


@later
def starting_engine(rng, what):
    return scenario(engine=[fault(rng.choice(START_ENGINE), what)])


@later
def busy_engine(rng, own):
    at = rng.choice(BUSY_ENGINE[:1] if own else BUSY_ENGINE)
    return scenario(own, engine=[fault(at, nth=rng.randrange(1, 60))])


def engine_of_stopped_worker(rng):
    """The worker cannot see that its engine is gone."""
    faults = [{"name": rng.choice(STAGES), "what": "stop"}, {"name": "engine", "what": "kill"}]
    step = rng.randrange(3, 60)
    return scenario(outside=[{**fault, "step": step} for fault in faults])


# ---- stops -------------------------------------------------------------------------------------


@later
def stopped_sampler(rng, seconds):
    stop = fault(rng.choice(BUSY_SAMPLER), "stop", rng.randrange(1, 25), seconds=seconds)
    return scenario(planned={rng.choice(SAMPLERS): [[stop]]})


def stopped_worker(own, seconds, stall=60):
    return busy_worker(own, "stop", stall, seconds=seconds)


def stopped_successor(rng):
    name = rng.choice(SAMPLERS)
    first = fault(rng.choice(BUSY_SAMPLER), nth=rng.randrange(1, 25))
    then = fault(rng.choice(START_SUCCESSOR), "stop", seconds=FOR_EVER)
    return scenario(planned={name: [[first], [then]]}, sipipe={"stall_timeout": 20})


@later
def stopped_at_start(rng, names, points):
    stop = fault(rng.choice(points), "stop", seconds=FOR_EVER)
    settings = {"start_timeout": 8, "stall_timeout": 8}
    return scenario(planned={rng.choice(names): [[stop]]}, sipipe=settings)


@later
def stopped_engine(rng, seconds):
    return scenario(
        engine=[fault(rng.choice(BUSY_ENGINE), "stop", rng.randrange(1, 60), seconds=seconds)]
    )


# ---- fills -------------------------------------------------------------------------------------


def no_descriptors(rng):
    """Of the engine's, which then has to replace a sampler."""
    step = rng.randrange(10, 40)
    return scenario(
        engine=[fault("dispatch", "descriptors", step)],
        outside=[{"name": rng.choice(SAMPLERS), "what": "kill", "step": step + 20}],
    )


@later
def limited(rng, what, own=False):
    names = STAGES if own else CHILDREN
    name = rng.choice(names)
    points = BUSY_SAMPLER if name in SAMPLERS else (OWN_WORKER if own else BUSY_WORKER)[name]
    first = 20 if name in STAGES else 1
    return scenario(
        own, planned={name: [[fault(rng.choice(points), what, first + rng.randrange(20))]]}
    )


def full_at_start(rng):
    return scenario(filled={"full": (4 << 20) - rng.randrange(1 << 20)})


def filled_later(rng):
    """Once all channels are there; then a sampler is started again."""
    name = rng.choice(SAMPLERS)
    return scenario(
        engine=[fault("dispatch", "fill", rng.randrange(5, 20))],
        planned={name: [[fault("draw", nth=rng.randrange(20, 30))]]},
        filled={"nothing": 0},
        shm="64m",
    )


# ---- mistakes -----------------------------------------------------------------------------------


@later
def raising(rng, names, points):
    name = rng.choice(names)
    at = rng.choice(points[name] if isinstance(points, dict) else points)
    return scenario(planned={name: [[fault(at, "raise", 1 + rng.randrange(20))]]})


def shared(make):
    """The same, with the output projection shared out over both stages."""

    def made(rng):
        found = make(rng)
        found["sipipe"]["vocabulary"] = "shared"
        return found

    return made


@later
def amid_product(rng, what, stall=60, **more):
    """Of a worker: as it takes or spreads final hidden states, or multiplies by its columns."""
    name = rng.choice(STAGES)
    struck = fault(rng.choice(PRODUCT[name]), what, rng.randrange(30), **more)
    return scenario(planned={name: [[struck]]}, sipipe={"stall_timeout": stall})


def crowded(make):
    """The same, with a cache so small that requests are preempted, and blocks found again."""
    return lambda rng: make(rng) | {"crowded": True}


def drafting(make):
    """The same, while samplers propose and verify drafts."""
    return lambda rng: make(rng) | {"drafts": True}


def moving(make, **shelf):
    """The same, while a KV connector loads what half of the prompts need, and stores all
    (:mod:`tests.engine.shelf`)."""
    return lambda rng: make(rng) | {"shelf": shelf}


@later
def amid_moves(rng, what, own=False):
    """Of a worker, as its KV connector is called."""
    struck = fault(rng.choice(MOVES), what, rng.randrange(30))
    return scenario(own, planned={rng.choice(STAGES): [[struck]]})


def abandoned(make):
    """The same, while requests are aborted."""
    return lambda rng: make(rng) | {"aborts": rng.random()}


@later
def at_start(rng, names, points, what, own=False, **more):
    return scenario(own, planned={rng.choice(names): [[fault(rng.choice(points), what, **more)]]})


@later
def signalled(rng, names, what):
    return scenario(
        outside=[{"name": rng.choice(names), "what": what, "step": rng.randrange(3, 60)}]
    )


@later
def frozen(rng, seconds):
    """All processes, as a container is that is paused: the engine stops the others, then itself."""
    stop = {"what": "stop", "step": rng.randrange(3, 60), "seconds": seconds}
    return scenario(outside=[{"name": n, **stop} for n in (*CHILDREN, "engine")])


def jumping_clock(rng):
    """The wall clock is put forward or back by an hour, in one process."""
    name, by = rng.choice((*CHILDREN, "engine")), rng.choice((-3600, 3600))
    if name == "engine":
        return scenario(engine=[fault(rng.choice(BUSY_ENGINE), "jump", by=by)])
    points = BUSY_SAMPLER if name in SAMPLERS else BUSY_WORKER[name]
    return scenario(planned={name: [[fault(rng.choice(points), "jump", by=by)]]})


def hosts(make):
    """The same on two hosts; the second one has the last stage and the samplers."""

    def made(rng):
        found = make(rng) | {"hosts": True}
        found["sipipe"] |= {"stall_timeout": 20, "start_timeout": 30}
        return found

    return made


def killed_sampler(rng):
    name = rng.choice(SAMPLERS)
    return scenario(planned={name: [[fault(rng.choice(BUSY_SAMPLER), nth=rng.randrange(1, 12))]]})


def busy_last(rng):
    return scenario(
        planned={STAGES[1]: [[fault(rng.choice(BUSY_LAST), nth=rng.randrange(20, 40))]]}
    )


@later
def stopped_agent(rng, seconds):
    stop = {"name": "agent", "what": "stop", "seconds": seconds}
    return scenario(outside=[stop | {"step": rng.randrange(3, 60)}])


AGENT = ("agent",)
BUSY_LAST = BUSY_WORKER["stage1.0"]
HOST_LOST = r"host 1 .*(lost|ended|closed|reset|silent|died)"
STAGE_DIED = r"stage worker stage\d\.0 \(pid \d+\) (on host \d )?(died|ended while starting)"
NOT_READY = r"not ready in time: .*start_timeout"
STALLED = r"no progress for .* s: .*stage\d\.0 does not answer"
SAYING = (
    rf"(?={STALLED})"
    r".*stage\d\.0 \(preparing thread\) \w+.*, \(device thread\) \w+.*, \(publisher\) \w+"
)
"""The other stage says what its threads do."""
ANY = "."

KINDS = [
    Kind("a sampler that draws is killed", busy_samplers, 24),
    Kind("a sampler with nothing to do is killed", idle_samplers, 10),
    Kind("a sampler and at once its successor are killed", sampler_and_successor, 12),
    Kind("a sampler is killed at each step of its restart", restarting_sampler, 12),
    Kind("both samplers are killed at once", both_samplers, 8),
    Kind("a sampler is told to end (SIGTERM)", struck_samplers("term"), 6),
    Kind("a sampler dies again and again", dying_sampler, 3, r"sampler\d keeps dying"),
    Kind("a sampler is killed and there is a spare", spared_samplers, 8),
    Kind("the spare sampler is killed at each step of its life", struck_spare("kill"), 10),
    Kind("the spare sampler is stopped for ever", struck_spare("stop", seconds=FOR_EVER), 6),
    Kind(
        "a sampler is killed while the engine starts",
        at_start(SAMPLERS, START_SAMPLER, "kill"),
        8,
        may_end=r"sampler\d ended while starting",
    ),
    Kind("a busy worker is killed", busy_worker(False), 24, STAGE_DIED),
    Kind("a busy worker is killed (vLLM's sampler)", busy_worker(True), 16, STAGE_DIED),
    Kind("an idle worker is killed", idle_worker(False), 6, STAGE_DIED),
    Kind("an idle worker is killed (vLLM's sampler)", idle_worker(True), 6, STAGE_DIED),
    Kind(
        "a worker is killed while the engine starts",
        at_start(STAGES, START_WORKER, "kill"),
        12,
        STAGE_DIED,
    ),
    Kind(
        "a worker is killed while the engine starts (vLLM's sampler)",
        at_start(STAGES, START_WORKER, "kill", own=True),
        8,
        STAGE_DIED,
    ),
    Kind("a worker and a sampler are killed at once", worker_and_sampler, 8, STAGE_DIED),
    Kind("all workers and samplers are killed at once", everybody, 6, STAGE_DIED),
    Kind("somebody is killed while the engine ends", ending, 8),
    Kind("the engine is killed while it starts", starting_engine("kill"), 8, "killed"),
    Kind("a busy engine is killed", busy_engine(False), 10, "killed"),
    Kind("a busy engine is killed (vLLM's sampler)", busy_engine(True), 6, "killed"),
    Kind("an engine whose worker is stopped is killed", engine_of_stopped_worker, 6, "killed"),
    Kind("a sampler is stopped for 1 s", stopped_sampler(1), 8),
    Kind("a sampler is stopped for 10 s", stopped_sampler(10), 6),
    Kind("a sampler is stopped for ever", stopped_sampler(FOR_EVER), 8),
    Kind(
        "a sampler's successor is stopped for ever",
        stopped_successor,
        6,
        may_end=r"no progress for .* s: .* waits for samplers",
    ),
    Kind("a worker is stopped for 1 s", stopped_worker(False, 1), 8),
    Kind("a worker is stopped for 1 s (vLLM's sampler)", stopped_worker(True, 1), 6),
    Kind("a worker is stopped for 10 s", stopped_worker(False, 10), 6),
    Kind("a worker is stopped for ever", stopped_worker(False, FOR_EVER, 4), 10, SAYING),
    Kind(
        "a worker is stopped for ever (vLLM's sampler)",
        stopped_worker(True, FOR_EVER, 4),
        8,
        STALLED,
    ),
    Kind(
        "a worker is stopped while the engine starts",
        stopped_at_start(STAGES, START_WORKER),
        6,
        f"{NOT_READY}|TimeoutError|{STALLED}",
    ),
    Kind(
        "a sampler is stopped while the engine starts",
        stopped_at_start(SAMPLERS, START_SAMPLER),
        6,
        NOT_READY,
    ),
    Kind("the engine is stopped for 1 s", stopped_engine(1), 6),
    Kind("the engine is stopped for 10 s", stopped_engine(10), 4),
    Kind("the engine has no descriptors left", no_descriptors, 6, may_end=r"Too many open files"),
    Kind("a process has no descriptors left", limited("descriptors"), 8),
    Kind("a process gets no more memory", limited("memory"), 10, may_end=ANY),
    Kind("a process gets no more memory (vLLM's sampler)", limited("memory", True), 6, may_end=ANY),
    Kind("an engine starts beside a full /dev/shm", full_at_start, 4),
    Kind("/dev/shm is filled while an engine serves", filled_later, 6),
    Kind("a sampler that draws is killed (shared projection)", shared(busy_samplers), 12),
    Kind("a worker is killed amid a product", shared(amid_product("kill")), 12, STAGE_DIED),
    Kind("a worker is stopped for 1 s amid a product", shared(amid_product("stop", seconds=1)), 6),
    Kind(
        "a worker is stopped for ever amid a product",
        shared(amid_product("stop", stall=4, seconds=FOR_EVER)),
        8,
        SAYING,
    ),
    Kind("a worker raises an error", raising(STAGES, BUSY_WORKER), 8, "planted in"),
    Kind("a sampler raises an error", raising(SAMPLERS, BUSY_SAMPLER), 8),
    Kind(
        "a worker raises an error while the engine starts",
        at_start(STAGES, START_WORKER[1:], "raise"),
        8,
        "planted in|ended while starting .see its log lines above.",
    ),
    Kind(
        "a sampler raises an error while the engine starts",
        at_start(SAMPLERS, START_SAMPLER[1:], "raise"),
        8,
        may_end="ended while starting .*see its message above",
    ),
    Kind("the engine raises an error while it starts", starting_engine("raise"), 6, "planted in"),
    Kind(
        "a process gets no more memory while the engine starts",
        at_start(CHILDREN, ("boot", "say"), "memory"),
        8,
        may_end=ANY,
    ),
    Kind(
        "a process has no descriptors left while the engine starts",
        at_start(CHILDREN, ("boot", "say"), "descriptors"),
        8,
        may_end="Too many open files|descriptor",
    ),
    Kind(
        "a process is stopped for 1 s while the engine starts",
        at_start(CHILDREN, ("born", "boot", "say"), "stop", seconds=1),
        8,
    ),
    Kind("the spare sampler raises an error", struck_spare("raise"), 6),
    Kind("the spare sampler gets no more memory", struck_spare("memory"), 6),
    Kind("a worker is told to end (SIGTERM)", signalled(STAGES, "term"), 6, STAGE_DIED),
    Kind("a worker is hung up on (SIGHUP)", signalled(STAGES, "hang up"), 6, STAGE_DIED),
    Kind("a sampler is hung up on (SIGHUP)", signalled(SAMPLERS, "hang up"), 6),
    Kind("all processes are stopped for 1 s, as in a paused container", frozen(1), 3),
    Kind("all processes are stopped for 10 s, as in a paused container", frozen(10), 2),
    Kind("the wall clock jumps by an hour in a process", jumping_clock, 12),
    Kind("a sampler that draws is killed (preemption, prefix caching)", crowded(busy_samplers), 8),
    Kind("a sampler is stopped for 1 s (preemption)", crowded(stopped_sampler(1)), 6),
    Kind("a worker is stopped for 1 s (preemption)", crowded(stopped_worker(False, 1)), 6),
    Kind("a busy worker is killed (preemption)", crowded(busy_worker(False)), 8, STAGE_DIED),
    Kind("a sampler that draws is killed amid aborts", abandoned(busy_samplers), 8),
    Kind("a worker is stopped for 1 s amid aborts", abandoned(stopped_worker(False, 1)), 6),
    Kind("a sampler is killed amid aborts and preemption", crowded(abandoned(spared_samplers)), 6),
    Kind("a sampler that draws is killed amid drafts", drafting(busy_samplers), 8),
    Kind("a sampler is stopped for 1 s amid drafts", drafting(stopped_sampler(1)), 6),
    Kind("a busy worker is killed amid drafts", drafting(busy_worker(False)), 8, STAGE_DIED),
    Kind(
        "a sampler is killed amid drafts, aborts and preemption",
        crowded(abandoned(drafting(spared_samplers))),
        6,
    ),
    Kind("a sampler that draws is killed amid KV transfers", moving(busy_samplers), 8),
    Kind("a sampler is stopped for 1 s amid KV transfers", moving(stopped_sampler(1)), 6),
    Kind("a sampler is killed, KV transfers take 0.3 s", moving(busy_samplers, slow=0.3), 6),
    Kind(
        "a sampler is killed, KV blocks fail and are computed",
        moving(busy_samplers, fails=3, policy="recompute"),
        6,
    ),
    Kind(
        "a sampler is killed, KV blocks fail and so do their requests",
        moving(busy_samplers, fails=3, policy="fail"),
        6,
    ),
    Kind(
        "a sampler is killed amid KV transfers, aborts and preemption",
        crowded(abandoned(moving(spared_samplers, slow=0.1))),
        6,
    ),
    Kind("a worker is killed amid a KV transfer", moving(amid_moves("kill")), 8, STAGE_DIED),
    Kind(
        "a worker is killed amid a KV transfer (vLLM's sampler)",
        moving(amid_moves("kill", True)),
        6,
        STAGE_DIED,
    ),
    Kind("a sampler is killed amid KV transfers of two hosts", hosts(moving(killed_sampler)), 4),
    Kind(
        "a worker is killed amid a KV transfer of two hosts",
        hosts(moving(amid_moves("kill"))),
        4,
        STAGE_DIED,
    ),
    Kind("a KV connector raises an error", moving(amid_moves("raise")), 6, "planted in"),
    Kind("a sampler of another host is killed", hosts(killed_sampler), 6),
    Kind("a worker of another host is killed", hosts(busy_last), 6, STAGE_DIED),
    Kind("another host's agent is killed", hosts(signalled(AGENT, "kill")), 6, HOST_LOST),
    Kind("another host's agent is told to end", hosts(signalled(AGENT, "term")), 4, HOST_LOST),
    Kind("another host's agent is stopped for 1 s", hosts(stopped_agent(1)), 4),
    Kind("another host's agent is stopped for ever", hosts(stopped_agent(FOR_EVER)), 4, HOST_LOST),
    Kind("the main host's engine is killed", hosts(busy_engine(False)), 6, "killed"),
    Kind("strangers come to the ports between hosts", hosts(signalled(AGENT, "strangers")), 4),
    Kind(
        "the connection between engine and agent is cut",
        hosts(signalled(AGENT, "cut engine")),
        4,
        HOST_LOST,
    ),
    Kind(
        "the connection between stages of two hosts is cut",
        hosts(signalled(AGENT, "cut stages")),
        4,
        ANY,
    ),
]
