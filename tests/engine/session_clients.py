"""Clients of streaming sessions against one engine; prints what each got, as JSON. Run by
tests/engine/test_sessions.py in a process of its own: ``session_clients.py MODEL``."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator

from vllm import AsyncEngineArgs, SamplingParams
from vllm.engine.protocol import StreamingInput
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

LENGTH = 64


def turn(prompt: int, **parameters) -> StreamingInput:
    delta = RequestOutputKind.DELTA
    return StreamingInput(
        prompt=TokensPrompt(prompt_token_ids=[5 + i % 50 for i in range(prompt)]),
        sampling_params=SamplingParams(
            temperature=0, ignore_eos=True, output_kind=delta, **parameters
        ),
    )


async def session(engine: AsyncLLM, name: str, *turns: StreamingInput) -> list:
    """How each turn ended, and with how many tokens; last the error, if there was one."""
    ends = []
    answered = asyncio.Queue()

    async def inputs() -> AsyncIterator[StreamingInput]:
        for each in turns:
            yield each
            await answered.get()

    tokens = 0
    try:
        async for output in engine.generate(inputs(), turns[0].sampling_params, name):
            sequence = output.outputs[0]
            tokens += len(sequence.token_ids)
            if sequence.finish_reason:
                ends.append([sequence.finish_reason, tokens])
                tokens = 0
                await answered.put(None)
    except Exception as error:
        ends.append([type(error).__name__, str(error)])
    return ends


async def paused(engine: AsyncLLM, name: str, seconds: float) -> list:
    """A session amid which the engine is paused with abort, and resumed."""
    turns = turn(10, max_tokens=40), turn(5, max_tokens=4)
    client = asyncio.create_task(session(engine, name, *turns))
    await asyncio.sleep(seconds)
    await engine.pause_generation(mode="abort")
    await engine.resume_generation()
    return await asyncio.wait_for(client, 60)


async def main() -> None:
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=sys.argv[1],
            dtype="float32",
            max_model_len=LENGTH,
            max_num_seqs=8,
            pipeline_parallel_size=2,
            enforce_eager=True,
            async_scheduling=True,
            distributed_executor_backend="sipipe.Executor",
            kv_cache_memory_bytes=1 << 26,
        )
    )

    def first() -> StreamingInput:
        # A turn of its own each time: vLLM's front end appends to the list that it was given.
        return turn(10, max_tokens=3)

    ends = {
        "turns": await session(engine, "a", first(), turn(5, max_tokens=4)),
        "too long": await session(
            engine, "b", first(), turn(60, max_tokens=4), turn(5, max_tokens=4)
        ),
        "exactly full": await session(engine, "c", first(), turn(LENGTH - 12, max_tokens=99)),
        "one left": await session(engine, "d", first(), turn(LENGTH - 13, max_tokens=99)),
        "logprobs later": await session(engine, "e", first(), turn(5, max_tokens=4, logprobs=2)),
        "logprobs": await session(
            engine, "f", turn(9, max_tokens=3, logprobs=2), turn(5, max_tokens=4, logprobs=2)
        ),
        "paused": [await paused(engine, f"p{k}", 0.02 * k) for k in range(8)],
        "alive": await session(engine, "z", first()),
    }
    engine.shutdown()
    print(json.dumps(ends))


if __name__ == "__main__":
    asyncio.run(main())
