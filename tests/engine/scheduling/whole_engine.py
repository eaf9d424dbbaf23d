"""An engine in one process and one thread, from the scheduler to the workers' inputs, for state machines.

vLLM's scheduler with SiPipe's, the table of iterations, the dispatcher, the tracker of requests and
a stage's preparation, in front of vLLM's own second runner, run as they are, with all their
assertions. The model does not: its KV cache holds tokens. Each token that is drawn is a function of
all tokens before it, as the stage reads them back from the cache by the block tables that were
prepared. So a token that is lost, comes twice or reaches another request shows in all that follow, as
does a block that two requests write.
"""

import random
import threading
import zlib
from collections import defaultdict
from types import SimpleNamespace
from unittest.mock import Mock, patch

import numpy as np
from tests.engine.scheduling.test_scheduler import BLOCK, Engine
from tests.worker.vllm_preparation import PreparingRunner
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT
from vllm.v1.request import Request, RequestStatus

from sipipe.engine.iteration.balance import Balancer
from sipipe.engine.iteration.dispatch import Dispatcher
from sipipe.engine.iteration.head_drafts import HeadDrafts
from sipipe.engine.iteration.iterations import Iterations
from sipipe.engine.iteration.observed_scheduler import observed
from sipipe.engine.iteration.requests import RequestTracker
from sipipe.engine.iteration.resolve import build_output
from sipipe.messages.drafts import LEFT_OUT, URGENT, Drafted, decode_request
from sipipe.messages.header import Kind
from sipipe.messages.step import Sampled, int32_bytes, int32_view
from sipipe.worker.device import HostDevice
from sipipe.worker.hooks.preparation import SiPipePrepares
from sipipe.worker.inputs.model_input import ModelInput

LENGTH = 64
"""``max_model_len``; the preparing runner's block tables are as wide."""
SEATS = 5
"""``max_num_seqs``, and rows of the workers."""
LOGITS = 64
"""Rows of BIC-L, of all iterations in flight."""


def next_token(tokens) -> int:
    """The token that the model draws behind ``tokens``; of few, so that texts repeat."""
    return zlib.crc32(np.asarray(tokens, np.int32).tobytes()) % 7


def continued(tokens, count: int) -> list[int]:
    """What the model draws behind ``tokens``."""
    drawn: list[int] = []
    for _ in range(count):
        drawn.append(next_token([*tokens, *drawn]))
    return drawn


def until(tokens: list[int], stops: list[int]) -> list[int]:
    """``tokens`` up to the first of ``stops``, with it."""
    ends = [place + 1 for place, token in enumerate(tokens) if token in stops]
    return tokens[: ends[0]] if ends else tokens


class FollowedIterations(Iterations):
    """The table of iterations, and the one that has begun last in :attr:`begun`."""

    begun = None

    def begin(self, *arguments, **options):
        iteration = super().begin(*arguments, **options)
        self.begun = iteration or self.begun
        return iteration


class Stage:
    """A stage and its sampler. ``drafts``: how many a request gets proposed at most. ``groups``: those of
    the KV cache, of which the first one's tokens are looked at."""

    def __init__(self, blocks: int, turns: int, drafts: int, groups: int = 1) -> None:
        self.runner = PreparingRunner(block_sizes=(BLOCK,) * groups, requests=SEATS)
        self.side = SiPipePrepares(
            lambda _: None, self.runner, HostDevice(), slots=turns, sets=2, logits=LOGITS
        )
        self.cache = np.full(blocks * BLOCK, -1, np.int64)
        self.kept: dict[int, dict[str, tuple[np.ndarray, list[int]]]] = {}
        """By iteration and request: places of its text in the cache, and the text with its next token."""
        self._drafts = drafts
        self._random = random.Random(drafts)

    def run(self, iteration) -> Sampled:
        """One iteration: its tokens into the cache, and what is drawn of its rows."""
        inputs = ModelInput(
            iteration=iteration.number,
            slot=iteration.slot,
            buffer_set=iteration.number % 2,
            output=iteration.output,
        )
        self.side.prepare(inputs)
        self.side.begin(inputs)
        prepared = self.runner.step(iteration.output)
        batch, _, _, (table, *_), (slots, *_) = prepared
        tokens = inputs.num_tokens
        self.cache[slots[:tokens].numpy()] = batch.input_ids[:tokens].numpy()
        names = np.repeat(np.arange(inputs.num_reqs), np.diff(batch.query_start_loc_np))
        rows, drawn, drafts, ended = [], [], [], set()
        kept = self.kept[iteration.number] = {}
        assert len(inputs.logits_rows) == len(iteration.work.sampled)
        for row, place in enumerate(inputs.logits_rows):
            token = int(batch.logits_indices[place])
            name = names[token]
            assert inputs.req_ids[name] == iteration.work.sampled[row]
            if name in ended:  # behind a draft that was not drawn
                continue
            before = np.arange(int(batch.positions[token]) + 1)
            where = table[name].numpy()[before // BLOCK] * BLOCK + before % BLOCK
            text = self.cache[where]
            rows.append(row)
            drawn.append(next_token(text))
            kept[iteration.work.sampled[row]] = where, [*text.tolist(), drawn[-1]]
            following = iteration.work.sampled[row + 1 : row + 2]
            last = following != [inputs.req_ids[name]]
            if not last and drawn[-1] != int(batch.input_ids[token + 1]):
                ended.add(name)
            if last and self._drafts:
                drafts.append((row, int32_bytes(self._proposed([*text, drawn[-1]]))))
        return Sampled(
            iteration=iteration.number,
            rows=int32_bytes(rows),
            tokens=int32_bytes(drawn),
            drafts=drafts,
        )

    def _proposed(self, text) -> list[int]:
        """Drafts behind ``text``, some of them wrong."""
        right = continued(text, self._random.randint(0, self._drafts))
        if right and self._random.random() < 0.4:
            right[self._random.randrange(len(right))] += 1
        return right


class Head:
    """A draft head on the last stage, which answers each request for drafts at once; its KV cache is the
    stage's.

    Args:
        stage: what has run the iterations; it proposes nothing itself.
        tracker: says whose blocks are still there.
    """

    def __init__(self, stage: Stage, tracker: RequestTracker) -> None:
        self.drafts = HeadDrafts(tracker, lambda message: self._sent.append(message))
        self._sent: list[bytes] = []
        self.planned = False
        """True while an iteration is planned that has not begun."""
        self._stage = stage
        self._random = random.Random(1)

    def ask(self, iteration, output) -> None:
        """Ask for drafts behind the tokens of ``output``, and bring them."""
        drawn = zip(output.req_ids, output.sampled_token_ids, strict=True)
        self.drafts.ask(iteration, drawn)
        while self._sent:
            self.drafts.came(self._proposed(self._sent.pop()))

    def _proposed(self, message: bytes) -> Drafted:
        assert not self.planned, "blocks that it gives away may be others' by now"
        request = decode_request(message.removeprefix(URGENT))
        drafts: list[int] = []
        for name, drawn in zip(
            self._stage.kept[request.iteration], int32_view(request.drawn), strict=True
        ):
            right = [0] * request.steps
            if drawn != LEFT_OUT:
                where, text = self._stage.kept[request.iteration][name]
                assert self._stage.cache[where].tolist() == text[:-1], f"{name}: not its blocks"
                right = continued(text, request.steps)
                if self._random.random() < 0.4:
                    right[self._random.randrange(len(right))] += 1
            drafts += right
        return Drafted(iteration=request.iteration, steps=request.steps, drafts=int32_bytes(drafts))


class WholeEngine(Engine):
    """vLLM's batch queue around all of it. ``answers``: the ends of turns, by id; ``errors``: why. With
    ``head`` the ``drafts`` are those of a head, and no sampler proposes any."""

    def __init__(
        self,
        cls,
        config,
        *,
        blocks: int,
        drafts: int = 0,
        windows: bool = False,
        head: bool = False,
    ) -> None:
        self.turns = config.max_concurrent_batches
        telemetry = Mock()
        telemetry.measured_times.return_value = None
        self.iterations = FollowedIterations(self.turns, LOGITS)
        self.tracker = RequestTracker(engine_seed=0, balancer=Balancer(1, vocab_size=1000))
        self._stage = Stage(blocks, self.turns, 0 if head else drafts, groups=1 + windows)
        self._head = Head(self._stage, self.tracker) if head else None
        head_drafts = self._head.drafts if self._head else None
        self._drawn: dict[int, Sampled] = {}
        bus = SimpleNamespace(order=threading.Lock(), publish=self._publish)
        self._dispatcher = Dispatcher(
            bus=bus,
            iterations=self.iterations,
            tracker=self.tracker,
            gather=Mock(),
            telemetry=telemetry,
            empty=False,
            head_drafts=head_drafts,
        )
        scheduler = observed(
            cls,
            self.iterations,
            telemetry,
            self.tracker,
            rows=LOGITS if drafts else 0,
            head_drafts=head_drafts,
        )
        with patch.object(type(config), "use_v2_model_runner", True):
            super().__init__(scheduler, config, blocks=blocks, windows=windows)
        self.blocks = blocks
        self.scheduler.max_model_len = LENGTH
        self.scheduler.max_num_running_reqs = self.scheduler.max_num_active_reqs = SEATS
        self.answers: defaultdict[str, list[FinishReason]] = defaultdict(list)
        self.errors: dict[str, str] = {}
        self.told: defaultdict[int, list[str]] = defaultdict(list)
        """Requests whose ends each client was told."""

    def turn(
        self, id: str, prompt: int, output: int, *, last: bool = False, grammar: str = "", **options
    ) -> list[int]:
        """Give the next turn of a session, or its end; returns the prompt."""
        self.tokens.setdefault(id, [])
        tokens = [random.Random(f"{id} {prompt} {place}").randrange(9) for place in range(prompt)]
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        if grammar:
            params.structured_outputs = StructuredOutputsParams(regex=grammar)
        params.prompt_logprobs = options.pop("prompt_logprobs", None)
        params.stop_token_ids = options.pop("stops", [])
        self.scheduler.add_request(
            Request(
                request_id=id,
                prompt_token_ids=tokens,
                sampling_params=params,
                pooling_params=None,
                block_hasher=self.hasher,
                resumable=not last,
                **options,
            )
        )
        return list(tokens)

    def add_again(self, id: str, client: int) -> None:
        """Another request with an id that is in use."""
        self.scheduler.add_request(
            Request(
                request_id=id,
                client_index=client,
                prompt_token_ids=[1, 2, 3],
                sampling_params=SamplingParams(max_tokens=3),
                pooling_params=None,
                block_hasher=self.hasher,
            )
        )

    def abort(self, ids) -> None:
        self.scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED)

    def free_blocks(self) -> int:
        """Blocks that nobody holds, of ``blocks - 1``: one is the null block."""
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def _scheduled(self, output) -> None:
        self._dispatcher.publish(output)

    def _publish(self, kind, number, *_, **__) -> None:
        """BIC-I: workers and samplers run each iteration when they have it."""
        if self._head:
            self._head.planned = kind is Kind.PLAN
        if kind is Kind.SCHEDULE:
            assert self.iterations.begun.number == number
            self._drawn[number] = self._stage.run(self.iterations.begun)

    def _complete(self, batch) -> None:
        if not batch.num_scheduled_tokens:
            result = EMPTY_MODEL_RUNNER_OUTPUT
        else:
            iteration = self.iterations.oldest()
            assert iteration is not None
            assert iteration.output is batch, "iterations end in their order"
            drawn = self._drawn.pop(iteration.number)
            self.iterations.deliver(iteration.number, tokens=[drawn])
            result = build_output(iteration)
            drawn = zip(result.req_ids, result.sampled_token_ids, strict=True)
            fillers = [(name, [0]) for name in iteration.outcome.errors]
            self.tracker.record(iteration.number, [*drawn, *fillers])
            if self._head:
                self._head.ask(iteration, result)
            self.iterations.leave(iteration)
            self._dispatcher.publish_due()
        outputs = self.scheduler.update_from_output(batch, result)
        for client, told in outputs.items():
            for output in told.outputs:
                self.tokens[output.request_id].extend(output.new_token_ids)
                if output.finish_reason is not None:
                    self.answers[output.request_id].append(output.finish_reason)
                    self.told[client].append(output.request_id)
                if output.finish_reason == FinishReason.ERROR:
                    self.errors[output.request_id] = output.stop_reason
