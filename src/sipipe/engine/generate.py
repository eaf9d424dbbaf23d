"""Completes prompts with an engine in this process, and hands the text over as it comes.

Runs in one asyncio loop of the caller's thread: a task per prompt feeds a queue; the caller's
``show`` sees prompts in their order, the first unfinished one live. The engine and all its processes
are gone when :func:`generate` returns or raises, also after Ctrl-C.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

from vllm import AsyncEngineArgs, SamplingParams
from vllm.exceptions import GenerationError
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from sipipe.engine.arguments import engine_args, parse_engine_args
from sipipe.engine.launch import announce
from sipipe.engine.plugin import checked, engine_config
from sipipe.engine.setup import decide
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
    """Why it was not finished."""


def generate(
    argv: Sequence[str],
    settings: dict[str, Any],
    sampling: dict[str, Any],
    *,
    prompts: Callable[[Sequence[str]], list[str]],
    chat: bool,
    show: Callable[[Event, Completion, str], None],
) -> None:
    """Run the prompts of ``argv`` (``MODEL [PROMPT...]`` and vLLM's engine options, in any order).
    ``prompts`` turns the words of the command line into prompts. ``show(event, completion, text)``
    is called at a completion's begin, with each piece of its text, and at its end."""
    args = parse_engine_args(argv, settings)
    texts = prompts(args.words)
    vllm_config = engine_config(engine_args(args))
    params = checked(lambda: SamplingParams(**sampling, output_kind=RequestOutputKind.DELTA))
    announce(decide(vllm_config))
    with own_sockets():
        asyncio.run(_run(engine_args(args), texts, params, chat, show))


async def _run(
    arguments: AsyncEngineArgs,
    texts: Sequence[str],
    params: SamplingParams,
    chat: bool,
    show: Callable[[Event, Completion, str], None],
) -> None:
    engine = AsyncLLM.from_engine_args(arguments)
    try:
        if chat:
            tokenizer = engine.get_tokenizer()
            texts = [
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
                )
                for text in texts
            ]
        queues = [asyncio.Queue[str | None]() for _ in texts]
        completions = [Completion(index=i, prompt=text) for i, text in enumerate(texts)]
        async with asyncio.TaskGroup() as tasks:
            for completion, queue in zip(completions, queues, strict=True):
                tasks.create_task(_complete(engine, completion, params, queue))
            for completion, queue in zip(completions, queues, strict=True):
                show("begin", completion, "")
                # wait: none: vLLM's own for the request; its last piece, its error
                while (piece := await queue.get()) is not None:
                    show("text", completion, piece)
                show("end", completion, "")
    finally:
        engine.shutdown()


async def _complete(
    engine: AsyncLLM,
    completion: Completion,
    params: SamplingParams,
    queue: asyncio.Queue[str | None],
) -> None:
    try:
        name = f"generate-{completion.index}"
        async for output in engine.generate(completion.prompt, params, name):
            piece = output.outputs[0]
            completion.text += piece.text
            completion.token_ids += piece.token_ids
            completion.finish_reason = piece.finish_reason
            if piece.text:
                queue.put_nowait(piece.text)
    except GenerationError as error:
        completion.finish_reason, completion.error = "error", str(error)
    finally:
        queue.put_nowait(None)
