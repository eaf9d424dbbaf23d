"""Requests that the engine refuses, each alone, before its scheduler sees them.

vLLM's front end checks prompts and parameters. What it has not checked (a ready ``EngineCoreRequest``,
another front end, the later turns of a streaming session) would be met by an assertion, in the
scheduler or in a worker, which ends the engine for everybody. Here it ends that request alone, and
its client is told why in one line.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from vllm import SamplingParams, envs
from vllm.config import VllmConfig
from vllm.v1.request import Request

REFUSED = "Invalid request: "
"""Beginning of a sentence to a client about its own request; a server answers with status 400."""

MOST_NESTED = 500
"""Levels of lists and objects that a request's parameters may have. They are sent to the workers as a
pickle, whose writer ends with a RecursionError short of 1,000, and with it the engine."""

LEAST_REPETITION = 1e-30
"""Repetition penalty by which a logit can be divided and still be a float32."""
MOST_REPETITION = 1e30
"""Repetition penalty by which a logit can be multiplied and still be a float32."""


def bound_counts(request: Request, longest: int) -> None:
    """Bound a request's counts of tokens by the ``longest`` request that there can be.

    Stages keep them in 32 bits, after adding the prompt's length; vLLM's front end takes any number from
    a program, and the server's ``/inference/v1/generate`` from a client. More tokens never come to be.
    """
    params = request.sampling_params
    if params is None:
        return
    request.max_tokens = min(request.max_tokens, longest)
    if params.max_tokens is not None:
        params.max_tokens = min(params.max_tokens, longest)
    params.min_tokens = min(params.min_tokens, longest)


def leave_out_unknown_tokens(request: Request, vocabulary: int) -> None:
    """Leave bad words and stop tokens out that the model has not, as a tokenizer may have more.

    They rule nothing out. The sampler of vLLM's second runner writes to the logit of each without a look
    at the row's end, where another request's row begins.
    """
    params = request.sampling_params
    if params is None:
        return
    if words := params.bad_words_token_ids:
        params._bad_words_token_ids = [word for word in words if max(word) < vocabulary]
    stops = params.all_stop_token_ids
    params._all_stop_token_ids = {token for token in stops if token < vocabulary}


class RefusedRequest(Request):
    """A request that the engine could not read. Of the client's it has no more than whose it is.

    Args:
        request_id: the id that vLLM's front end knows it by.
        client_index: the front end's number.
        reason: why it cannot be served.
    """

    def __init__(self, request_id: str, *, client_index: int, reason: str) -> None:
        super().__init__(
            request_id=request_id,
            prompt_token_ids=[0],
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            client_index=client_index,
        )
        self.reason = reason


def refusal(request: Request, known: Request | None, vllm_config: VllmConfig) -> str:
    """Why ``request`` cannot be served; empty where it can. ``known`` has its id and has not left: a
    streaming session whose next turn this is, or whose end."""
    if isinstance(request, RefusedRequest):
        return request.reason
    if known is not None:
        return (
            _refusal_of_turn(request, known)
            or _refusal_of_parameters(request)
            or _refusal_of_tokens(request, vllm_config)
        )
    return (
        _refusal_of_session(request)
        or _refusal_of_parameters(request)
        or _refusal_of_prompt(request, vllm_config)
        or _refusal_of_tokens(request, vllm_config)
    )


def is_duplicate(request: Request, known: Request | None) -> bool:
    """Say if the id of ``request`` is that of a live request which it is no turn of."""
    if known is None or known.is_finished():
        return False
    return known.streaming_queue is None or known.client_index != request.client_index


def _refusal_of_turn(request: Request, session: Request) -> str:
    if session.is_finished():
        return (
            f"request id {request.request_id} is that of a request whose KV cache blocks are still "
            "being handed over: take another id, or try again later"
        )
    if not request.resumable:  # the session's end
        return ""
    if reason := _refusal_of_session(request):
        return reason
    if request.num_prompt_tokens == 0:
        return "a turn of a session has no tokens"
    if request.lora_request != session.lora_request:
        return "a session has the LoRA adapter of its first turn: begin another session"
    return ""


def _refusal_of_session(request: Request) -> str:
    """Why ``request`` can be no turn of a session."""
    if not request.resumable:
        return ""
    params = request.sampling_params
    if params is None:
        return "a session generates: pooling is for requests of one prompt"
    if request.prompt_token_ids is None:
        return "a session takes prompts of tokens, no embeddings"
    if request.use_structured_output:
        # vLLM keeps the grammar of the first turn, in the state in which that turn has left it.
        return "structured outputs are not for sessions: send this turn as a request of its own"
    if params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None:
        # The row that predicts a later turn's first token was computed in the turn before.
        return "prompt_logprobs are not for sessions: send this turn as a request of its own"
    return ""


def _refusal_of_prompt(request: Request, vllm_config: VllmConfig) -> str:
    model = vllm_config.model_config
    length = request.num_prompt_tokens
    room = model.max_model_len - (model.runner_type == "generate")
    if length == 0:
        return "the prompt has no tokens"
    if length > room:
        return (
            f"the prompt has {length} tokens, and --max-model-len {model.max_model_len} has room for "
            f"{room}: shorten it, or raise --max-model-len"
        )
    return _refusal_of_scores(request)


def _refusal_of_scores(request: Request) -> str:
    """Why the prompt cannot be scored. vLLM looks at requests that it has made itself."""
    params = request.sampling_params
    if params is None or params.prompt_logprob_token_ids is None:
        return ""
    rows = len(params.prompt_logprob_token_ids)
    scored = max(request.num_prompt_tokens - 1 - (params.prompt_logprob_start or 0), 0)
    if rows != scored:
        return f"prompt_logprob_token_ids has {rows} rows, and {scored} tokens of the prompt are scored"
    return ""


def _refusal_of_tokens(request: Request, vllm_config: VllmConfig) -> str:
    """Why the prompt's tokens cannot be embedded. With a tokenizer vLLM's front end has looked."""
    model = vllm_config.model_config
    if not model.skip_tokenizer_init or request.mm_features or not request.prompt_token_ids:
        return ""
    size = model.get_vocab_size()
    if min(request.prompt_token_ids) < 0 or max(request.prompt_token_ids) >= size:
        return f"the prompt has a token that is none of the model's {size}"
    return ""


def _refusal_of_parameters(request: Request) -> str:
    params = request.sampling_params
    if params is None:
        return ""
    if params.repetition_penalty < LEAST_REPETITION:
        return (
            f"repetition_penalty {params.repetition_penalty:g} is too small: logits divided by it are "
            "infinite"
        )
    if params.repetition_penalty > MOST_REPETITION:
        return (
            f"repetition_penalty {params.repetition_penalty:g} is too large: logits multiplied by it "
            "are infinite"
        )
    if params.seed is not None and not -(2**63) <= params.seed < 2**64:
        return f"seed {params.seed} does not fit into 64 bits"
    structured = params.structured_outputs
    schema = structured.json if structured is not None else None
    if is_nested(params.extra_args):
        named = "vllm_xargs, kv_transfer_params"
    elif is_nested(schema):
        named = "structured_outputs"
    else:
        return ""
    return f"its parameters ({named}) are nested more than {MOST_NESTED} levels deep"


def refusal_of_sampler(request: Request) -> str:
    """Why the sampler of vLLM's second runner cannot draw for ``request``; empty where it can.

    Its tables of parameters have a fixed size, and a request with more ends the worker. SiPipe's samplers
    have no such bounds, nor has vLLM's PyTorch sampler.
    """
    params = request.sampling_params
    if params is None:
        return ""
    # Its kernels are imported only where they are used.
    from vllm.v1.worker.gpu.sample import logit_bias

    stops = params.all_stop_token_ids if params.min_tokens else ()
    bad_words = params.bad_words_token_ids or ()
    bounds: tuple[tuple[str, Any, int], ...] = (
        ("allowed_token_ids", params.allowed_token_ids or (), logit_bias.MAX_NUM_ALLOWED_TOKEN_IDS),
        ("logit_bias", params.logit_bias or (), logit_bias.MAX_NUM_LOGIT_BIAS_TOKENS),
        ("min_tokens: stop tokens", stops, logit_bias.MAX_NUM_STOP_TOKEN_IDS),
        ("bad_words", bad_words, envs.VLLM_MAX_NUM_BAD_WORDS),
        (
            "bad_words: tokens",
            tuple(chain.from_iterable(bad_words)),
            envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS,
        ),
    )
    for name, values, most in bounds:
        if len(values) > most:
            return f"{name}: {len(values)} are more than the {most} that vLLM's sampler takes here"
    if params.seed is not None and not -(2**63) <= params.seed < 2**63:
        return f"seed {params.seed} does not fit into 64 bits with a sign"
    return ""


def is_nested(value: Any, most: int = MOST_NESTED) -> bool:
    """Say if ``value`` has more than ``most`` levels of lists and objects, one in another."""
    level = [value]
    for _ in range(most + 1):
        level = [
            child
            for holder in level
            if isinstance(holder, dict | list | tuple)
            for child in (holder.values() if isinstance(holder, dict) else holder)
        ]
        if not level:
            return False
    return True
