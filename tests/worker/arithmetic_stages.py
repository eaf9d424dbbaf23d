"""Stages of :mod:`sipipe.worker` on the stand-in of vLLM's second runner, in threads of this process.

Each stage is a :class:`LoadedStage`, as a worker's process has it, with its device thread; links and
the channel of logits are real. The test follows BIC-I for all of them, and draws.
"""

from __future__ import annotations

import itertools
import pickle
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import torch
from tests.scheduled import new_request
from tests.worker.arithmetic import VOCAB, Runner, Worker
from tests.worker.watched_stage import WatchedStage
from vllm.distributed import parallel_state
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from sipipe.config import SiPipeConfig
from sipipe.engine.iteration.iterations import only_decodes
from sipipe.ipc.link.schema import TOKENS as SIZE
from sipipe.ipc.link.schema import TensorSchema, TensorSpec
from sipipe.ipc.ring.logits import LogitsChannel, LogitsReader
from sipipe.messages.calls import OpenChannels, OpenLinks
from sipipe.messages.header import Header, Kind
from sipipe.messages.link import LinkEndpoint, LinkTrial
from sipipe.messages.logits import LogitsShape
from sipipe.messages.stage_place import StagePlace
from sipipe.messages.start_records import Watched, WorkerBoot
from sipipe.messages.step import int32_bytes
from sipipe.worker import loaded_stage
from sipipe.worker.hooks.world import PipelineStandIn
from sipipe.worker.loaded_stage import LoadedStage
from sipipe.worker.sampled_stage import Surroundings

BLOCK, REQUESTS, TOKENS, INFLIGHT = 4, 16, 64, 3
HAND_OVER = 60  # seconds; a bug in the test itself, not a bound that a test relies on

CONFIG = SimpleNamespace(
    logging_config=None,
    kv_transfer_config=None,
    model_config=SimpleNamespace(
        dtype=torch.float32,
        enable_prompt_embeds=False,
        get_inputs_embeds_size=lambda: 0,
        get_vocab_size=lambda: VOCAB,
        max_model_len=TOKENS,
        multimodal_config=None,
        rswa_window=None,
        uses_mrope=False,
    ),
    scheduler_config=SimpleNamespace(max_num_seqs=REQUESTS, max_num_batched_tokens=TOKENS),
)


class OwnInputs(DefaultModelState):
    """Of a model whose inputs vLLM prepares."""


def place_of(stage, stages):
    return StagePlace(stage=stage, stages=stages, tp_rank=0, tp_size=1)


def try_links(loops):
    """Have all stages open and try the links between them, as the engine does."""
    link = LinkEndpoint(kind="shm", buffer_tokens=TOKENS, stall_timeout=HAND_OVER)
    hidden = TensorSchema((TensorSpec("hidden_states", "float32", (SIZE, 3)),)).encode()
    trials = [
        LinkTrial(pair=(sender, sender + 1), endpoint=link, tensors=hidden, seconds=HAND_OVER)
        for sender in range(len(loops) - 1)
    ]
    with ThreadPoolExecutor(len(loops)) as pool:
        reports = list(pool.map(lambda loop: loop.answer(OpenLinks(trials=trials)), loops))
    assert not any(report.failure for ends in reports for report in ends), reports


def boot_of(place, links=(), **settings):
    """What a worker of SiPipe's path starts from, with these settings."""
    settings = {"stall_timeout": HAND_OVER, "cpu_sampling": "on"} | settings
    return WorkerBoot(
        vllm_config=CONFIG,
        config=SiPipeConfig(**settings),
        place=place,
        path="sipipe",
        local_rank=place.rank,
        distributed_init_method="file:///nowhere",
        watched=Watched(stages=place.stages, inflight=INFLIGHT, model="none", run="test"),
        of_main_thread=False,
        layers=(1,) * place.stages,
        cut_evenly=True,
        rows=REQUESTS,
        links=links,
    )


class Stages:
    """A pipeline; ``state`` makes the runners' model states. ``threads``: the stages' device threads
    run; ``stage``: what stages are; ``opened``: their channels are, else ``opening`` has it done."""

    def __init__(
        self,
        stages,
        *,
        state=DefaultModelState,
        threads=True,
        stage=WatchedStage,
        opened=True,
        **settings,
    ):
        shape = LogitsShape(vocab=VOCAB, bounds=(0, VOCAB))
        self.channel = LogitsChannel(
            "t", shape, rows=REQUESTS * (INFLIGHT + 1), entries=INFLIGHT + 2, readers=["s"]
        )
        self.reader = LogitsReader(self.channel.endpoint, "s")
        pairs = [
            socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(stages - 1)
        ]
        ends = [[] for _ in range(stages)]
        for sender, (ours, theirs) in enumerate(pairs):
            ends[sender].append(((sender, sender + 1), ours))
            ends[sender + 1].append(((sender, sender + 1), theirs))
        self.opening = OpenChannels(logits=self.channel.endpoint)
        self.reported, self.failed, self.loops, self.runners = [], [], [], []
        self.boots, self.groups = [], []
        for index, links in enumerate(ends):
            place = place_of(index, stages)
            group = PipelineStandIn(place)
            boot = boot_of(place, links=tuple(pair for pair, _ in links), **settings)
            with patch.object(parallel_state, "_PP", group):
                runner = Runner(place, CONFIG, BLOCK, state=state)
                around = Surroundings(
                    boot=boot,
                    wrapper=Worker(group, runner),
                    report=self.reported.append,
                    recorder=SimpleNamespace(record=lambda *_, **__: None),
                    fail=self.failed.append,
                )
                loop = LoadedStage(around, [sock for _, sock in links])
            self.runners.append(runner)
            self.loops.append(loop)
            self.boots.append(boot)
            self.groups.append(group)
        try_links(self.loops)
        for loop, group in zip(self.loops, self.groups, strict=True):
            with (
                patch.object(parallel_state, "_PP", group),
                patch.object(loaded_stage, "SampledStage", stage),
            ):
                if opened:
                    loop.open(self.opening)
        self.threads = [
            threading.Thread(target=self._device, args=(loop,), name=f"device {stage}", daemon=True)
            for stage, loop in enumerate(self.loops)
            if threads
        ]
        for thread in self.threads:
            thread.start()

    def _device(self, loop):
        try:
            loop.double_buffer.run()
        except BaseException as error:
            self.failed.append(error)

    def run(self, iteration, output, samples):
        """Hand an iteration with this many rows of logits to all stages."""
        row = iteration % (INFLIGHT + 1) * REQUESTS if samples else -1
        slot, cached = iteration % INFLIGHT, output.scheduled_cached_reqs
        header = Header(Kind.SCHEDULE, slot, iteration, row, samples)
        if not (iteration % 2 and only_decodes(output)):
            for loop in self.loops:
                loop.double_buffer.prepare(header, output)
            return
        tokens = int32_bytes(list(itertools.chain.from_iterable(cached.new_token_ids)))
        planned = replace(output, scheduled_cached_reqs=replace(cached, new_token_ids=[]))
        for loop in self.loops:
            early = pickle.loads(pickle.dumps(planned))
            loop.double_buffer.prepare(Header(Kind.PLAN, slot, iteration), early)
        for loop in self.loops:
            loop.running.tokens(header, tokens)

    def draw(self, iteration):
        """The most likely token of each row of an iteration."""
        with self.reader.receive() as received:
            assert received.iteration == iteration
            return received.array.argmax(-1).tolist()

    def close(self):
        for loop in self.loops:
            loop.close()
        for thread in self.threads:
            thread.join(HAND_OVER)
            assert not thread.is_alive()
        self.reader.close()
        self.channel.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Requests:
    """As much of a scheduler as stages see: what it puts into an iteration is the test's."""

    def __init__(self):
        self.tokens, self._computed, self._blocks = {}, {}, {}
        self._free = itertools.count(1)
        self._gone, self._preempted = set(), set()

    def add(self, req_id, prompt):
        self.tokens[req_id] = [*prompt]

    def finish(self, req_id):
        self._gone.add(req_id)
        del self.tokens[req_id]
        self._computed.pop(req_id, None)

    def preempt(self, req_id):
        self._preempted.add(req_id)
        del self._computed[req_id]

    def schedule(self, amounts):
        """The output of an iteration with so many tokens of each request, and who samples."""
        new, cached, samples = [], CachedRequestData.make_empty(), []
        for req_id, count in amounts.items():
            tokens, known = self.tokens[req_id], req_id in self._computed
            computed = self._computed.get(req_id, 0)
            blocks = self._blocks.setdefault(req_id, []) if known else []
            self._blocks[req_id] = blocks
            more = [next(self._free) for _ in range(-(-(computed + count) // BLOCK) - len(blocks))]
            blocks += more
            if known:
                cached.req_ids.append(req_id)
                cached.new_token_ids.append(tokens[computed : computed + count])
                cached.new_block_ids.append((more,) if more else None)
                cached.num_computed_tokens.append(computed)
                cached.num_output_tokens.append(0)
            else:
                new.append(new_request(req_id, tokens, blocks=(more,), prefill=tokens))
            self._computed[req_id] = computed + count
            if computed + count == len(tokens):
                samples.append(req_id)
        gone, preempted = self._gone, self._preempted
        self._gone, self._preempted = set(), set()
        output = SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=dict(amounts),
            total_num_scheduled_tokens=sum(amounts.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=gone,
            free_encoder_mm_hashes=[],
            preempted_req_ids=preempted,
        )
        return output, samples


def one_by_one(iterations):
    """Outputs of so many iterations of one request that is in its prompt, a token each."""
    requests = Requests()
    requests.add("a", range(3, 40))
    return [requests.schedule({"a": 1})[0] for _ in range(iterations)]
