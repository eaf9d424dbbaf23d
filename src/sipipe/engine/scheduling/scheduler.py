"""vLLM's scheduler with stable, even microbatches, which :mod:`.policy` decides.

vLLM fills each batch with every request that is not in flight, so under pipeline parallelism the
microbatches are whatever the first steps happened to catch: 62 and 2 sequences, for good.
:class:`PipelineScheduler` inherits everything and decides only what may enter *this* microbatch,
through things that vLLM's ``schedule`` already looks at:

- ``Request.next_decode_eligible_step``: a running request with a slot is told to wait for a step
  that never comes, but at its slot's visit. It stays in ``running``, in its place, so that
  preemption, priorities, request limits and statistics see exactly what they see without us.
- ``max_num_scheduled_tokens``, lowered for the call to decode tokens plus the prefill allowance.
- ``_reserve_prefill_lookahead`` and ``_mamba_block_aligned_split``, which clip prefill chunks, clip
  them to that too: a long prompt ahead in ``running`` takes no tokens of the decodes behind it.

Rejected: taking hidden requests out of ``running`` for the call. A request that is out cannot be
preempted, and putting the survivors back has to guess where the parent's appends and preemptions
belong. Also rejected: sorting ``running`` by slot; its order is the preemption order.

It relies on ``EngineCore`` calling ``schedule`` once per entry of its batch queue, first in,
first out, of length ``max_concurrent_batches``: the batch of call i - m has then been processed
before call i. Should that fail, requests in flight are still skipped by vLLM's own check, and
only the evenness suffers. Runs in the EngineCore process, on its main thread only.

:class:`AsyncPipelineScheduler` is one call ahead of that: the queue is one longer, and call i is made
while the batch of call i - m may be out. vLLM's :class:`AsyncScheduler` counts the token that is still to
come. Nobody waits for this scheduler then, but for the tokens alone
(:meth:`sipipe.engine.iteration.iterations.Iterations.begin`). A slot can wait for its drafts all the same:
the call is then made for no tokens, after which EngineCore takes the oldest batch in, and the slot has the
next call.
"""

import itertools
import sys
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from vllm import envs
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from sipipe.engine.scheduling.blocks import answer_shortly
from sipipe.engine.scheduling.kept_prices import make_controller
from sipipe.engine.scheduling.policy import Plan, Sequence, SlotPolicy
from sipipe.engine.scheduling.prefill import Allowance
from sipipe.engine.scheduling.times import Load
from sipipe.engine.setup.derived import settings_of

NEVER = sys.maxsize
"""A step that does not come: a request that is eligible from it on waits for its slot's visit."""


class Out(NamedTuple):
    """A batch with tokens whose result has not been taken in."""

    slot: int
    verifies: bool
    """True if it has drafts: how many are right is not known before its result."""


class PipelineScheduler(Scheduler):
    """Drop-in for ``--scheduler-cls``.

    The number of slots m is ``VllmConfig.max_concurrent_batches``, as for EngineCore's batch
    queue, less what is scheduled ``ahead``. With m of 1 it behaves exactly as vLLM's. Tunables come from
    ``additional_config["sipipe"]["microbatches"]`` (:class:`sipipe.config.MicrobatchSettings`).
    """

    max_num_scheduled_tokens: int  # these are vLLM's, which no type checker sees
    max_num_active_reqs: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        answer_shortly(self.kv_cache_manager)
        config = settings_of(self.vllm_config)
        self.ahead: int = getattr(self.vllm_config, "ahead", 0)
        """Microbatches that are scheduled before there is room for them in the pipeline."""
        self.controller = make_controller(
            self.vllm_config, slots=self.vllm_config.max_concurrent_batches - self.ahead
        )
        """Measured times of microbatches, and the number of slots to open by them."""
        self._policy = SlotPolicy(
            slots=self.controller.slots,
            max_tokens=self.max_num_scheduled_tokens,
            controller=self.controller,
            settings=config.microbatches,
            align=self.cache_config.block_size,
            # A chunk that ends inside a Mamba block is cut to nothing.
            least=self.cache_config.block_size if self.need_mamba_block_aligned_split else 1,
        )
        # Where a prompt, or a multi-modal item in it, must be computed whole, prefill is held back
        # by whole chunks as vLLM cuts them: an allowance below the item would never admit it.
        self._cuts_chunks = self.scheduler_config.enable_chunked_prefill and not (
            self.is_encoder_decoder or self.scheduler_config.disable_chunked_mm_input
        )
        self._allowance: Allowance | None = None
        """Allowance of the schedule() call in progress; None outside."""
        self._prompts: list[Request] = []
        """Running requests that computed their prompts at the last visit."""
        self._prompts_wait = False
        """True if prompt tokens were pending at the last visit, of these or of waiting requests."""
        self._adapter_last_step: dict[int, int] = {}
        """Step in which each LoRA adapter of running requests was let in last."""
        self._empty = False
        """True if the last visit was empty, and no result has come since."""
        self._hurries = False
        """True if a batch came back right after an empty visit, or is still out: the engine's loop must
        not pause (:meth:`has_requests`)."""
        self._out: deque[Out] = deque()
        """Batches with tokens that are out, in order."""
        self.slot = 0
        """Slot of the microbatch scheduled last."""
        self.turn = 0
        """Microbatches scheduled so far, with empty ones."""
        self.waits_for_drafts = False
        """True if a slot's turn waits for the tokens of its last one, and the drafts behind them: always
        where nothing is scheduled ahead."""
        self.load = Load()
        """Load of the microbatch scheduled last, where there are slots."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """One microbatch: the members of the slot whose turn it is, and a share of the prefill."""
        if self._policy.slots == 1:
            return super().schedule(throttle_prefills)
        if self._turn_waits():
            return self._schedule_nothing(throttle_prefills)
        plan = self._visit()
        decode_tokens = self._let_in(plan)
        # vLLM's own limits, lowered for this call alone.
        most_tokens = self.max_num_scheduled_tokens
        most_requests = self.max_num_active_reqs
        if self._cuts_chunks:
            self.max_num_scheduled_tokens = min(most_tokens, decode_tokens + plan.prefill.tokens)
        self._allowance = plan.prefill if self._prompts_wait else None
        try:
            output = super().schedule(throttle_prefills)
        finally:
            self.max_num_scheduled_tokens = most_tokens
            self.max_num_active_reqs = most_requests
            self._allowance = None
            for sequence in plan.decode:
                sequence.id.next_decode_eligible_step = NEVER
        total = output.total_num_scheduled_tokens
        self.load = plan.prefill.formed(output.num_scheduled_tokens, total)
        self.slot = plan.slot
        self.turn += 1
        self._empty = total == 0
        self._hurries = False
        if total:
            self._out.append(Out(plan.slot, bool(output.scheduled_spec_decode_tokens)))
        return output

    def _turn_waits(self) -> bool:
        """Say if the slot's turn is put off by a call: never, its last batch has been taken in."""
        return False

    def _schedule_nothing(self, throttle_prefills: bool) -> SchedulerOutput:
        """Make a batch without tokens, which is no visit of a slot. EngineCore waits for the oldest
        batch after it, and calls again."""
        most_tokens = self.max_num_scheduled_tokens
        self.max_num_scheduled_tokens = 0
        try:
            output = super().schedule(throttle_prefills)
        finally:
            self.max_num_scheduled_tokens = most_tokens
        self._empty = True
        self._hurries = False
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take a result in, as vLLM's, and notice a batch that is out, or comes back, in the step of an
        empty visit."""
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(
            scheduler_output, model_runner_output
        )
        ran = scheduler_output.total_num_scheduled_tokens > 0
        if ran and self._out:  # of one slot, none is counted
            self._out.popleft()
        self._hurries = self._empty and (ran or bool(self._out))
        self._empty = False  # later results belong to other steps
        return outputs

    def has_requests(self) -> bool:
        """Answer as vLLM's, but False once after the step of an empty visit, where a batch is out or
        has come back.

        A closed slot's visit is empty, and its step ends with the oldest batch's result. EngineCore's
        loop asks this next, and pauses for a millisecond after an empty visit if there are requests:
        just when those of that batch could run again, or others be scheduled ahead. If somebody else
        asks first, nothing is lost: the loop has the empty batch in its queue.
        """
        if self._hurries and envs.VLLM_ENABLE_V1_MULTIPROCESSING:  # else there is no loop
            self._hurries = False
            return False
        unfinished: bool = super().has_requests()
        return unfinished

    def _visit(self) -> Plan:
        """Tell the policy what runs and what is pending; returns its plan."""
        joining, self._prompts = self._without_slot()
        started = self._started_prefill()
        waiting, admissible = self._waiting_prefill()
        pending = started + waiting
        self._prompts_wait = pending > 0
        return self._policy.visit(
            joining,
            _decoding,
            pending_prefill=pending,
            started_prefill=started,
            arriving=len(self._prompts) + admissible,
            kv_free=self.kv_free(),
        )

    def kv_free(self) -> float:
        """Share of the KV cache that a request can have, 0 to 1."""
        free: float = 1.0 - self.kv_cache_manager.usage
        return free

    def _without_slot(self) -> tuple[list[Sequence], list[Request]]:
        """Running requests without a slot: those that decode from now on, and those that compute
        their prompts."""
        joining: list[Sequence] = []
        prompts: list[Request] = []
        for request in self._policy.follow(self.running):
            sequence = _decoding(request)
            if sequence is None:
                prompts.append(request)
            else:
                joining.append(sequence)
                request.next_decode_eligible_step = NEVER
        return joining, prompts

    def _started_prefill(self) -> float:
        """Time, at the policy's prices, of the pending prompt tokens of requests with KV cache."""
        prices = self._policy.prices
        seconds = 0.0
        for request in self._prompts:
            seconds += prices.chunk(request.num_computed_tokens, _pending_tokens(request))
        for request in self.kv_holding_waiting:
            if request.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
                continue  # a session without a turn has nothing to compute
            tokens = max(1, request.num_tokens - request.num_computed_tokens)
            seconds += prices.chunk(request.num_computed_tokens, tokens)
        return seconds

    def _waiting_prefill(self) -> tuple[float, int]:
        """Time, at the policy's prices, of prompts that wait and can be admitted, and their number.
        What cannot be admitted yet is no reason to hurry."""
        prices = self._policy.prices
        seconds = 0.0
        admissible = 0
        room = max(0, self.max_num_active_reqs - len(self.running))
        for request in itertools.islice(self.waiting, room):
            if self._is_blocked_waiting_status(request.status):
                # One token keeps vLLM's scan of the queue going, which is what unblocks it.
                seconds += prices.token
                continue
            seconds += prices.chunk(0, request.num_tokens)
            admissible += 1
        return seconds, admissible

    def _let_in(self, plan: Plan) -> int:
        """Let the plan's sequences enter, and prompts; returns the tokens of those that decode."""
        adapters = self._allowed_adapters(plan)
        for request in self._prompts:
            enters = adapters is None or _adapter(request) in adapters
            request.next_decode_eligible_step = 0 if enters else NEVER
        tokens = 0
        for sequence in plan.decode:
            if adapters is None or _adapter(sequence.id) in adapters:
                sequence.id.next_decode_eligible_step = 0
                tokens += sequence.rows
        return tokens

    def _allowed_adapters(self, plan: Plan) -> set[int] | None:
        """LoRA adapters that may enter; None where all that want to enter fit.

        vLLM asserts that running requests of a batch need at most ``max_loras``, but only checks it as
        it admits. Slots and prefill chunks can bring more together: then those that have waited
        longest go first.
        """
        if self.lora_config is None:
            return None
        entering: Iterable[Request] = [*(sequence.id for sequence in plan.decode), *self._prompts]
        wanted = {_adapter(request) for request in entering} - {0}
        oldest = sorted(wanted, key=lambda adapter: self._adapter_last_step.get(adapter, 0))
        allowed = oldest[: self.lora_config.max_loras]
        present = {_adapter(request) for request in self.running}
        last = self._adapter_last_step.items()
        self._adapter_last_step = {adapter: at for adapter, at in last if adapter in present}
        for adapter in allowed:
            self._adapter_last_step[adapter] = self.current_step
        return None if len(allowed) == len(oldest) else {0, *allowed}

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        # schedule() asks this of every chunk, after all other caps and right before allocating.
        allowance = self._allowance
        if allowance is None or request in self._policy.slot_of:
            decoding: int = super()._reserve_prefill_lookahead(
                request, num_computed_tokens, num_new_tokens
            )
            return decoding
        num_new_tokens = self._clip(allowance, request, num_computed_tokens, num_new_tokens)
        tokens: int = super()._reserve_prefill_lookahead(
            request, num_computed_tokens, num_new_tokens
        )
        ends = num_computed_tokens + tokens >= request.num_tokens
        allowance.take(request.request_id, num_computed_tokens, tokens, ends)
        return tokens

    def _mamba_block_aligned_split(
        self, request: Request, num_new_tokens: int, *args: Any, **kwargs: Any
    ) -> int:
        # Clip before the alignment: a clip after it would end chunks inside a block. vLLM hands on the
        # tokens that a cache brings in ``args``, beside those that are computed.
        if self._allowance is not None and request not in self._policy.slot_of:
            start = request.num_computed_tokens + sum(args)
            num_new_tokens = self._clip(self._allowance, request, start, num_new_tokens)
        tokens: int = super()._mamba_block_aligned_split(request, num_new_tokens, *args, **kwargs)
        return tokens

    def _clip(self, allowance: Allowance, request: Request, start: int, num_new_tokens: int) -> int:
        """Tokens, of a prefill chunk of ``num_new_tokens`` behind ``start``, that the allowance still
        has room for."""
        if not allowance.starts and not request.num_computed_tokens:
            tokens = 0
        elif not self._cuts_chunks:
            tokens = num_new_tokens if allowance.tokens else 0
        else:
            tokens = allowance.chunk(start, num_new_tokens)
        if num_new_tokens and not tokens and request.status != RequestStatus.RUNNING:
            # Nor may those behind it: vLLM 0.33 would look at all that wait, 0.32 stops by itself.
            self.max_num_active_reqs = 0
            if request.has_encoder_inputs:
                # vLLM has looked for its images, and keeps those that are cached for it: there may be
                # no room for those of a request that comes before it in the queue meanwhile.
                self.encoder_cache_manager.free(request)
        return tokens


class AsyncPipelineScheduler(PipelineScheduler, AsyncScheduler):
    """Schedules a slot's next microbatch while its last may be out (see the module's text). Only
    SiPipe's engine sets it, where it is ahead: the user has no reason to name it."""

    def _turn_waits(self) -> bool:
        # A batch that verifies is waited for in any case. Where its sequences go on is known when it is
        # in: scheduled before, they would have positions behind drafts that may have been wrong.
        slot = self._policy.next_slot
        return any(
            batch.slot == slot and (self.waits_for_drafts or batch.verifies) for batch in self._out
        )


def _pending_tokens(request: Request) -> int:
    """Tokens known or counted, and not scheduled; 0 while the last one is in flight uncounted."""
    known: int = request.num_tokens_with_spec + request.num_output_placeholders
    pending: int = known - request.num_computed_tokens
    return pending


def _decoding(request: Request) -> Sequence | None:
    """The policy's view of a request that decodes; None: it computes its prompt, or does so again
    after its KV cache was lost."""
    pending = _pending_tokens(request)
    if request.is_prefill_chunk or pending > 1 + len(request.spec_token_ids):
        return None
    return Sequence(
        id=request,
        context=request.num_computed_tokens,
        ready=pending > 0,
        rows=pending or 1,
    )


def _adapter(request: Request) -> int:
    """The number of a request's LoRA adapter; 0: it has none."""
    adapter: int = request.lora_request.lora_int_id if request.lora_request else 0
    return adapter
