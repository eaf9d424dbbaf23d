"""Two stages on the emulated device, driven as the engine, its workers and its samplers do.

Everything between vLLM's model runner and the samplers is the real thing: ``StageLoop``,
``SecondRunner``, ``TokenFeedback``, ``Publisher``, ``HeadThread``, ``CudaStageDevice``, links between GPUs, BIC-L,
and vLLM's own worker step, staging buffers and asynchronous output. In place of the model runner
stands :class:`.integer_runner.Runner`, whose model is integer arithmetic, so that one wrong byte shows.

One thread launches both stages; publishers and the head thread are actors. The seed chooses who goes on, and an
iteration i + m is launched as early as the engine may: once iteration i has been heard of.
"""

from __future__ import annotations

import random
import socket
from collections import deque
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
from sipipe.worker.second_runner import feedback_of
from vllm.distributed import parallel_state
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.sample import gumbel

from sipipe.ipc.ring.logits import LogitsChannel, LogitsReader
from sipipe.messages.link import LinkEndpoint
from sipipe.messages.logits import LogitsShape
from sipipe.messages.places import StagePlace
from sipipe.observe.format import Header
from sipipe.observe.recorder import open_recorder
from sipipe.worker.device_vocabulary import HeadThread
from sipipe.worker.loop import StageLoop
from sipipe.worker.vllm_workers import GPUStageWorker
from sipipe.worker.vocabulary import KEY
from sipipe.worker.world import PipelineStandIn

from .emulated_tensors import Factories
from .integer_runner import (
    HEAD,
    HIDDEN,
    INFLIGHT,
    ROWS,
    VOCAB,
    Runner,
    expected_hidden,
    gumbel_sample,
)

_WHO = ("launch 0", "launch 1", "publish 0", "publish 1")


CHUNK = 9  # tokens of a prompt in an iteration, at most
BUFFER_TOKENS = 10
"""Of the link: up to three rows of up to nine tokens come in up to three pieces."""


def pieces(output):
    return -(-output.total_num_scheduled_tokens // BUFFER_TOKENS)


class Columns:
    """A rank's rows of the output projection."""

    def __init__(self, start, stop, device):
        self.part = HEAD[:, start:stop].to(device)

    def whole(self, hidden):
        return hidden @ self.part


class Request:
    def __init__(self, row, choose, shared):
        self.id, self.row = f"r{row}", row
        length = choose.randint(1, choose.choice((CHUNK, 4 * CHUNK)))
        self.prompt = [choose.randrange(50) for _ in range(length)]
        self.computed = 0
        self.params = SamplingParams(
            temperature=choose.choice((0.0, 0.5, 1.0)),
            seed=choose.randrange(1000),
            top_k=choose.randint(0, 1),  # 1: a sampler draws
        )
        if shared:
            self.params.top_k = 1
        self.token = None
        """The last one drawn."""


class Rig:
    """``seed``: one schedule. ``shared``: the output projection is, samplers draw all rows.
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
    ):
        self.machine, self.monkeypatch, self.shared = machine, monkeypatch, shared
        self.choose = choose = random.Random(seed)
        self.wrong = []
        rows = INFLIGHT * ROWS
        self.requests = [Request(row, choose, shared) for row in range(rows)]
        self.asked = np.array([choose.random() < 0.3 for _ in range(rows)])
        states = SimpleNamespace(
            req_id_to_index={r.id: r.row for r in self.requests},
            prefill_len=SimpleNamespace(np=np.array([len(r.prompt) for r in self.requests])),
        )
        self.depth = depth
        link = LinkEndpoint(
            kind="cuda_ipc", buffer_tokens=BUFFER_TOKENS, depth=depth, device="cuda"
        )
        head = LinkEndpoint(kind="cuda_ipc", buffer_tokens=ROWS, depth=INFLIGHT, device="cuda")
        pairs = [
            socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(1 + shared)
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
        self.launched = [0, 0]
        self.products = deque()
        """Iterations that the head thread has not begun."""
        self.actors = {}
        do = HeadThread._do

        def with_factories(thread, launched):
            with Factories():
                do(thread, launched)

        monkeypatch.setattr(HeadThread, "_do", with_factories)
        self.outputs = []
        self.groups, self.loops = [], []
        for stage in range(2):
            place = StagePlace(stage=stage, stages=2, tp_rank=0, tp_size=1)
            self.groups.append(PipelineStandIn(place))
            with self.on(stage):
                worker = GPUStageWorker.__new__(GPUStageWorker)
                worker.model_runner = Runner(place, states, self.asked, graphs=graphs)
                worker.place, worker.draws, worker.use_v2_model_runner = place, True, True
                worker.profiler, worker._pp_send_work = None, []
                parallel = SimpleNamespace(distributed_executor_backend=object())
                worker.vllm_config = SimpleNamespace(parallel_config=parallel)
                worker.feedback = feedback_of(worker.model_runner, draws=True)
                loop = StageLoop(
                    SimpleNamespace(
                        place=place,
                        path="sipipe",
                        measures=False,
                        parts=(),
                        config=SimpleNamespace(
                            transport="auto",
                            stall_timeout=30,
                            cpu_sampling="on" if shared else "per_row",
                        ),
                        watched=SimpleNamespace(inflight=INFLIGHT),
                    ),
                    SimpleNamespace(worker=worker, execute_model=worker.execute_model),
                    [pair[stage] for pair in pairs],
                    self.reported,
                    open_recorder(None, Header(role="stage")),
                    self.failed,
                )
                self.loops.append(loop)
                if shared:
                    start, stop = bounds[stage : stage + 2]
                    loop._sharing.shard = Columns(start, stop, worker.model_runner.device)
                    loop._sharing.writer = stage
                loop.open(links=[link], heads=[head], logits=self.channel.endpoint)
                names = [f"head {stage}"] if shared and stage == 0 else []
                news = machine.actors[len(self.actors) :]
                for name, actor in zip([*names, f"publish {stage}"], news, strict=True):
                    assert actor.back.acquire(timeout=60)
                    self.actors[name] = actor

    @contextmanager
    def on(self, stage):
        """The calling thread is the launching thread of ``stage``."""
        self.machine.device = stage
        with (
            Factories(),
            patch.object(parallel_state, "_PP", self.groups[stage]),
            patch.object(parallel_state, "_TP", object()),
        ):
            yield

    def reported(self, iteration, prompt_logprobs, tokens, _):
        """Stands for the engine, which hears of an iteration from the last stage's publisher."""
        expected = self.reports.get(iteration)
        if tokens != self.tokens.get(iteration, []):
            self.wrong.append(f"tokens of iteration {iteration}")
        if expected is None or sorted(prompt_logprobs) != sorted(expected):
            self.wrong.append(f"iteration {iteration} reported {sorted(prompt_logprobs)}")
            return
        for req_id, tensors in prompt_logprobs.items():
            if not torch.equal(tensors.logprobs, expected[req_id]):
                self.wrong.append(f"prompt scores of iteration {iteration}")
        self.waits_for[iteration].discard("report")

    def failed(self, error):
        """A publisher's thread ends."""
        self.wrong.append(repr(error))
        self.machine.local.actor.end()

    # ---- the engine -----------------------------------------------------------------------------

    def schedule(self, iteration):
        """The iteration's slot has no other in flight; requests decode, or go on with prompts."""
        slot = iteration % INFLIGHT
        requests = self.requests[slot * ROWS : (slot + 1) * ROWS]
        self.choose.shuffle(requests)
        output = SchedulerOutput.make_empty()
        output.computed, output.prompt_tokens = {}, {}
        output.scheduled_cached_reqs = cached = CachedRequestData.make_empty()
        output.params = {}
        logits, scores, tokens_here = [], {}, []
        for request in requests:
            start, left = request.computed, len(request.prompt) - request.computed
            if left > 0:
                tokens = request.prompt[start : start + self.choose.randint(1, min(left, CHUNK))]
                output.prompt_tokens[request.id] = tokens
            else:
                tokens = [request.token]
                cached.req_ids.append(request.id)
                cached.num_computed_tokens.append(start)
                cached.new_token_ids.append(tokens)
            if start == 0:
                output.params[request.id] = request.params
            request.computed += len(tokens)
            output.num_scheduled_tokens[request.id] = len(tokens)
            output.computed[request.id] = start
            hidden = expected_hidden(tokens, range(start, request.computed), request.row)
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

    def launch(self, stage):
        iteration = self.launched[stage]
        self.launched[stage] += 1
        with self.on(stage):
            slot, logits = iteration % INFLIGHT, "logits" in self.waits_for[iteration]
            row, rows = (slot * ROWS, len(self.expected[iteration])) if logits else (-1, 0)
            self.loops[stage].run(iteration, slot, self.outputs[iteration], row, rows)
        if stage == 0 and rows:
            self.products.append(iteration)

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
        first, last = self.launched
        found = {}
        if first < iterations and self.resolved(first - INFLIGHT):
            if first == len(self.outputs):
                self.outputs.append(self.schedule(first))
            # Else the sender waits for a buffer, in the thread that is all stages'.
            if sum(map(pieces, self.outputs[last : first + 1])) <= self.depth:
                found["launch 0"] = lambda: self.launch(0)
        if last < first:
            found["launch 1"] = lambda: self.launch(1)
        for name, actor in self.actors.items():
            if name == "head 0" and actor.idle:
                # Else it waits for the rows with the turn that is the last stage's.
                if self.products and self.products[0] < last:
                    found[name] = lambda of=actor: (self.products.popleft(), of.let())
            elif not actor.idle or not actor.items.empty():
                found[name] = actor.let
        return found

    def run(self, iterations):
        """Returns what went wrong; nothing: the schedule went well."""
        for place, loop in enumerate(self.loops[-len(self.committed) :]):
            real = loop._logits._writer._ring

            def count(header, place=place, publish=real.publish):
                publish(header)
                self.committed[place] += 1

            self.monkeypatch.setattr(real, "publish", count)
        # The first frame brings the link's memory, by a thread of the link.
        if self.shared:
            self.open_head()
        self.outputs.append(self.schedule(0))
        self.launch(0)
        self.launch(1)
        self.sends_at_once(self.loops[0]._sender)
        self.machine.waits.clear()
        self.machine.calm = False
        drawn, burst, who = 0, 0, (*_WHO, "head 0") if self.shared else _WHO
        while not self.wrong and not all(map(self.resolved, range(iterations))):
            choices = self.choices(iterations)
            if not choices:
                self.wrong.append("nobody can go on")
                break
            if not burst:  # one goes on for a while, so that others are late
                favourite, burst = self.choose.choice(who), self.choose.randint(1, 8)
            burst -= 1
            name = favourite if favourite in choices else self.choose.choice(list(choices))
            choices[name]()
            while drawn < min(self.committed):
                self.draw()
                drawn += 1
        machine = self.machine
        self.wrong += [f"on the device: {error!r}" for error in machine.errors]
        self.wrong += [f"a thread waited for {what}" for what in machine.waits]
        self.wrong += [f"{name} used a stage's own stream" for name in machine.strangers]
        self.wrong += [f"{name} made a context on another GPU" for name in machine.foreign]
        return self.wrong

    def sends_at_once(self, sender):
        """What ``sender`` sends leaves at once, and not by a thread that runs as it likes."""
        sender.wait_sent()

        def transmit(job):
            sender._transmit(job)
            sender._completed += 1

        end = sender._jobs.put
        sender._jobs = SimpleNamespace(put=lambda job: end(None) if job is None else transmit(job))

    def open_head(self):
        """As the first frame of the link does, which brings its memory."""
        [sender], receiver = self.loops[1]._shared._senders, self.loops[0]._shared._receiver
        with self.on(1):
            sender.send(0, 1, {KEY: torch.zeros(1, HIDDEN, device="cuda:1")})
        with self.on(0):
            receiver.take(0, 1)
            receiver.release(0)
        self.sends_at_once(sender)
        sender._last_iteration = -1

    def close(self):
        self.machine.calm = True
        for actor in self.actors.values():
            actor.end()
        for stage, loop in enumerate(self.loops):
            with self.on(stage):
                loop.close()
        self.reader.close()
        self.channel.close()
