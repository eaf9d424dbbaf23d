"""Requests whose fault vLLM meets only in the engine, where it ends all of them: refused in front of it.

- An id that a live request has: only where ``VLLM_DISABLE_REQUEST_ID_RANDOMIZATION`` is set. vLLM
  takes the second request for the next turn of the first.
- A ready ``EngineCoreRequest``, whose prompt and parameters vLLM does not check.
- A prompt with a token of the tokenizer's for which the model has no row, such as a padding token that
  was added to the tokenizer alone: a client can write it as text. The stage that embeds it would end.
- Without a tokenizer, a prompt with any token that the model has no row for.

A request that cannot be sent, such as one with a NumPy number among its parameters, is forgotten: vLLM
keeps it, and an ``LLM`` would wait for it at its next call.

The client who brings one of them gets the error. Requests of other front ends meet the same checks in
the engine (:mod:`sipipe.engine.iteration.admission`), but for those that cost time by a prompt's length.

Who runs here: the event loop's thread of an ``AsyncLLM``, or the thread that calls an ``LLMEngine``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vllm import envs
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.llm_engine import LLMEngine

from sipipe.engine.start.drain import telling_of_the_end
from sipipe.extending import extends


def check_new_requests() -> None:
    """Have both of vLLM's front ends check new requests. Safe to call again."""
    _check_prompts_rows()

    @extends(AsyncLLM, "add_request")
    async def add_request_async(
        add: Any, self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        with telling_of_the_end(self), _telling_what_has_no_bytes(params):
            if isinstance(prompt, EngineCoreRequest):
                request_id = prompt.request_id
                _check_ready(self, prompt, await self.get_supported_tasks())
            if not isinstance(request_id, str):  # an ``LLMEngine`` looks
                raise TypeError(f"request_id must be a string, got {type(request_id)}")
            if not envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION:
                return await add(self, request_id, prompt, params, *args, **kwargs)
            # vLLM knows the id once the prompt is tokenized; another request may come before that.
            coming = self.__dict__.setdefault("_sipipe_coming_ids", set())
            _check_id(self, request_id, coming)
            coming.add(request_id)
            try:
                return await add(self, request_id, prompt, params, *args, **kwargs)
            finally:
                coming.discard(request_id)

    @extends(LLMEngine, "add_request")
    def add_request(
        add: Any, self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if isinstance(prompt, EngineCoreRequest):
            request_id = prompt.request_id
            _check_ready(self, prompt, self.get_supported_tasks())
        if envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION:
            _check_id(self, request_id, set())
        waiting = len(self.output_processor.request_states)
        try:
            return add(self, request_id, prompt, params, *args, **kwargs)
        except BaseException:
            # Those that were added now are the last ones.
            if added := [*self.output_processor.request_states][waiting:]:
                self.abort_request(added, internal=True)
            raise

    @extends(AsyncLLM, "_add_request")
    async def add_to_engine(add: Any, self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        try:
            await add(self, request, *args, **kwargs)
        except BaseException:
            await self.abort(request.request_id, internal=True)
            raise


@contextmanager
def _telling_what_has_no_bytes(params: Any) -> Iterator[None]:
    """Raise VLLMValidationError, the client's own, where the body meets text with half a surrogate pair,
    which JSON can have, or a number of more than 64 bits. vLLM takes it for an error of its own."""
    try:
        for name in ("stop", "bad_words"):
            for text in getattr(params, name, None) or ():
                text.encode()  # the tokenizer would call it no text at all
        yield
    except (UnicodeError, OverflowError) as error:
        raise VLLMValidationError(f"a value of the request cannot be sent: {error}") from error


def _check_prompts_rows() -> None:
    """Have vLLM's check of a prompt's length and tokens look for each token's row in the model too."""

    @extends(InputProcessor, "_validate_model_input")
    def validate_model_input(validate: Any, self: Any, prompt_input: Any, prompt_type: str) -> None:
        validate(self, prompt_input, prompt_type)
        # Tokens that stand for images may be behind the vocabulary: no row is looked up for them.
        if prompt_input["type"] == "token":
            _check_rows(self, prompt_input["prompt_token_ids"])


def _check_id(engine: Any, request_id: str, coming: set[str]) -> None:
    """Raise VLLMValidationError if a request of that id lives, or is being added."""
    if request_id in engine.output_processor.external_req_ids or request_id in coming:
        raise VLLMValidationError(
            f"request id {request_id} is in use: give each request an id of its own, or unset "
            "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"
        )


def _check_ready(engine: Any, request: EngineCoreRequest, tasks: Any) -> None:
    """Check a ready request by vLLM's own checks of others. Raises VLLMValidationError."""
    if request.resumable:
        raise VLLMValidationError(
            "a session is given as its turns, a generator of StreamingInput, not as a ready request"
        )
    processor = engine.input_processor
    processor._validate_params(request.params, tasks)
    processor._validate_lora(request.lora_request)
    embeds = request.prompt_embeds
    tokens = request.prompt_token_ids
    length = len(embeds) if embeds is not None else len(tokens or ())
    processor._validate_prompt_len(length, "decoder")
    if tokens and embeds is None:
        processor.renderer.validate_token_ids(tokens)
        if not request.mm_features:
            _check_rows(processor, tokens)


def _check_rows(processor: Any, tokens: Sequence[int]) -> None:
    """Raise VLLMValidationError if the model has no row for one of a prompt's ``tokens``. vLLM lets pass
    what either the model or the tokenizer has."""
    vocabulary = processor.model_config.get_vocab_size()
    tokenizer = processor.tokenizer
    if tokenizer is None:
        # vLLM checks none of them then. The engine refuses a request that generates, too; vLLM's front
        # end has no way to take an answer without a result for one that is pooled, and would end.
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
            raise VLLMValidationError(
                f"the prompt has a token that is none of the model's {vocabulary}"
            )
        return
    if not 0 < vocabulary <= tokenizer.max_token_id:
        return
    # Few models get here, and the module imports much.
    from vllm.model_executor.layers.vocab_parallel_embedding import pad_vocab_size

    largest = max(tokens)
    if largest >= pad_vocab_size(vocabulary):  # vLLM's rows of no token are zero
        raise VLLMValidationError(
            f"the prompt has token {largest}, which the tokenizer has and the model has not: "
            f"its vocabulary has {vocabulary}"
        )
