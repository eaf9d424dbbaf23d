"""litellm's calls of servers, for tests/engine/test_clients.py: what each answers, as JSON.

Run by the Python of scripts/clients.py with the model's name, its folder and the servers' addresses.
"""

import asyncio
import json
import sys

import litellm
import openai

litellm.telemetry = False

TEXT = "Once upon a time there was a pipeline"
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is a microbatch?"},
]
SCHEMA = {
    "type": "object",
    "properties": {"stage": {"enum": [1, 2]}, "name": {"enum": ["first", "last"]}},
    "required": ["stage", "name"],
    "additionalProperties": False,
}
FUNCTION = {"name": "find_stage", "description": "Find a stage", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "stage", "schema": SCHEMA, "strict": True},
}
LONG_ENOUGH = 100


def answers(model: str, address: str) -> dict[str, object]:
    """What each kind of call is answered by the server at ``address``, by its name."""
    connection = {
        "api_base": f"{address}/v1",
        "api_key": "none",
        "temperature": 0.0,
        "max_retries": 0,
        "timeout": 120,
    }
    chat = {**connection, "model": f"openai/{model}", "messages": CHAT, "max_tokens": 12}
    patient = {**chat, "max_tokens": LONG_ENOUGH}
    text = {**connection, "model": f"text-completion-openai/{model}", "max_tokens": 12}
    return {
        "completion": fields(litellm.completion(**chat)),
        "stop": fields(litellm.completion(**chat, stop=["e"])),
        "log-probabilities": fields(litellm.completion(**chat, logprobs=True, top_logprobs=2)),
        "streamed": joined(litellm.completion(**chat, stream=True)),
        "tools": fields(litellm.completion(**patient, tools=[TOOL], tool_choice="required")),
        "schema": fields(litellm.completion(**patient, response_format=FORMAT)),
        "text": fields(litellm.text_completion(**text, prompt=TEXT)),
        "text, streamed": joined(litellm.text_completion(**text, prompt=TEXT, stream=True)),
        "awaited": asyncio.run(awaited(chat, {**text, "prompt": TEXT})),
        "an unknown model": refusal(**{**chat, "model": "openai/nobodys"}),
        "too many tokens": refusal(**{**chat, "max_tokens": 10_000}),
    }


def fields(answer) -> dict[str, object]:
    """An answer without its identifiers and times."""
    (choice,) = answer.choices
    usage = answer.usage
    message = getattr(choice, "message", None)
    calls = (message.tool_calls if message else None) or []
    logprobs = getattr(choice, "logprobs", None)
    return {
        "content": message.content if message else choice.text,
        "tools": [(call.function.name, call.function.arguments) for call in calls],
        "reason": choice.finish_reason,
        "log-probabilities": logprobs.model_dump() if logprobs else None,
        "usage": (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens),
    }


def piece(chunk) -> str:
    """The text of one chunk of a stream."""
    choice = chunk.choices[0]
    return (choice.delta.content if hasattr(choice, "delta") else choice.text) or ""


def joined(chunks) -> str:
    """The text of a stream, however it was cut."""
    return "".join(piece(chunk) for chunk in chunks)


async def awaited(chat, text) -> list[object]:
    """What a chat, its stream and a completion are answered, all in one event loop, as their client is."""
    answer = await litellm.acompletion(**chat)
    chunks = await litellm.acompletion(**chat, stream=True)
    pieces = [piece(chunk) async for chunk in chunks]
    completion = await litellm.atext_completion(**text)
    return [fields(answer), "".join(pieces), fields(completion)]


def refusal(**call) -> tuple[str, int]:
    """The class and the status of the error that a call ends with."""
    try:
        litellm.completion(**call)
    except openai.APIError as error:  # litellm's classes are of openai's
        return type(error).__name__, error.status_code
    raise AssertionError(f"not refused: {call}")


if __name__ == "__main__":
    model, _, *addresses = sys.argv[1:]
    print(json.dumps([answers(model, address) for address in addresses]))
