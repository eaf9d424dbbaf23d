"""Completes prompts with an engine in this process, and hands the text over as it comes.

Who runs here: one asyncio loop of the caller's thread. A task per prompt feeds a queue; ``show`` sees
prompts in their order, the first unfinished one live.

Guarantees: a prompt that fails costs no other one. The engine and its processes are gone when
:func:`generate` returns or raises, also after Ctrl-C.
"""

import asyncio
import dataclasses
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

from vllm import AsyncEngineArgs, SamplingParams
from vllm.exceptions import GenerationError, GracefulHTTPError, VLLMClientError
from vllm.sampling_params import RequestOutputKind
from vllm.tokenizers.registry import cached_tokenizer_from_config
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from sipipe.config import STEPS_ASIDE
from sipipe.engine.setup.decide import decide
from sipipe.engine.start.arguments import engine_args, parse_engine_args
from sipipe.engine.start.aside import leave_sipipe_out, steps_aside
from sipipe.engine.start.launch import announce
from sipipe.engine.start.plugin import engine_config
from sipipe.engine.start.refusals import checked
from sipipe.errors import ConfigError, SiPipeError, tell
from sipipe.ipc.sockets import own_sockets

Event = Literal["begin", "text", "end"]


@dataclasses.dataclass(kw_only=True)
class Completion:
    """One finished prompt."""

    index: int
    prompt: str
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    """Reason why it was not finished."""


def generate(
    argv: Sequence[str],
    settings: dict[str, Any],
    sampling: dict[str, Any],
    *,
    prompts: Callable[[Sequence[str]], list[str]],
    chat: bool,
    show: Callable[[Event, Completion, str], None],
) -> bool:
    """Run the prompts of a command line, and return True if all finished.

    Args:
        argv: ``MODEL [PROMPT...]`` and vLLM's engine options, in any order.
        settings: SiPipe's settings.
        sampling: Fields of vLLM's ``SamplingParams``.
        prompts: Makes the prompts of the command line's words.
        chat: True if the prompts are messages for the model's chat template.
        show: Called with an event, the completion and a text at a completion's begin, at each piece
            of its text, and at its end.
    """
    args = parse_engine_args(argv, settings)
    texts = prompts(args.words)
    arguments = engine_args(args)
    aside = steps_aside(arguments)
    if aside:
        leave_sipipe_out(args)
        arguments = engine_args(args)
        vllm_config = checked(arguments.create_engine_config, arguments.model)
    else:
        vllm_config = engine_config(arguments)
    params = checked(partial(SamplingParams, **sampling, output_kind=RequestOutputKind.DELTA))
    if chat:
        texts = _messages(vllm_config, texts)
    if aside:
        tell(STEPS_ASIDE)
    else:
        announce(decide(vllm_config))
    with own_sockets():
        return asyncio.run(complete(engine_args(args), texts, params, chat, show))


def _messages(vllm_config: Any, texts: Sequence[str]) -> list[str]:
    """``texts`` as users' messages, in the words of the model's chat template."""
    tokenizer: Any = cached_tokenizer_from_config(vllm_config.model_config)
    template = partial(tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)
    try:
        return [template([{"role": "user", "content": text}]) for text in texts]
    except Exception as error:  # whatever a template and its tokenizer raise
        raise ConfigError(f"generate: --chat: {' '.join(str(error).split())}") from None


async def complete(
    arguments: AsyncEngineArgs,
    texts: Sequence[str],
    params: SamplingParams,
    chat: bool,
    show: Callable[[Event, Completion, str], None],
) -> bool:
    """Complete ``texts`` with an engine of ``arguments``; True if all finished."""
    try:
        with _interrupted_at_once():
            engine = AsyncLLM.from_engine_args(arguments)
    except RuntimeError as error:  # EngineDiedError, and vLLM's own where SiPipe steps aside
        raise SiPipeError(f"generate: {error}") from None
    tasks: list[asyncio.Task[None]] = []
    try:
        queues = [asyncio.Queue[str | None]() for _ in texts]
        completions = [Completion(index=i, prompt=text) for i, text in enumerate(texts)]
        tasks += [
            asyncio.create_task(_complete(engine, completion, params, chat, queue))
            for completion, queue in zip(completions, queues, strict=True)
        ]
        for completion, queue, task in zip(completions, queues, tasks, strict=True):
            show("begin", completion, "")
            # wait: none: vLLM's own for the request; its last piece, its error
            while (piece := await queue.get()) is not None:
                show("text", completion, piece)
            await task
            show("end", completion, "")
        return not any(completion.error for completion in completions)
    except EngineDeadError as error:
        raise SiPipeError(f"generate: {error}") from None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        engine.shutdown()


@contextmanager
def _interrupted_at_once() -> Iterator[None]:
    """Have Ctrl-C interrupt what the body does. asyncio's handler would wait for the end of a start, or
    for the engine, which a terminal interrupts too, and which then seems to have failed."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


async def _complete(
    engine: AsyncLLM,
    completion: Completion,
    params: SamplingParams,
    chat: bool,
    queue: asyncio.Queue[str | None],
) -> None:
    """Complete one prompt, and put the pieces of its text into ``queue``; None ends them."""
    # A chat template has the special tokens.
    special = {"add_special_tokens": False} if chat else {}
    try:
        name = f"generate-{completion.index}"
        outputs = engine.generate(completion.prompt, params, name, tokenization_kwargs=special)
        async for output in outputs:
            piece = output.outputs[0]
            completion.text += piece.text
            completion.token_ids += piece.token_ids
            completion.finish_reason = piece.finish_reason
            if piece.text:
                queue.put_nowait(piece.text)
    # GracefulHTTPError: one of vLLM's bounds on what waits (``--max-num-queued-reqs``).
    except (GenerationError, VLLMClientError, EngineGenerateError, GracefulHTTPError) as error:
        completion.finish_reason = "error"
        completion.error = str(error.__cause__ or error)
    finally:
        queue.put_nowait(None)
