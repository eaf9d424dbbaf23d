"""Two stages on the emulated device, driven as the engine, its workers and its samplers do.

Everything between vLLM's model runner and the samplers is the real thing: ``LoadedStage``,
``SampledStage``, ``DoubleBuffer``, ``SiPipePrepares``, ``Publisher``, ``ProjectionThread``,
``CudaStageDevice``, links between GPUs, BIC-L, and vLLM's own worker step and asynchronous output. In
place of the model runner stands :class:`.integer_runner.Runner`, whose model is integer arithmetic, so
that one wrong byte shows.

The test's own thread is the device thread of both stages; their preparing threads, publishers and
projection thread are actors. The seed chooses who goes on, and an iteration i + m is dispatched as early as
the engine may: once iteration i has been heard of. Control calls come between iterations.
"""

from __future__ import annotations

import queue
import random
import socket
import threading
import traceback
from collections import deque
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
from tests.ipc.link.wire import Wire
from tests.scheduled import new_request
from vllm.distributed import parallel_state
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.sample import gumbel

from sipipe.ipc.link import host_copies, zeromq
from sipipe.ipc.link import sender as sender_module
from sipipe.ipc.link.endpoint import open_receiver, open_sender
from sipipe.ipc.link.shm import ShmReceiving, ShmSending
from sipipe.ipc.ring.ends import RingWriter
from sipipe.ipc.ring.logits import LogitsChannel, LogitsReader
from sipipe.messages.calls import OpenChannels
from sipipe.messages.header import Header, Kind
from sipipe.messages.link import LinkEndpoint
from sipipe.messages.logits import LogitsShape
from sipipe.messages.stage_place import StagePlace
from sipipe.messages.step import int32_bytes
from sipipe.observe.format import Header as TraceHeader
from sipipe.observe.recorder import open_recorder
from sipipe.worker import device as device_module
from sipipe.worker import double_buffer, late_input, loaded_stage
from sipipe.worker.hooks.vllm_workers import GPUStageWorker
from sipipe.worker.hooks.world import PipelineStandIn
from sipipe.worker.links import Links
from sipipe.worker.loaded_stage import LoadedStage
from sipipe.worker.projection.projection import KEY
from sipipe.worker.publisher import Publisher
from sipipe.worker.sampled_stage import Surroundings

from .emulated_cuda import SteppedQueue
from .emulated_tensors import Factories, FactoriesThread
from .integer_runner import (
    BLOCK,
    HEAD,
    HIDDEN,
    INFLIGHT,
    ROWS,
    VOCAB,
    Runner,
    expected_hidden,
    gumbel_sample,
)

CHUNK = 9  # tokens of a prompt in an iteration, at most
BUFFER_TOKENS = 10
"""Of the link: up to three rows of up to nine tokens come in up to three pieces."""


def pieces(output):
    return -(-output.total_num_scheduled_tokens // BUFFER_TOKENS)


class Columns:
    """A rank's rows of the output projection."""

    def __init__(self, start, stop, device):
        self.part = HEAD[:, start:stop].to(device)

    def multiply(self, hidden, _):
        return hidden @ self.part


class Request:
    def __init__(self, number, choose, shared):
        self.id, self.row = f"r{number}", None
        length = choose.randint(1, choose.choice((CHUNK, 8 * CHUNK)))
        self.prompt = [choose.randrange(50) for _ in range(length)]
        self.computed, self.blocks = 0, []
        self.params = SamplingParams(
            temperature=choose.choice((0.0, 0.5, 1.0)),
            seed=choose.randrange(1000),
            top_k=choose.randint(0, 1),  # 1: a sampler draws
        )
        if shared:
            self.params.top_k = 1
        self.token = None
        """The last one drawn."""

    def grow(self, tokens, choose):
        """The new blocks for ``tokens`` more."""
        count = -(-(self.computed + tokens) // BLOCK) - len(self.blocks)
        new = [choose.randint(1, 40) for _ in range(count)]
        self.blocks += new
        return new


class Worker(GPUStageWorker):
    """vLLM's worker of a stage, with no more than its step needs."""

    def __init__(self, boot, runner):
        self.model_runner = runner
        self.boot = boot
        self.use_v2_model_runner = True
        self.profiler = None
        self._pp_send_work = []
        parallel = SimpleNamespace(distributed_executor_backend=object())
        self.vllm_config = SimpleNamespace(parallel_config=parallel)


class DeviceTurns:
    """A stage's device thread, turn by turn in the test's own thread.

    In a worker it is the loop of ``DoubleBuffer.run``, which ends with the worker alone. The rig has to
    know before a turn whether that would sleep, since one thread is the device thread of all stages."""

    def __init__(self, buffer):
        self._buffer = buffer

    def calls(self):
        """Whether the next turn is a call."""
        return bool(self._buffer._calls)  # noqa: SLF001

    def may_run(self):
        """Whether an iteration is prepared."""
        return self._buffer._turns.may_read  # noqa: SLF001

    def take(self):
        self._buffer._run_one()  # noqa: SLF001


def send_at_once(sender):
    """Have what ``sender`` sends leave at once, and not by a thread that runs as it likes.

    That thread's frames are put into the calling one, which is the stage's device thread. Rejected: an
    actor, as links by host memory have. It would be one more who can be late, and hide others' faults."""
    sender.flush()

    def transmit(job):
        sender._transmit(job)  # noqa: SLF001
        sender._completed += 1  # noqa: SLF001

    end = sender._jobs.put  # noqa: SLF001
    jobs = SimpleNamespace(put=lambda job: end(None) if job is None else transmit(job))
    sender._jobs = jobs  # noqa: SLF001


class Preparing:
    """The preparing thread of a stage: an actor."""

    def __init__(self, rig, loop):
        self.rig, self.loop = rig, loop
        self.queue = SteppedQueue()
        self.actor = self.queue.actor
        self.thread = threading.Thread(target=self.run, name="SiPipePreparing")
        self.thread.start()

    def run(self):
        while (job := self.queue.get()) is not None:
            try:
                job()
            except Exception as error:
                self.rig.failed(error)
                return


class SteppedTokens:
    """In place of a stage's queue of tokens: who waits for some lets all others go on."""

    def __init__(self, rig, stage):
        self.rig, self.stage, self.items = rig, stage, deque()

    def put(self, item):
        self.items.append(item)

    def get(self, timeout):
        assert timeout is None
        self.rig.awaiting.add(self.stage)
        while not self.items:
            self.rig.go_on(waiting=True)
        self.rig.awaiting.remove(self.stage)
        return self.items.popleft()


class SteppedCondition(threading.Condition):
    """Who waits gives its turn away."""

    def __init__(self, rig, lock=None):
        super().__init__(lock)
        self.rig = rig

    def wait_for(self, predicate, _=None):
        for _ in range(10_000):
            if predicate():
                return True
            self.release()
            self.rig.give_way()
            self.acquire()
        return False


class SteppedProgress(SteppedCondition):
    """Of a sender, for which who launches may wait when it drains alone."""

    draining = False

    def wait_for(self, predicate, _=None):
        launching = threading.current_thread() is self.rig.machine.launching
        if launching and not (self.draining or predicate()):
            self.rig.wrong.append("who launches waited until hidden states had left")
        for _ in range(10_000):
            if predicate():
                return True
            self.wait(1)
        return False

    def wait(self, bound):
        self.release()
        if bound:
            self.rig.give_way(runs=False)
        self.acquire()
        return bool(bound)


class OpenedEnds:
    """In place of ``LinkEnds``: links that are opened when they are used, in turn, and not tried."""

    def __init__(self, links, heads, sockets, fail):
        self.links, self.heads, self.sockets, self.fail = links, heads, sockets, fail
        self.senders, self.receivers = [], []

    def take_sender(self, receiver):
        link = self.links[0] if receiver else self.heads[0]
        sock = None if link.port else self.sockets.pop(0)
        self.senders.append(open_sender(link, sock, self.fail))
        return link, self.senders[-1]

    def take_receiver(self, sender):
        link = self.heads[0] if sender else self.links[0]
        sock = None if link.port else self.sockets.pop(0)
        self.receivers.append(open_receiver(link, sock, self.fail))
        return link, self.receivers[-1]

    def close(self):
        pass


def threads(**names):
    """The module ``threading`` with these names in it."""
    return SimpleNamespace(**vars(threading) | names)


class Rig:
    """``seed``: one schedule. ``shared``: the output projection is, samplers draw all rows.
    ``kind``: what carries hidden states; by host memory, the link's threads are actors too.
    ``wrong`` says what went wrong, in order."""

    def __init__(
        self,
        monkeypatch,
        machine,
        seed,
        *,
        graphs=True,
        depth=INFLIGHT,
        shared=False,
        kind="cuda_ipc",
    ):
        self.machine, self.monkeypatch, self.shared = machine, monkeypatch, shared
        self.by_host = kind != "cuda_ipc"
        if self.by_host:
            for module in (sender_module, host_copies):
                monkeypatch.setattr(module, "queue", SimpleNamespace(SimpleQueue=SteppedQueue))
            self.wait_for_links()
        condition = partial(SteppedCondition, self)
        monkeypatch.setattr(double_buffer, "threading", threads(Condition=condition))
        # The projection's thread multiplies on a device, and makes tensors there.
        stepped = threads(Condition=condition, Thread=FactoriesThread)
        monkeypatch.setattr(device_module, "threading", stepped)
        self.last_marks = {}
        """The mark behind the last iteration that each stage has launched."""
        monkeypatch.setattr(Publisher, "put", self.note_mark(Publisher.put))
        monkeypatch.setattr(zeromq, "Connection", Wire)
        monkeypatch.setattr(Wire, "ends", Wire.ends.copy())
        self.choose = choose = random.Random(seed)
        self.wrong = []
        rows = INFLIGHT * ROWS
        self.requests = [Request(number, choose, shared) for number in range(rows)]
        self.free = list(range(rows))
        self.asked = np.array([choose.random() < 0.3 for _ in range(rows)])
        self.depth = depth
        link = LinkEndpoint(
            kind=kind,
            buffer_tokens=BUFFER_TOKENS,
            depth=depth,
            device="cuda",
            port=1 if kind == "zeromq" else 0,
        )
        head = LinkEndpoint(kind="cuda_ipc", buffer_tokens=ROWS, depth=INFLIGHT, device="cuda")
        pairs = [
            socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            for _ in range((kind != "zeromq") + shared)
        ]
        bounds = (0, 5, VOCAB) if shared else ()
        self.channel = LogitsChannel(
            "logits",
            LogitsShape(vocab=VOCAB, bounds=bounds),
            rows=INFLIGHT * ROWS,
            entries=INFLIGHT + 2,
            readers=["a"],
        )
        self.reader = LogitsReader(self.channel.endpoint, "a")
        self.committed = [0, 0] if shared else [0]
        self.expected, self.reports, self.tokens, self.waits_for = {}, {}, {}, {}
        monkeypatch.setattr(gumbel, "gumbel_sample", gumbel_sample)
        monkeypatch.setattr(buffer_utils, "_DEFAULT_MAX_CONCURRENCY", INFLIGHT)
        self.dispatched, self.launched = 0, [0, 0]
        self.iterations = self.drawn = self.burst = 0
        self.favourite = None
        self.awaiting = set()
        """Stages whose device thread waits for tokens."""
        self.planned = None
        """What was published of the next iteration, and its tokens."""
        self.running = set()
        """Stages whose device thread is in something."""
        self.products = deque()
        """Iterations that the projection thread has not begun."""
        self.actors = {}
        self.outputs = []
        self.groups, self.loops, self.preparing = [], [], []
        self.ends, self.turns = [], []
        for stage in range(2):
            place = StagePlace(stage=stage, stages=2, tp_rank=0, tp_size=1)
            self.groups.append(PipelineStandIn(place))
            with self.on(stage):
                self.open(place, [link], [head], [pair[stage] for pair in pairs], bounds, graphs)

    def open(self, place, links, heads, sockets, bounds, graphs):
        stage, known = place.stage, len(self.machine.actors)
        boot = SimpleNamespace(
            place=place,
            path="sipipe",
            measures=False,
            draws=True,
            rows=64,
            speculates=False,
            cpus=(),
            links=(),
            vllm_config=SimpleNamespace(kv_transfer_config=None),
            parts=(),
            config=SimpleNamespace(
                transport="auto",
                stall_timeout=30,
                cpu_sampling="on" if self.shared else "per_row",
            ),
            watched=SimpleNamespace(inflight=INFLIGHT),
        )
        worker = Worker(boot, Runner(place, self.asked, graphs=graphs))
        around = Surroundings(
            boot=boot,
            wrapper=SimpleNamespace(worker=worker, execute_model=worker.execute_model),
            report=self.reported,
            recorder=open_recorder(None, TraceHeader(role="stage")),
            fail=self.failed,
        )
        ends = OpenedEnds(links, heads, sockets, self.failed)
        with patch.object(loaded_stage, "LinkEnds", lambda *_: ends):
            loop = LoadedStage(around, [])
        self.ends.append(ends)
        self.loops.append(loop)
        if self.shared:
            start, stop = bounds[stage : stage + 2]
            loop.sharing.shard = Columns(start, stop, worker.model_runner.device)
            loop.sharing.writer = stage
        tokens = partial(SteppedTokens, self, stage)
        queues = SimpleNamespace(SimpleQueue=tokens, Empty=queue.Empty)
        with patch.object(late_input, "queue", queues):
            loop.open(OpenChannels(logits=self.channel.endpoint))
        self.turns.append(DeviceTurns(loop.double_buffer))
        self.preparing.append(Preparing(self, loop))
        names = [f"head {stage}"] if self.shared and stage == 0 else []
        if self.by_host:
            names = ["arrive 1"] if stage else ["send 0"]
        names += [f"publish {stage}", f"prepare {stage}"]
        for name, actor in zip(names, self.machine.actors[known:], strict=True):
            assert actor.back.acquire(timeout=60)
            self.actors[name] = actor

    @contextmanager
    def on(self, stage):
        """The calling thread is the device thread of ``stage``."""
        before, self.machine.device = self.machine.device, stage
        with (
            Factories(),
            patch.object(parallel_state, "_PP", self.groups[stage]),
            patch.object(parallel_state, "_TP", object()),
        ):
            yield
        self.machine.device = before

    def wait_for_links(self):
        """Have the ends of a link by host memory wait for one another by giving their turn away."""

        def patient(look):
            def wait(transport, timeout):
                for _ in range(10_000):
                    if (news := look(transport, 0.0)) is not None or not timeout:
                        return news
                    self.give_way(runs=False)
                return None

            return wait

        patch_name = self.monkeypatch.setattr
        patch_name(ShmReceiving, "receive", patient(ShmReceiving.receive))
        patch_name(ShmSending, "next_release", patient(ShmSending.next_release))
        progress = SteppedProgress(self)  # of the one sender
        patch_name(sender_module, "threading", threads(Condition=lambda: progress))
        flush = Links.flush

        def drain(links):
            progress.draining = True
            flush(links)
            progress.draining = False

        patch_name(Links, "flush", drain)

    def note_mark(self, put):
        """A publisher's ``put`` that notes the mark behind an iteration."""

        def note(publisher, launched):
            self.last_marks[self.machine.device] = launched.last
            put(publisher, launched)

        return note

    def reported(self, report):
        """Stands for the engine, which hears of an iteration from the last stage's publisher."""
        iteration, prompt_logprobs = report.iteration, report.prompt_logprobs
        expected = self.reports.get(iteration)
        if list(report.tokens) != self.tokens.get(iteration, []):
            self.wrong.append(f"tokens of iteration {iteration}")
        if expected is None or sorted(prompt_logprobs) != sorted(expected):
            self.wrong.append(f"iteration {iteration} reported {sorted(prompt_logprobs)}")
            return
        for req_id, tensors in prompt_logprobs.items():
            if not torch.equal(tensors.logprobs, expected[req_id]):
                self.wrong.append(f"prompt scores of iteration {iteration}")
        self.waits_for[iteration].discard("report")

    def failed(self, error):
        """A thread that is an actor ends."""
        self.wrong.append(repr(error))
        self.machine.local.actor.end()

    # ---- the engine -----------------------------------------------------------------------------

    def schedule(self, iteration):
        """The iteration's slot has no other in flight; requests decode, or go on with prompts."""
        slot = iteration % INFLIGHT
        requests = self.requests[slot * ROWS : (slot + 1) * ROWS]
        self.choose.shuffle(requests)
        output = SchedulerOutput.make_empty()
        output.scheduled_cached_reqs = cached = CachedRequestData.make_empty()
        logits, scores, tokens_here = [], {}, []
        for request in requests:
            start, left = request.computed, len(request.prompt) - request.computed
            if left > 0:
                most = min(left, CHUNK)
                tokens = request.prompt[start : start + self.choose.choice((1, most, most))]
            else:
                tokens = [request.token]
            blocks = request.grow(len(tokens), self.choose)
            if start == 0:
                output.scheduled_new_reqs.append(self.introduce(request, blocks))
            else:
                cached.req_ids.append(request.id)
                cached.num_computed_tokens.append(start)
                cached.new_token_ids.append([] if left > 0 else tokens)
                cached.new_block_ids.append((blocks,) if blocks else None)
            request.computed += len(tokens)
            output.num_scheduled_tokens[request.id] = len(tokens)
            hidden = expected_hidden(tokens, start, request.row, request.blocks)
            if left > 0 and self.asked[request.row]:
                scores[request.id] = hidden + 1
            if request.computed >= len(request.prompt):
                row = hidden[-1] @ HEAD
                request.token = int(row.sum()) % 50
                if request.params.top_k:
                    logits.append(row)
                else:
                    given = request.params.temperature * 10 + request.params.seed
                    tokens_here.append(int(row.sum() + given) + 100 * (request.computed - 1))
        output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
        self.waits_for[iteration] = set()
        if logits:
            self.expected[iteration] = torch.stack(logits)
            self.waits_for[iteration].add("logits")
        if tokens_here:
            self.tokens[iteration] = tokens_here
        if scores or tokens_here or not logits:
            self.reports[iteration] = scores
            self.waits_for[iteration].add("report")
        return output

    def introduce(self, request, blocks):
        request.row = self.free.pop()
        return new_request(
            request.id,
            request.prompt,
            params=request.params,
            blocks=(blocks,),
            prefill=request.prompt,
        )

    def plan(self):
        """The next iteration to both stages, without its tokens, which are still out."""
        iteration = self.dispatched
        output = self.schedule(iteration)
        self.outputs.append(output)
        cached = output.scheduled_cached_reqs
        self.planned = int32_bytes([token for [token] in cached.new_token_ids])
        cached.new_token_ids = []
        header = Header(Kind.PLAN, iteration % INFLIGHT, iteration)
        for preparing in self.preparing:
            buffer = preparing.loop.double_buffer
            preparing.queue.put(lambda buffer=buffer: buffer.prepare(header, output))

    def may_plan(self):
        slot = self.dispatched % INFLIGHT
        requests = self.requests[slot * ROWS : (slot + 1) * ROWS]
        return self.planned is None and all(r.computed >= len(r.prompt) for r in requests)

    def dispatch(self):
        """An iteration to both stages, and now and then a call."""
        iteration, planned = self.dispatched, self.planned
        if planned is None:
            self.outputs.append(self.schedule(iteration))
        self.dispatched, self.planned = self.dispatched + 1, None
        slot, logits = iteration % INFLIGHT, "logits" in self.waits_for[iteration]
        row, rows = (slot * ROWS, len(self.expected[iteration])) if logits else (-1, 0)
        output = self.outputs[iteration]
        for stage, preparing in enumerate(self.preparing):
            loop = preparing.loop
            job, do = output, loop.double_buffer.prepare
            if planned is not None:
                job, do = planned, loop.running.tokens
            header = Header(Kind.SCHEDULE, slot, iteration, row, rows)
            preparing.queue.put(lambda do=do, header=header, job=job: do(header, job))
            if self.choose.random() < 0.1:
                call = (stage, self.dispatched)
                preparing.queue.put(lambda loop=loop, call=call: loop.call(self.alone(*call)))

    def alone(self, stage, dispatched):
        """A call: every iteration before it has run on the device, and is told."""

        def call():
            if self.launched[stage] != dispatched:
                self.wrong.append("a call ran before an iteration")
            if not self.machine.reached(self.last_marks[stage].place):
                self.wrong.append("a call ran beside an iteration")
            publisher = self.actors[f"publish {stage}"]
            if not publisher.idle or not publisher.items.empty():
                self.wrong.append("a call ran before an iteration was handed on")

        return call

    def run_one(self, stage):
        """A turn of the device thread of ``stage``."""
        turns = self.turns[stage]
        iterates = not turns.calls()
        if iterates and not stage and self.waits_rows(self.launched[0]):
            self.products.append(self.launched[0])
        self.launched[stage] += iterates
        self.running.add(stage)
        with self.on(stage):
            turns.take()
        self.running.remove(stage)

    def waits_rows(self, iteration):
        return self.shared and iteration in self.expected

    def draw(self):
        """Stands for a sampler: it reads as soon as there is something."""
        with self.reader.receive() as entry:
            found = torch.from_numpy(entry.array.copy())
            expected = self.expected.get(entry.iteration)
            if expected is None or not torch.equal(found, expected):
                self.wrong.append(f"logits of iteration {entry.iteration}")
            self.waits_for.get(entry.iteration, set()).discard("logits")

    # ---- one schedule ---------------------------------------------------------------------------

    def resolved(self, iteration):
        return iteration < 0 or self.waits_for.get(iteration) == set()

    def choices(self, iterations):
        found = self.others() | self.runs()
        if self.dispatched < iterations:
            if self.resolved(self.dispatched - INFLIGHT):
                found["dispatch"] = self.dispatch
            elif self.may_plan():
                found["plan"] = self.plan
        return found

    def runs(self):
        """Device threads that can go on."""
        found, (first, last) = {}, self.launched
        first -= 0 in self.awaiting  # what it sends is still to come
        for stage, turns in enumerate(self.turns):
            if any(stage <= other for other in self.running):
                continue  # what it waits for may be the other's, which is this very thread
            if turns.calls():
                found[f"run {stage}"] = lambda stage=stage: self.run_one(stage)
            if not turns.may_run():
                continue
            # Else the sender waits for a buffer, or the receiver, in the thread that is all stages'.
            room = sum(map(pieces, self.outputs[last : first + 1])) <= self.depth
            if last < first if stage else room:
                found[f"run {stage}"] = lambda stage=stage: self.run_one(stage)
        return found

    def others(self):
        """Other threads that can."""
        found = {}
        for name, actor in self.actors.items():
            if name == "head 0" and actor.idle:
                # Else it waits for the rows with the turn that is the last stage's, which sends them
                # at the end of its pass.
                sent = self.launched[1] - (1 in self.running)
                if self.products and self.products[0] < sent:
                    found[name] = lambda of=actor: (self.products.popleft(), of.let())
            elif not actor.free and (not actor.idle or not actor.items.empty()):
                found[name] = actor.let
        return found

    def give_way(self, *, runs=True):
        """The calling thread waits: another goes on. ``runs``: also a stage's device thread, which
        must not be where it might wait for what the calling one has still to send."""
        actor = getattr(self.machine.local, "actor", None)
        if actor is not None:
            actor.step()
            return
        found = self.others() | (self.runs() if runs else {})
        self.choose.choice([*found.values(), lambda: None])()

    def run(self, iterations):
        """Returns what went wrong; nothing: the schedule went well."""
        publish = RingWriter.publish

        def count(writer, header):
            publish(writer, header)
            self.committed[writer.rank] += 1

        self.monkeypatch.setattr(RingWriter, "publish", count)
        # The first frame brings the link's memory, by a thread of the link.
        if self.shared:
            self.open_head()
        try:
            self.go(iterations)
        except Exception:
            self.wrong.append(traceback.format_exc())
        machine = self.machine
        self.wrong += [f"on the device: {error!r}" for error in machine.errors]
        self.wrong += [f"a thread waited for {what}" for what in machine.waits]
        self.wrong += [f"{name} used a stage's own stream" for name in machine.strangers]
        self.wrong += [f"{name} made a context on another GPU" for name in machine.foreign]
        return list(self.wrong)

    def go(self, iterations):
        self.dispatch()
        for stage in range(2):
            while not self.turns[stage].may_run():
                self.actors[f"prepare {stage}"].let()
            self.run_one(stage)
        if not self.by_host:
            send_at_once(self.ends[0].senders[0])
        self.machine.waits.clear()
        self.machine.calm = False
        self.iterations = iterations
        while not self.wrong and not all(map(self.resolved, range(iterations))):
            self.go_on()

    def go_on(self, waiting=False):
        """Somebody goes on. ``waiting``: it is the device thread of a stage that asks."""
        choices = self.choices(self.iterations)
        if not choices:
            self.wrong.append("nobody can go on")
        if self.wrong:
            if waiting:
                raise TimeoutError("something went wrong")
            return
        if not self.burst:  # one goes on for a while, so that others are late
            who = ["dispatch", "plan", "run 0", "run 1", *self.actors]
            self.favourite, self.burst = self.choose.choice(who), self.choose.randint(1, 8)
        self.burst -= 1
        name = self.favourite if self.favourite in choices else self.choose.choice(list(choices))
        choices[name]()
        while self.drawn < min(self.committed):
            self.drawn += 1
            self.draw()

    def open_head(self):
        """As the first frame of the link does, which brings its memory."""
        [sender] = self.ends[1].senders
        [receiver] = self.ends[0].receivers
        with self.on(1):
            sender.send(0, 1, {KEY: torch.zeros(1, HIDDEN, device="cuda:1")})
        with self.on(0):
            receiver.take(0, 1)
            receiver.release(0)
        send_at_once(sender)
        sender.wait_released()  # iterations begin with 0 again

    def close(self):
        self.machine.calm = True
        for loop in self.loops:
            loop.double_buffer.close()
        for preparing in self.preparing:
            preparing.queue.put(None)
        for actor in self.actors.values():
            actor.end()
        for stage, loop in enumerate(self.loops):
            with self.on(stage):
                loop.close()
        for preparing in self.preparing:
            preparing.thread.join(60)
        self.reader.close()
        self.channel.close()
