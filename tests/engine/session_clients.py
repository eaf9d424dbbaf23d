"""Clients of streaming sessions against one engine.

``session_clients.py MODEL STAGES ADAPTER`` prints what each client got, as JSON. It is run by
tests/engine/test_sessions.py in a process of its own.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator

from vllm import AsyncEngineArgs, SamplingParams
from vllm.engine.protocol import StreamingInput
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM

LENGTH = 64
"""``--max-model-len``."""


def turn(prompt: int, **parameters) -> StreamingInput:
    """A client's turn of ``prompt`` tokens."""
    delta = RequestOutputKind.DELTA
    return StreamingInput(
        prompt=TokensPrompt(prompt_token_ids=[5 + i % 50 for i in range(prompt)]),
        sampling_params=SamplingParams(
            temperature=0, ignore_eos=True, output_kind=delta, **parameters
        ),
    )


async def session(engine: AsyncLLM, name: str, *turns: StreamingInput) -> list:
    """Run a session. Returns the finish reason of each turn with its number of tokens, and last the
    error, if there was one."""
    ends = []
    answered = asyncio.Queue()

    async def inputs() -> AsyncIterator[StreamingInput]:
        for next_turn in turns:
            yield next_turn
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
    """The ends of a session amid which the engine is paused with abort, and resumed."""
    turns = session(engine, name, turn(10, max_tokens=40), turn(5, max_tokens=4))
    client = asyncio.create_task(turns)
    await asyncio.sleep(seconds)
    await engine.pause_generation(mode="abort")
    await engine.resume_generation()
    return await asyncio.wait_for(client, 60)


async def texts(
    engine: AsyncLLM, name: str, amid: str = "", lora: LoRARequest | None = None
) -> list:
    """Tokens of three turns, and of one plain request for each with all tokens before it. ``amid`` says
    what happens between the turns."""
    answered = asyncio.Queue()
    prompts = [[5 + (place * 7 + length) % 90 for place in range(length)] for length in (9, 5, 12)]
    params = turn(1, max_tokens=6).sampling_params

    async def inputs() -> AsyncIterator[StreamingInput]:
        for prompt in prompts:
            tokens = TokensPrompt(prompt_token_ids=list(prompt))
            yield StreamingInput(prompt=tokens, sampling_params=params)
            if amid in ("keep", "wait"):
                await engine.pause_generation(mode=amid, clear_cache=False)
                await asyncio.sleep(0)
                await engine.resume_generation()
            await answered.get()
            if amid == "reset":
                assert await engine.reset_prefix_cache(reset_running_requests=True)
            if amid == "pause":
                await engine.pause_generation(mode="wait", clear_cache=True)
                await engine.resume_generation()

    drawn = []
    tokens = []
    async for output in engine.generate(inputs(), params, name, lora_request=lora):
        tokens += output.outputs[0].token_ids
        if output.outputs[0].finish_reason:
            drawn.append(tokens)
            tokens = []
            await answered.put(None)
    plain = []
    history = []
    for number, prompt in enumerate(prompts):
        history += prompt
        request = TokensPrompt(prompt_token_ids=list(history))
        tokens = []
        async for output in engine.generate(request, params, f"{name}p{number}", lora_request=lora):
            tokens += output.outputs[0].token_ids
        plain.append(tokens)
        history += tokens[:-1]
    return [drawn, plain]


async def silent(engine: AsyncLLM, count: int) -> list:
    """The end of a plain request beside ``count`` sessions whose clients are silent for a while, and
    the ends of the sessions' turns after they have gone on."""
    quiet = asyncio.Event()
    go_on = asyncio.Event()
    waiting = 0

    async def client(name: str) -> list:
        ends = []

        async def inputs() -> AsyncIterator[StreamingInput]:
            yield turn(30, max_tokens=3)
            await go_on.wait()
            yield turn(5, max_tokens=3)

        nonlocal waiting
        async for output in engine.generate(inputs(), turn(1).sampling_params, name):
            if output.outputs[0].finish_reason:
                ends.append(output.outputs[0].finish_reason)
                waiting += 1
                if waiting == count:
                    quiet.set()
        return ends

    sessions = [asyncio.create_task(client(f"quiet{number}")) for number in range(count)]
    await quiet.wait()
    plain = await asyncio.wait_for(plain_ends(engine, "beside", 20), 60)
    go_on.set()
    return [plain, await asyncio.wait_for(asyncio.gather(*sessions), 120)]


async def plain_ends(engine: AsyncLLM, name: str, prompt: int) -> str:
    """The end of a plain request: its finish reason, or the error."""
    request = turn(prompt, max_tokens=4)
    return await ending(engine, request.prompt, request.sampling_params, name)


async def ending(engine: AsyncLLM, prompt, params, name: str) -> str:
    """The end of a request: its finish reason, or the error."""
    reason = None
    try:
        async for output in engine.generate(prompt, params, name):
            reason = output.outputs[0].finish_reason
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return reason


async def ready(engine: AsyncLLM, prompt: list[int], **changes) -> str:
    """The end of a request that vLLM does not look at, since it is ready for the engine."""
    params = SamplingParams(max_tokens=4)
    request = EngineCoreRequest(
        request_id=f"ready{len(prompt)}",
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        **changes,
    )
    return await ending(engine, request, params, request.request_id)


async def past_the_front_end(engine: AsyncLLM, prompt: list[int], pause: float) -> None:
    """Hand a request to the engine as another front end may; nobody hears the answer."""
    request = EngineCoreRequest(
        request_id=f"past{len(prompt)}",
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=4),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    await engine.engine_core.add_request_async(request)
    await asyncio.sleep(pause)


async def twice(engine: AsyncLLM) -> list:
    """Two requests of one id at once, and one behind them."""
    params = turn(10, max_tokens=40)
    pair = [ending(engine, params.prompt, params.sampling_params, "same") for _ in range(2)]
    ends = await asyncio.gather(*pair)
    return [*ends, await plain_ends(engine, "same", 10)]


async def aborted_by_its_client(engine: AsyncLLM, name: str) -> list:
    """The ends that a client sees that aborts its session, sends more turns, and reads nothing
    meanwhile; and the number of requests that the front end then has."""

    async def inputs() -> AsyncIterator[StreamingInput]:
        yield turn(10, max_tokens=40)
        for _ in range(5):
            await asyncio.sleep(0)
            yield turn(3, max_tokens=2)

    outputs = engine.generate(inputs(), turn(1).sampling_params, name)
    first = await anext(outputs)
    await engine.abort(name)
    for _ in range(20):
        await asyncio.sleep(0.01)
    reasons = [output.outputs[0].finish_reason async for output in outputs]
    left = len(engine.output_processor.request_states)
    return [first.outputs[0].finish_reason, reasons[-1], left]


async def main() -> None:
    adapter = LoRARequest("a", 1, sys.argv[3])
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=sys.argv[1],
            dtype="float32",
            max_model_len=LENGTH,
            max_num_seqs=8,
            pipeline_parallel_size=int(sys.argv[2]),
            enforce_eager=True,
            async_scheduling=True if int(sys.argv[2]) > 1 else None,
            distributed_executor_backend="sipipe.Executor",
            block_size=32,
            num_gpu_blocks_override=6,
            enable_lora=True,
            max_loras=1,
            max_lora_rank=8,
        )
    )

    def first() -> StreamingInput:
        # A turn of its own each time: vLLM's front end appends to the list that it was given.
        return turn(10, max_tokens=3)

    grammar = {"structured_outputs": StructuredOutputsParams(regex="[a-z]+")}
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
        "grammar": await session(engine, "g", first(), turn(5, max_tokens=4, **grammar)),
        "prompt": await session(engine, "h", turn(9, max_tokens=3, prompt_logprobs=1)),
        "texts": {
            amid: await texts(engine, f"t{amid}", amid)
            for amid in ("", "keep", "wait", "reset", "pause")
        },
        # All have it: on CPUs stock vLLM applies an adapter to every request of a batch.
        "adapter": await asyncio.gather(
            *(texts(engine, f"l{number}", lora=adapter) for number in range(3))
        ),
        "silent": await silent(engine, 11),
        "ready": [
            await ready(engine, [5] * LENGTH),
            await ready(engine, [5] * 5000),
            await ready(engine, [5, 10**7]),
            await ready(engine, []),
            await ready(engine, [5] * 7, resumable=True),
            await ready(engine, [5] * 8),
        ],
        "twice": await twice(engine),
        "aborted": [await aborted_by_its_client(engine, f"x{k}") for k in range(3)],
    }
    for prompt in ([5] * LENGTH, [5] * 5000, []):
        await past_the_front_end(engine, prompt, 0.2)
    ends["alive"] = await session(engine, "z", first())
    engine.shutdown()
    print(json.dumps(ends))


if __name__ == "__main__":
    asyncio.run(main())
