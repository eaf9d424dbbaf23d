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
(:meth:`sipipe.engine.iteration.iterations.Iterations.begin`).
"""

import itertools
import sys
from collections.abc import Iterable
from typing import Any

from vllm import envs
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from sipipe.engine.layers.decoder import decoder_of
from sipipe.engine.scheduling.blocks import answer_shortly
from sipipe.engine.scheduling.concurrency import ConcurrencyController
from sipipe.engine.scheduling.policy import Plan, Sequence, SlotPolicy
from sipipe.engine.scheduling.prefill import Allowance
from sipipe.engine.scheduling.times import Load, usual
from sipipe.engine.setup.derived import settings_of

NEVER = sys.maxsize
"""As a step."""


class PipelineScheduler(Scheduler):
    """Drop-in for ``--scheduler-cls``; ``slot`` is that of the microbatch scheduled last.

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
        self.controller = ConcurrencyController(
            stages=self.vllm_config.parallel_config.pipeline_parallel_size,
            slots=self.vllm_config.max_concurrent_batches - self.ahead,
            first=usual(decoder_of(self.vllm_config).facts),
        )
        """Knows how long microbatches take, and says how many slots to open."""
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
        # Of the schedule() call in progress; None outside.
        self._allowance: Allowance | None = None
        self._prompts: list[Request] = []
        """Running requests that compute their prompts, at the last visit ..."""
        self._prompts_wait = False
        """... and whether there were such tokens, of these or of waiting requests."""
        self._adapter_last_step: dict[int, int] = {}
        # The last visit was empty; a batch has come back right after, or is to; how many are out.
        self._empty = self._hurries = False
        self._out = 0
        self.slot = self.turn = 0
        """Of the microbatch scheduled last; turns are counted from 0, with empty ones."""
        self.load = Load()
        """What is in the microbatch scheduled last, where there are slots."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """One microbatch: the members of the slot whose turn it is, and a share of the prefill."""
        if self._policy.slots == 1:
            return super().schedule(throttle_prefills)
        plan = self._visit()
        decode_tokens = self._let_in(plan)
        limit = self.max_num_scheduled_tokens
        if self._cuts_chunks:
            self.max_num_scheduled_tokens = min(limit, decode_tokens + plan.prefill.tokens)
        self._allowance = plan.prefill if self._prompts_wait else None
        active = self.max_num_active_reqs
        try:
            output = super().schedule(throttle_prefills)
        finally:
            self.max_num_scheduled_tokens, self.max_num_active_reqs = limit, active
            self._allowance = None
            for sequence in plan.decode:
                sequence.id.next_decode_eligible_step = NEVER
        total = output.total_num_scheduled_tokens
        self.load = plan.prefill.formed(output.num_scheduled_tokens, total)
        self.slot, self.turn = plan.slot, self.turn + 1
        self._empty, self._hurries = not total, False
        self._out += not self._empty
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """vLLM's; notices a batch that is out, or comes back, in the step of an empty visit."""
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(
            scheduler_output, model_runner_output
        )
        ran = bool(scheduler_output.total_num_scheduled_tokens)
        self._out -= ran
        self._hurries = self._empty and (ran or self._out > 0)
        self._empty = False  # later results belong to other steps
        return outputs

    def has_requests(self) -> bool:
        """vLLM's, but False once after the step of an empty visit, where a batch is out or has come
        back. A closed slot's visit is empty, and its step ends with the oldest batch's result.
        EngineCore's loop asks this next, and pauses for a millisecond after an empty visit if there
        are requests: just when those of that batch could run again, or others be scheduled ahead.
        Who else asks first loses nothing: the loop has the empty batch in its queue."""
        if self._hurries and envs.VLLM_ENABLE_V1_MULTIPROCESSING:  # else there is no loop
            self._hurries = False
            return False
        unfinished: bool = super().has_requests()
        return unfinished

    def _visit(self) -> Plan:
        """Tell the policy what runs and what is pending."""
        joining: list[Sequence] = []
        self._prompts = prompts = list[Request]()
        prices = self._policy.prices
        started = 0.0
        for request in self._policy.follow(self.running):
            if (sequence := _decoding(request)) is not None:
                joining.append(sequence)
                request.next_decode_eligible_step = NEVER
                continue
            prompts.append(request)
            started += prices.chunk(request.num_computed_tokens, _pending_tokens(request))
        arriving = len(prompts)
        for request in self.kv_holding_waiting:
            if request.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
                continue  # a session without a turn has nothing to compute
            left = max(1, request.num_tokens - request.num_computed_tokens)
            started += prices.chunk(request.num_computed_tokens, left)
        waits = started
        # What cannot be admitted yet is no reason to hurry.
        admissible = max(0, self.max_num_active_reqs - len(self.running))
        for request in itertools.islice(self.waiting, admissible):
            if self._is_blocked_waiting_status(request.status):
                # One token keeps vLLM's scan of the queue going, which is what unblocks it.
                waits += prices.token
                continue
            waits += prices.chunk(0, request.num_tokens)
            arriving += 1
        self._prompts_wait = waits > 0
        return self._policy.visit(
            joining,
            _decoding,
            pending_prefill=waits,
            started_prefill=started,
            arriving=arriving,
            kv_free=1.0 - self.kv_cache_manager.usage,
        )

    def _let_in(self, plan: Plan) -> int:
        """Let what the plan has enter, and prompts; returns the tokens of those that decode."""
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
        """LoRA adapters that may enter; None where all that want to enter fit. vLLM asserts that
        running requests of a batch need at most ``max_loras``, but only checks it as it admits. Slots
        and prefill chunks can bring more together: then those that have waited longest go first."""
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
        told = self._allowance
        allowance = None if told is None or request in self._policy.slot_of else told
        if allowance is not None:
            num_new_tokens = self._clip(allowance, request, num_computed_tokens, num_new_tokens)
        tokens: int = super()._reserve_prefill_lookahead(
            request, num_computed_tokens, num_new_tokens
        )
        if allowance is not None:
            ends = num_computed_tokens + tokens >= request.num_tokens
            allowance.take(request.request_id, num_computed_tokens, tokens, ends)
        return tokens

    def _mamba_block_aligned_split(
        self, request: Request, num_new_tokens: int, *args: Any, **kwargs: Any
    ) -> int:
        # Clip before the alignment: a clip after it would end chunks inside a block.
        if self._allowance is not None and request not in self._policy.slot_of:
            start = request.num_computed_tokens + sum(args)
            num_new_tokens = self._clip(self._allowance, request, start, num_new_tokens)
        tokens: int = super()._mamba_block_aligned_split(request, num_new_tokens, *args, **kwargs)
        return tokens

    def _clip(self, allowance: Allowance, request: Request, start: int, num_new_tokens: int) -> int:
        """What of a prefill chunk fits into the allowance that is left."""
        if not allowance.starts and not request.num_computed_tokens:
            tokens = 0
        elif not self._cuts_chunks:
            tokens = num_new_tokens if allowance.tokens else 0
        else:
            tokens = allowance.chunk(start, num_new_tokens)
        if num_new_tokens and not tokens and request.status != RequestStatus.RUNNING:
            # Nor may those behind it: vLLM 0.33 would look at all that wait, 0.32 stops by itself.
            self.max_num_active_reqs = 0
        return tokens


class AsyncPipelineScheduler(PipelineScheduler, AsyncScheduler):
    """Can schedule a slot's next microbatch while its last is out (see the module's text); SiPipe's
    engine sets it where it is ahead, and it alone."""


def _pending_tokens(request: Request) -> int:
    """Tokens known or counted, and not scheduled; 0 while the last one is in flight uncounted."""
    known: int = request.num_tokens_with_spec + request.num_output_placeholders
    pending: int = known - request.num_computed_tokens
    return pending


def _decoding(request: Request) -> Sequence | None:
    """What decodes, as the policy sees it; None: it computes its prompt (or, after a KV loss, again)."""
    pending = _pending_tokens(request)
    if request.is_prefill_chunk or pending > 1 + len(request.spec_token_ids):
        return None
    return Sequence(request, request.num_computed_tokens, pending > 0, pending or 1)


def _adapter(request: Request) -> int:
    adapter: int = request.lora_request.lora_int_id if request.lora_request else 0
    return adapter
