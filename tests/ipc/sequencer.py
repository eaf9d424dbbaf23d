"""Runs the real rings on the kernel's real locks, one step of one actor at a time.

An actor is a thread that stands for a process: it has descriptions, and so locks, of its own. It
stops before every lock call and every store (and before the loads that race with stores); who
goes on is the test's choice, so a run is an interleaving that can be repeated. A kill closes the
actor's descriptors between two steps, which is what the kernel does to a dead process's locks,
and lets the thread do nothing more. A lock that is not free blocks the actor until something has
changed. Time stands still until nobody can go on; then bounded waits time out, and if there is
none, the actors are in a deadlock.

Every change of an entry is held against the table of :mod:`tests.ipc.entry_states`.
"""

import os
import threading
import types

from tests.ipc.entry_states import EntryEvent, EntryState, fire

from sipipe.ipc.ring import dispatch, ends, layout, ring

_HAND_OVER = 60  # seconds; a bug in the sequencer itself, not a bound that a test relies on


class Killed(BaseException):
    """Unwinds the thread of a killed actor."""


class Actor:
    def __init__(self, name, body):
        self.name = name
        self.body = body
        self.go = threading.Semaphore(0)
        self.steps = 0
        self.blocked_at = None  # the change count at which it found its lock taken
        self.deadline = None
        self.done = self.killed = False
        self.error = None
        self.locks = []


class Sequencer:
    """``choices``: pairs of an actor's number and the steps that it takes in a row, afterwards all
    take turns; ``kills``: after which step an actor dies, by name."""

    def __init__(self, choices=(), kills=()):
        self.choices = list(reversed(choices))
        self.kills = dict(kills)
        self.actors = {}
        self.back = threading.Semaphore(0)
        self.local = threading.local()
        self.changes = 0
        self.now = 0.0
        self.taken = 0
        self.states = {}  # lock byte: EntryState
        self.held = {}  # (locks, byte): kind
        self.ranks = 1
        self.entries = None
        self.committed = set()

    def patch(self, monkeypatch):
        """Put the stepped classes in the place of the ring's own."""
        sequencer = self

        class SteppedLocks(ring.Locks):
            def __init__(self, path):
                super().__init__(path)
                sequencer.local.actor.locks.append(self)

            def try_lock(self, kind, first, count=1):
                sequencer.step()
                taken = super().try_lock(kind, first, count)
                if taken:
                    sequencer.on_lock(self, kind, first, count)
                return taken

            def wait_lock(self, kind, first, count=1):
                while not self.try_lock(kind, first, count):
                    sequencer.step(block=True)

            def unlock(self, first, count=1):
                sequencer.step()
                super().unlock(first, count)
                sequencer.on_unlock(self, first, count)

            def close(self):
                if self.fd >= 0:
                    sequencer.step()
                    super().close()
                    sequencer.on_close(self)

        real_words = ring.words_of

        class SteppedWords:
            def __init__(self, memory, count):
                self.words = real_words(memory, count)

            def __setitem__(self, word, value):
                sequencer.step()
                self.words[word] = value
                if not isinstance(word, slice):  # a header
                    sequencer.changes += 1
                    sequencer.on_store(word)

            def __getitem__(self, word):
                if isinstance(word, slice) or word in sequencer.racing:
                    sequencer.step()
                return self.words[word]

        def sleep(seconds):
            # A second at least: a loop that looks every millisecond would take thousands of turns.
            sequencer.step(block=True, deadline=sequencer.now + max(seconds, 1.0))

        self.racing = set()
        clock = types.SimpleNamespace(monotonic=lambda: sequencer.now, sleep=sleep)
        monkeypatch.setattr(ring, "Locks", SteppedLocks)
        monkeypatch.setattr(ring, "words_of", SteppedWords)
        for module in (dispatch, ends):
            monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(layout, "READERS", 4)

    def watch(self, shape):
        """Tell the layout, so that commit words and entry locks are known by their numbers."""
        self.ranks, self.entries = shape.ranks, shape.entries
        self.commit_words = {
            shape.entry_word(e, r) + layout.E_COMMIT: e * shape.ranks + r
            for e in range(shape.entries)
            for r in range(shape.ranks)
        }
        self.racing = {layout.VERSION, *self.commit_words}
        self.racing |= {shape.reader_word(k) + layout.R_ATTACHED for k in range(layout.READERS)}
        self.racing |= {shape.writer_word(r) + layout.W_PUBLISHED for r in range(shape.ranks)}

    def spawn(self, name, body):
        """Add an actor; it runs ``body`` when it is chosen."""
        actor = self.actors[name] = Actor(name, body)
        threading.Thread(target=self._main, args=(actor,), daemon=True).start()
        self.changes += 1
        return actor

    def run(self):
        """Until every actor has ended. Raises the first error of an actor."""
        while alive := [actor for actor in self.actors.values() if not actor.done]:
            ready = [a for a in alive if a.blocked_at is None or a.blocked_at < self.changes]
            if not ready:
                timed = [a.deadline for a in alive if a.deadline is not None]
                assert timed, f"deadlock: {[a.name for a in alive]}"
                self.now = min(timed)
                ready = [a for a in alive if a.deadline == self.now]
            actor = self._choose(ready)
            self.taken += 1
            assert self.taken < 100_000, "no end"
            actor.blocked_at = actor.deadline = None
            if self.kills.get(actor.name) == actor.steps:
                self._kill(actor)
            actor.go.release()
            assert self.back.acquire(timeout=_HAND_OVER)
            if actor.error is not None:
                raise actor.error

    def _choose(self, ready):
        """The chosen actor goes on for its burst, or until it blocks; then all in turn."""
        while self.choices:
            pick, burst = self.choices[-1]
            actor = list(self.actors.values())[pick % len(self.actors)]
            if burst == 0 or actor not in ready:
                self.choices.pop()
                continue
            self.choices[-1] = (pick, burst - 1)
            return actor
        return ready[self.taken % len(ready)]

    def step(self, block=False, deadline=None):
        """Called by the acting thread before each step."""
        actor = self.local.actor
        if actor.killed:
            raise Killed
        actor.steps += 1
        if block:
            actor.blocked_at, actor.deadline = self.changes, deadline
        self.back.release()
        assert actor.go.acquire(timeout=_HAND_OVER)
        if actor.killed:
            raise Killed

    def _main(self, actor):
        self.local.actor = actor
        assert actor.go.acquire(timeout=_HAND_OVER)
        try:
            if not actor.killed:
                actor.body()
        except Killed:
            pass
        except BaseException as error:
            actor.error = error
        actor.done = True
        self.changes += 1
        self.back.release()

    def _kill(self, actor):
        actor.killed = True
        for held in actor.locks:
            if held.fd >= 0:
                os.close(held.fd)
                held.fd = -1
                self.on_close(held)

    # The entries' states: one per lock byte below entries x ranks.

    def _fire(self, byte, event):
        self.states[byte] = fire(self.states.get(byte, EntryState.FREE), event)

    def _entry_bytes(self, first, count):
        if self.entries is None:
            return []
        return [b for b in range(first, first + count) if b < self.entries * self.ranks]

    def on_lock(self, held, kind, first, count):
        for byte in self._entry_bytes(first, count):
            if (held, byte) not in self.held:
                self.held[held, byte] = kind
                claim = kind == ring.EXCLUSIVE
                self._fire(byte, EntryEvent.CLAIM if claim else EntryEvent.ENTER)

    def on_store(self, word):
        if self.entries is not None and word in self.commit_words:
            self.committed.add(self.commit_words[word])

    def on_unlock(self, held, first, count):
        self.changes += 1
        for byte in self._entry_bytes(first, count):
            kind = self.held.pop((held, byte), None)
            if kind == ring.EXCLUSIVE:
                published = byte in self.committed
                self.committed.discard(byte)
                self._fire(byte, EntryEvent.PUBLISH if published else EntryEvent.PRODUCER_GONE)
            elif kind is not None:
                others = any(b == byte for _, b in self.held)
                self._fire(byte, EntryEvent.LEAVE if others else EntryEvent.LEAVE_LAST)

    def on_close(self, held):
        self.changes += 1
        for mine, byte in list(self.held):
            if mine is held:
                self.on_unlock(held, byte, 1)
