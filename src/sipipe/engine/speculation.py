"""Speculative decoding: whether drafts are verified, and how many, in the next microbatch.

Samplers propose drafts (:mod:`sipipe.sampler.drafts`) with the tokens that they stand behind. They
are in before the request's next turn, because a request is in one iteration at a time, so drafts go
to all stages with the scheduling output, and nothing is corrected afterwards. The samplers draw at
each draft's position what they would have drawn there, and stop at the first that differs.

A draft is worth its row where it is likely enough: the row costs a share of the pass (the stage times
that are measured anyway), a token that comes with it is worth as much as one of the pass's others. So
speculation fades as the batch fills, and where nothing repeats; rows of all iterations in flight stay
within BIC-L's, and none are taken while the KV cache runs out.

Who runs here: the engine's thread.
"""

from __future__ import annotations

import copy
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request

from sipipe.errors import UnsupportedError
from sipipe.messages.boots import NGramSettings
from sipipe.observe.live import Word

if TYPE_CHECKING:
    from sipipe.engine.iterations import Iteration
    from sipipe.engine.scheduling.concurrency import ConcurrencyController

MOST = 16
"""Of ``{"method": "ngram"}`` with nothing else: how many are worth it is decided anew each time."""
LENGTHS = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
UNKNOWN_PRICE = 0.1
"""Of a row, as long as batches of different sizes have not told it."""
LEAST_WORTH = 0.05
_INT32 = 4
RATE = 0.05
"""Weight of the last microbatch in how many tokens come of a request in a pass."""
KV_RESERVE = 0.05
"""Share of the KV cache that has to be free: a draft must not cost another request its place."""


def fill_in(asked: dict[str, Any] | None) -> None:
    """Say what vLLM wants to be told and SiPipe decides by itself."""
    if asked is not None and asked.get("method") == "ngram":
        asked.setdefault("num_speculative_tokens", MOST)
        if not asked.keys() & LENGTHS.keys():  # of one, vLLM makes the other
            asked.update(LENGTHS)


def check_speculation(vllm_config: VllmConfig) -> None:
    """Refuse what the samplers cannot propose or verify.

    Raises:
        UnsupportedError: one line that names the option.
    """
    speculative = vllm_config.speculative_config
    if speculative is None:
        return
    reasons = {
        f'method "{speculative.method}"': speculative.method != "ngram",
        "num_speculative_tokens_per_batch_size (SiPipe decides by measured times)": (
            speculative.uses_dynamic_speculative_decoding()
        ),
        "a model with recurrent states": vllm_config.model_config.has_inner_state,
        "--kv-transfer-config": vllm_config.kv_transfer_config is not None,
    }
    for reason, found in reasons.items():
        if found:
            raise UnsupportedError(
                f"--speculative-config: SiPipe does not support {reason}: take "
                '{"method": "ngram"} without it, or leave the option out'
            )


def ngrams(vllm_config: VllmConfig) -> NGramSettings | None:
    """What samplers propose drafts by."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return None
    return NGramSettings(
        num_speculative_tokens=speculative.num_speculative_tokens,
        prompt_lookup_max=speculative.prompt_lookup_max,
        prompt_lookup_min=speculative.prompt_lookup_min,
    )


class NoSpeculation:
    """Requests get a token in each of their turns."""

    def fit(self) -> None:
        """A microbatch is scheduled next."""

    def take(self, iteration: Iteration) -> None:
        """The scheduler has taken the tokens of ``iteration``."""


class Speculation(NoSpeculation):
    """With drafts.

    Args:
        scheduler: vLLM's, or one of its kind, with this engine's records.
        controller: what knows the stages' times; None where nothing does.
    """

    def __init__(self, scheduler: Any, controller: ConcurrencyController | None) -> None:
        self._live, rows = scheduler.telemetry.live, scheduler.rows
        self._scheduler, self._controller, self._rows = scheduler, controller, rows
        # One lookup for every size: vLLM then pads no request with drafts that nobody proposed.
        scheduler.dynamic_sd_lookup = [scheduler.num_spec_tokens] * (
            scheduler.max_num_running_reqs + 1
        )
        tokenizer = getattr(scheduler.structured_output_manager, "tokenizer", None)
        self._encode = lru_cache(1024)(partial(_encoded, tokenizer))
        self._each = 1.0
        """Tokens of a request in a pass, lately."""

    def fit(self) -> None:
        scheduler = self._scheduler
        running: list[Request] = scheduler.running
        drafting = [request for request in running if request.spec_token_ids]
        asked = len(running) + len(scheduler.waiting)
        room = min(self._rows, scheduler.max_num_scheduled_tokens)
        room -= min(asked, scheduler.max_num_running_reqs)
        if scheduler.kv_cache_manager.usage > 1 - KV_RESERVE:
            room = 0
        for request in drafting:
            left = request.max_tokens - request.num_output_tokens - 1
            request.spec_token_ids = request.spec_token_ids[: max(left, 0)]
        most = _level([len(request.spec_token_ids) for request in drafting], room)
        for request in drafting:
            request.spec_token_ids = request.spec_token_ids[:most]
        formed = self._controller.formed if self._controller is not None else 1
        sequences = max(1.0, len(running) / max(formed, 1))
        price = self._controller.price(sequences) if self._controller is not None else None
        worth = (UNKNOWN_PRICE if price is None else price) * sequences * self._each
        scheduler.tracker.worth = max(worth, LEAST_WORTH) if room > 0 else 1.0

    def take(self, iteration: Iteration) -> None:
        drafts = iteration.output.scheduled_spec_decode_tokens
        if rows := len(iteration.work.sampled):
            drawn = sum(len(part.tokens) for part in iteration.tokens or ()) // _INT32
            offered = sum(map(len, drafts.values()))
            requests = rows - offered
            self._each += RATE * (drawn / requests - self._each)
            self._live.add(Word.DRAFTS, offered)
            self._live.add(Word.ACCEPTED, drawn - requests)
            self._live.add(Word.DRAFTED, len(drafts))
        found = iteration.drafts
        if iteration.work.step.grammar:
            for request_id in dict.fromkeys(iteration.work.sampled):
                request = self._scheduler.requests.get(request_id)
                if request is not None and (forced := self._forced(request)):
                    found[request_id] = forced
        if found:
            drafts = DraftTokenIds(list(found), list(found.values()))
            self._scheduler.update_draft_token_ids(drafts)

    def _forced(self, request: Request) -> list[int]:
        """What the request's grammar leaves no choice in. Its text is one; a model may cut it into
        other tokens than the tokenizer does."""
        manager = self._scheduler.structured_output_manager
        asked = request.structured_output_request
        if asked is None or (manager.reasoner_cls is not None and not asked.reasoning_ended):
            return []
        grammar = asked.grammar
        if grammar.is_terminated():
            return []
        most = self._scheduler.num_spec_tokens
        if (matcher := getattr(grammar, "matcher", None)) is not None:  # xgrammar
            text = matcher.find_jump_forward_string()
            return self._encode(text)[:most] if text else []
        if (matcher := getattr(grammar, "ll_matcher", None)) is not None:  # guidance
            tokens: list[int] = matcher.compute_ff_tokens()[:most]
            return tokens
        return []


def _encoded(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer.encode(text, add_special_tokens=False) if tokenizer else []
    return found


def _level(lengths: list[int], room: int) -> int:
    """The largest number of drafts that each may have, so that all have ``room`` at most."""
    most = max(lengths, default=0)
    while most and sum(min(length, most) for length in lengths) > room:  # bound: `most`
        most -= 1
    return most


def speculation(scheduler: Any, controller: ConcurrencyController | None) -> NoSpeculation:
    """What there is of it in this engine."""
    return Speculation(scheduler, controller) if scheduler.rows else NoSpeculation()


def without_speculation(vllm_config: VllmConfig) -> VllmConfig:
    """The stages': their preparation places drafts as it places other tokens, and vLLM's runner has
    no drafter to make, no part of its own in them."""
    made = copy.copy(vllm_config)
    made.speculative_config = None
    return made
