"""Speculative decoding: whether drafts are verified, and how many, in the next microbatch.

Samplers propose drafts (:mod:`sipipe.sampler.drafts`) with the tokens that they stand behind. They
are in before the request's next turn, because a request is in one iteration at a time, so drafts go
to all stages with the scheduling output, and nothing is corrected afterwards. The samplers draw at
each draft's position what they would have drawn there, and stop at the first that differs.

A draft is worth its row where it is likely enough: the row costs a share of the pass (the stage times
that are measured anyway), a token that comes with it is worth as much as one of the pass's others. So
speculation fades as the batch fills, and where nothing repeats, also what a grammar forces where
drafts were not right often enough; rows of all iterations in flight stay
within BIC-L's, and none are taken while the KV cache runs out.

Drafts of a head on the last stage (:class:`HeadSpeculation`) come a little later than the tokens. The
scheduler waits for them when it makes the slot's next microbatch: clients have the tokens by then. The
head's own passes count as a draft's row does.

All of it only saves time: where a part fails, requests have no drafts this time
(:mod:`sipipe.best_effort`).

Who runs here: the engine's thread.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from dataclasses import fields
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, get_args

from vllm.config import VllmConfig
from vllm.config.speculative import MTPModelTypes
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus

from sipipe.best_effort import BestEffort
from sipipe.engine.scheduling.forced import ForcedTokens
from sipipe.engine.setup.derived import settings_of
from sipipe.engine.setup.draft_head import HEADS, why_no_head
from sipipe.errors import UnsupportedError
from sipipe.messages.start_records import NGramSettings, SuffixSettings
from sipipe.messages.step import int32_view
from sipipe.observe.live import Word

if TYPE_CHECKING:
    from sipipe.engine.iteration.iteration import Iteration
    from sipipe.engine.scheduling.concurrency import ConcurrencyController

MOST = 16
"""Of ``{"method": "ngram"}`` with nothing else: how many are worth it is decided anew each time."""
LENGTHS = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
SETTINGS: dict[str | None, Any] = {"ngram": NGramSettings, "suffix": SuffixSettings}
"""What samplers are told, by the methods that they have."""
UNKNOWN_PRICE = 0.1
"""Of a row, as long as batches of different sizes have not told it."""
LEAST_WORTH, MARGIN = 0.05, 1.25
"""How likely a draft has to be at least, and how much likelier than its price says: prices err."""
_INT32 = 4
LOSS = 0.005
"""Part of its time that an engine may lose by trying drafts again that were not worth it. A try that
fails takes :data:`RATE` of a draft's chance, which is then about its price, and comes back in steps of
``RATE * LOSS``: so tries are ``LOSS / price`` of the microbatches, and each costs the price."""
RATE = 0.05
"""Weight of the last microbatch in how many tokens come of a request in a pass."""
KV_RESERVE = 0.05
"""Share of the KV cache that has to be free: a draft must not cost another request its place."""


def fill_in(args: Any) -> str:
    """Say what vLLM wants to be told in its ``EngineArgs``, and SiPipe decides by itself. Returns the
    model that is to make the drafts, or nothing. Raises UnsupportedError: another method, before vLLM
    looks for its model, or a library is missing."""
    config = {key.replace("-", "_"): it for key, it in (args.speculative_config or {}).items()}
    flags = {"method": args.spec_method, "model": args.spec_model}
    flags["num_speculative_tokens"] = args.spec_tokens
    asked = config | {flag: value for flag, value in flags.items() if value is not None}
    if not asked:
        return ""
    method = str(asked.get("method") or asked.get("model") or "ngram").strip("[]")
    # Of a model without a method vLLM says what it is.
    derived = method not in SETTINGS and asked.get("method") is None
    if derived or method in (*HEADS, *get_args(MTPModelTypes)):
        return str(asked.get("model") or "")
    if method not in SETTINGS:
        raise UnsupportedError(_refused(f'"{method}"'))
    if method == "suffix" and find_spec("arctic_inference") is None:
        raise UnsupportedError(
            '--speculative-config: method "suffix" needs Arctic Inference: '
            "pip install arctic-inference==0.1.1"
        )
    if method == "ngram":
        lengths = {} if asked.keys() & LENGTHS.keys() else LENGTHS  # of one, vLLM makes the other
        filled = {"num_speculative_tokens": MOST, **lengths}
        config |= {name: value for name, value in filled.items() if name not in asked}
    args.speculative_config = config
    return ""


def check_speculation(vllm_config: VllmConfig) -> None:
    """Refuse what the samplers cannot propose or verify (UnsupportedError: the option)."""
    if (speculative := vllm_config.speculative_config) is None:
        return
    model = vllm_config.model_config
    reasons = {
        f'method "{speculative.method}"': speculative.method not in (*SETTINGS, *HEADS),
        "num_speculative_tokens_per_batch_size (SiPipe decides by measured times)": (
            speculative.uses_dynamic_speculative_decoding()
        ),
        "a model with recurrent states": model.has_inner_state,
        "encoder-decoder models": model.is_encoder_decoder,
        "a model whose prefill leaves tokens out": model.rswa_window is not None,
        "--kv-sharing-fast-prefill": vllm_config.cache_config.kv_sharing_fast_prefill,
        f'"rejection_sample_method": "{speculative.rejection_sample_method}"': (
            speculative.rejection_sample_method != "standard"
        ),
        "--kv-transfer-config": vllm_config.kv_transfer_config is not None,
    }
    reasons[why_no_head(vllm_config)] = bool(why_no_head(vllm_config))
    for reason, found in reasons.items():
        if found:
            raise UnsupportedError(_refused(reason))


def _refused(what: str) -> str:
    return (
        f"--speculative-config: SiPipe does not support {what}: take "
        '{"method": "ngram"} without it, or leave the option out'
    )


def proposing(vllm_config: VllmConfig) -> NGramSettings | SuffixSettings | None:
    """What samplers propose drafts by."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in HEADS:
        return None
    kind = SETTINGS[speculative.method]
    told = {field.name: getattr(speculative, field.name) for field in fields(kind)}
    made: NGramSettings | SuffixSettings = kind(**told)
    return made


class NoSpeculation:
    """Requests get a token in each of their turns."""

    def fit(self) -> None:
        """A microbatch is scheduled next."""

    def take(self, iteration: Iteration) -> None:
        """The scheduler has taken the tokens of ``iteration``."""


class Speculation(NoSpeculation):
    """With drafts. ``controller``: what knows the stages' times; None where nothing does. ``target``:
    seconds that a period may take, rows of drafts included; 0: any."""

    def __init__(
        self, scheduler: Any, controller: ConcurrencyController | None, target: float = 0.0
    ) -> None:
        self._scheduler, self._controller, self._target = scheduler, controller, target
        self._live, self._rows = scheduler.telemetry.live, scheduler.rows
        # One lookup for every size: vLLM then pads no request with drafts that nobody proposed.
        sizes = scheduler.max_num_running_reqs + 1
        scheduler.dynamic_sd_lookup = [scheduler.num_spec_tokens] * sizes
        self._forced = ForcedTokens(scheduler.structured_output_manager)
        self._fitting = BestEffort("fitting drafts into the next microbatch", bounded=False)
        self._taking = BestEffort("taking drafts in", bounded=False)
        self._forcing = BestEffort("finding the tokens that a grammar forces")
        self._price: float | None = None
        """Share of a period that one more row in each microbatch costs; None: not known yet."""
        self._each = self._right = 1.0
        """Tokens of a request in a pass, lately; and what part of drafts was accepted."""

    def fit(self) -> None:
        if not self._fitting(False, self._fit):
            # Drafts that nobody has counted could have more rows than BIC-L.
            for request in self._scheduler.running:
                request.spec_token_ids = []
            self._scheduler.tracker.worth = 1.0

    def _fit(self) -> bool:
        scheduler = self._scheduler
        running: list[Request] = scheduler.running
        drafting = [request for request in running if request.spec_token_ids]
        asked = sum(scheduler.get_request_counts())
        room = min(self._rows, scheduler.max_num_scheduled_tokens)
        room -= min(asked, scheduler.max_num_running_reqs) + scheduler.iterations.drafts()
        if scheduler.kv_cache_manager.usage > 1 - KV_RESERVE:
            room = 0
        controller = self._controller
        formed = max(controller.formed, 1) if controller is not None else 1
        sequences = max(1.0, len(running) / formed)
        if controller is not None and self._target:
            more = controller.within(self._target, math.ceil(sequences) + room) - sequences
            room = min(room, max(0, int(formed * more)))
        for request in drafting:
            left = request.max_tokens - request.num_output_tokens - 1
            request.spec_token_ids = request.spec_token_ids[: max(left, 0)]
        most = _level([len(request.spec_token_ids) for request in drafting], room)
        for request in drafting:
            request.spec_token_ids = request.spec_token_ids[:most]
        price = self._price = controller.price(sequences) if controller is not None else None
        worth = (UNKNOWN_PRICE if price is None else price * MARGIN) * sequences * self._each
        scheduler.tracker.worth = max(worth, LEAST_WORTH) if room > 0 else 1.0
        return True

    def take(self, iteration: Iteration) -> None:
        self._taking(None, self._take, iteration)

    def _take(self, iteration: Iteration) -> None:
        drafts = iteration.output.scheduled_spec_decode_tokens
        if rows := len(iteration.work.sampled):
            drawn = sum(len(part.tokens) for part in iteration.answers.tokens or ()) // _INT32
            offered = sum(map(len, drafts.values()))
            requests = rows - offered - len(iteration.outcome.errors)  # which get no token
            if requests > 0:
                self._each += RATE * (drawn / requests - self._each)
            if self._controller is not None:
                each = rows / max(rows - offered, 1)
                self._controller.rows += RATE * (each - self._controller.rows)
            if offered:
                self._right += RATE * (max(0, drawn - requests) / offered - self._right)
            self._live.add(Word.DRAFTS, offered)
            self._live.add(Word.ACCEPTED, max(0, drawn - requests))
            self._live.add(Word.DRAFTED, len(drafts))
        found = iteration.outcome.drafts
        if iteration.work.step.grammar and self._right > self._scheduler.tracker.worth:
            most = self._scheduler.num_spec_tokens
            for request_id in dict.fromkeys(iteration.work.sampled):
                request = self._scheduler.requests.get(request_id)
                if request is None:
                    continue
                if forced := self._forcing([], self._forced.of, request, most):
                    found[request_id] = forced
        # One that was preempted may be in another iteration by now, whose token comes first.
        found = {
            name: tokens for name, tokens in found.items() if self._is_next(name, iteration.number)
        }
        if found:
            drafts = DraftTokenIds(list(found), list(found.values()))
            self._scheduler.update_draft_token_ids(drafts)

    def _is_next(self, request_id: str, number: int) -> bool:
        """Say if what iteration ``number`` brought is the last that the request has."""
        request: Request | None = self._scheduler.requests.get(request_id)
        running = request is not None and request.status == RequestStatus.RUNNING
        return running and bool(self._scheduler.tracker.is_last(number, request_id))


class HeadSpeculation(Speculation):
    """With drafts of a head, which come after the tokens that they stand behind: they are waited for
    when the scheduler has handed the tokens on and makes the next microbatch."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._awaited: list[int] = []
        """Iterations whose tokens were taken in since the last microbatch was made."""
        self._scheduler.head_drafts.steps = self._scheduler.num_spec_tokens
        self._chances = [1.0] * self._scheduler.num_spec_tokens
        """Probability of each draft, if those before it are right, lately."""

    def _fit(self) -> bool:
        awaited, self._awaited = self._awaited, []
        for number, drafts in self._scheduler.head_drafts.take(awaited).items():
            # What a grammar forces is right, and stands already.
            proposed = {
                name: tokens
                for name, tokens in drafts.items()
                if self._is_next(name, number) and not self._scheduler.requests[name].spec_token_ids
            }
            if proposed:
                ids = DraftTokenIds(list(proposed), list(proposed.values()))
                self._scheduler.update_draft_token_ids(ids)
        super()._fit()
        # One more at a time: of drafts behind those that were wrong nothing has been seen for long.
        most = min(self._worth_making(), self._scheduler.head_drafts.steps + 1)
        self._scheduler.head_drafts.steps = most
        if most < len(self._chances):  # it may have become worth more: new requests are others
            self._chances[most] = min(1.0, self._chances[most] + RATE * LOSS)
        for request in self._scheduler.running:
            request.spec_token_ids = request.spec_token_ids[: max(most, 1)]
        return True

    def _worth_making(self) -> int:
        """Drafts of a request that are worth their rows and the head's passes; as many as there can be
        until the stages' times are known."""
        worth = self._scheduler.tracker.worth
        if worth >= 1.0:  # there is no room
            return 0
        if self._price is None:
            return len(self._chances)
        worth += self._pass_price()
        chance = 1.0
        for number, right in enumerate(self._chances):
            chance *= right
            if chance <= worth:
                return number
        return len(self._chances)

    def _pass_price(self) -> float:
        """Probability that a draft needs for the head's pass alone: all requests wait for it."""
        if self._controller is None:
            return 0.0
        formed = max(self._controller.formed, 1)
        period = self._controller.period(len(self._scheduler.running), formed)
        seconds = formed * self._scheduler.head_drafts.pass_seconds
        return self._each * seconds / (period + seconds) if period > 0 else 0.0

    def _take(self, iteration: Iteration) -> None:
        self._awaited.append(iteration.number)
        super()._take(iteration)
        drafts = iteration.output.scheduled_spec_decode_tokens
        if not drafts:
            return
        rows = Counter[str]()
        for part in iteration.answers.tokens or ():
            rows.update(iteration.work.sampled[row] for row in int32_view(part.rows).tolist())
        lengths = [(len(tokens), rows[name] - 1) for name, tokens in drafts.items() if rows[name]]
        for number, chance in enumerate(self._chances):
            tried = [right > number for length, right in lengths if min(length, right + 1) > number]
            if tried:
                self._chances[number] += RATE * (sum(tried) / len(tried) - chance)


def _level(lengths: list[int], room: int) -> int:
    """The largest number of drafts that each may have, so that all have ``room`` at most."""
    most = max(lengths, default=0)
    while most and sum(min(length, most) for length in lengths) > room:  # bound: `most`
        most -= 1
    return most


def speculation(scheduler: Any, controller: ConcurrencyController | None) -> NoSpeculation:
    """What there is of it in this engine."""
    if not scheduler.rows:
        return NoSpeculation()
    config = settings_of(scheduler.vllm_config)
    kind = Speculation if scheduler.head_drafts is None else HeadSpeculation
    return kind(scheduler, controller, config.microbatches.tpot_target_ms / 1e3)


def without_speculation(vllm_config: VllmConfig) -> VllmConfig:
    """The stages': their preparation places drafts as it places other tokens, and vLLM's runner has
    no drafter to make, no part of its own in them."""
    made = copy.copy(vllm_config)
    made.speculative_config = None
    return made
