"""Clients of one real engine who give values of wrong types, and whoever asks beside them and behind them.

Usage: odd_clients.py MODEL STAGES async|sync. The last line of stdout is JSON: how each ended.
"""

import asyncio
import json
import sys

import numpy as np
from vllm import LLM, AsyncEngineArgs, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

UNREADABLE = {
    "float": {"max_tokens": 5.0},
    "int": {"ignore_eos": 1},
    "bool": {"seed": True},
    "key": {"extra_args": {1: 2}},
}
"""What the front end sends, and the engine does not take."""
UNSENT = {"numpy": {"temperature": np.float32(0.5)}, "object": {"extra_args": {"a": object()}}}
"""What the front end cannot send."""
HUGE = {
    "most": {"max_tokens": 2**31 - 1},
    "more": {"max_tokens": 2**31},
    "least": {"min_tokens": 2**63, "max_tokens": 2**63},
}
"""What a stage's tables of 32 bits have no room for: served up to the longest request."""
PLAIN = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
TWO = {"temperature": 1.0, "n": 2, "seed": 5}
ENGINE = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 8,
    "enforce_eager": True,
    "enable_lora": True,
    "distributed_executor_backend": "sipipe.Executor",
}


def prompt() -> TokensPrompt:
    return TokensPrompt(prompt_token_ids=[5, 6, 7])


async def ends(engine: AsyncLLM, name: str, parameters: dict, **more) -> list:
    """How one request ends: its tokens, or its error and the message."""
    params = SamplingParams(**PLAIN | parameters)
    tokens = []
    try:
        async for output in engine.generate(prompt(), params, name, **more):
            tokens = output.outputs[0].token_ids
    except Exception as error:
        return [type(error).__name__, str(error)]
    return list(tokens)


async def call(engine: AsyncLLM, method: str) -> str:
    """The message of a call that fails."""
    try:
        await engine.collective_rpc(method)
    except Exception as error:
        return str(error)
    return ""


async def ask(path: str, stages: int) -> dict:
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(model=path, pipeline_parallel_size=stages, **ENGINE)
    )
    said: dict = {"alone": await ends(engine, "alone", {})}
    odd = UNREADABLE | UNSENT
    answers = await asyncio.gather(
        *(ends(engine, name, values) for name, values in odd.items()),
        *(ends(engine, f"n{name}", TWO | values) for name, values in odd.items()),
        ends(engine, "priority", {}, priority="first"),
        ends(engine, 7, {}),
        ends(engine, "adapter", {}, lora_request=LoRARequest("a", 1, "/nowhere")),
        call(engine, "get_kv_cache_spec"),
        *(ends(engine, f"beside{number}", {}) for number in range(3)),
    )
    said["one"] = dict(zip(odd, answers, strict=False))
    said["two"] = dict(zip(odd, answers[len(odd) :], strict=False))
    said["priority"], said["number"], said["adapter"], said["call"] = answers[2 * len(odd) : -3]
    said["beside"] = answers[-3:]
    said["behind"] = await ends(engine, "behind", {})
    said["huge"] = {name: await ends(engine, name, values) for name, values in HUGE.items()}
    adapter = LoRARequest("a", 2**31, "/nowhere")
    said["large id"] = await ends(engine, "large id", {}, lora_request=adapter)
    said["left"] = len(engine.output_processor.request_states)
    engine.shutdown()
    return said


def offline(path: str, stages: int) -> dict:
    llm = LLM(path, pipeline_parallel_size=stages, **ENGINE)

    def said_to(parameters: dict) -> list:
        params = SamplingParams(**PLAIN | parameters)
        try:
            (output,) = llm.generate(prompt(), params, use_tqdm=False)
        except Exception as error:
            return [type(error).__name__, str(error)]
        if output.outputs[0].finish_reason == "error":
            return ["error", output.outputs[0].stop_reason]
        return list(output.outputs[0].token_ids)

    said: dict = {"alone": said_to({})}
    said["one"] = {name: said_to(values) for name, values in (UNREADABLE | UNSENT).items()}
    said["two"] = {name: said_to(TWO | values) for name, values in UNSENT.items()}
    said["huge"] = {name: said_to(values) for name, values in HUGE.items()}
    said["behind"] = said_to({})
    return said


if __name__ == "__main__":
    by = {"async": lambda *args: asyncio.run(ask(*args)), "sync": offline}[sys.argv[3]]
    print(json.dumps(by(sys.argv[1], int(sys.argv[2]))))
