"""LangChain's calls of servers, for tests/engine/test_clients.py: what each answers, as JSON.

Run by the Python of scripts/clients.py with the model's name, its folder and the servers' addresses.
"""

import asyncio
import json
import sys

from langchain_core.exceptions import OutputParserException
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import ValidationError

TEXT = "Once upon a time there was a pipeline"
CHAT = [("system", "Be brief."), ("human", "What is a microbatch?")]
SCHEMA = {
    "title": "find_stage",
    "description": "Find a stage",
    "type": "object",
    "properties": {"stage": {"enum": [1, 2]}, "name": {"enum": ["first", "last"]}},
    "required": ["stage", "name"],
    "additionalProperties": False,
}
FUNCTION = {"name": "find_stage", "description": "Find a stage", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
LONG_ENOUGH = 100


def answers(model: str, address: str) -> dict[str, object]:
    """What each kind of call is answered by the server at ``address``, by its name."""
    connection = {
        "model": model,
        "base_url": f"{address}/v1",
        "api_key": "none",
        "temperature": 0.0,
        "max_retries": 0,
        "timeout": 120,
    }
    chat = ChatOpenAI(**connection, max_tokens=12)
    patient = ChatOpenAI(**connection, max_tokens=LONG_ENOUGH)
    text = OpenAI(**connection, max_tokens=12)
    required = patient.bind_tools([TOOL], tool_choice="required")
    named = patient.bind_tools([TOOL], tool_choice="find_stage")
    parsed = chat.bind_tools([TOOL], tool_choice="auto")
    by_schema = patient.with_structured_output(SCHEMA, method="json_schema")
    by_function = patient.with_structured_output(SCHEMA, method="function_calling")
    return {
        "invoke": fields(chat.invoke(CHAT)),
        "ainvoke": fields(asyncio.run(chat.ainvoke(CHAT))),
        "stop": fields(chat.invoke(CHAT, stop=["e"])),
        "log-probabilities": fields(chat.bind(logprobs=True, top_logprobs=2).invoke(CHAT)),
        "stream": "".join(chunk.content for chunk in chat.stream(CHAT)),
        "batch": [fields(message) for message in chat.batch([CHAT, "A stage is", "A rank is"])],
        "tools, required": called(required),
        "tools, named": called(named),
        "tools, by their parser": called(parsed),
        "structured output": called(by_schema),
        "structured output by a function": called(by_function),
        "completion": text.invoke(TEXT),
        "completion, streamed": "".join(text.stream(TEXT)),
        "completions": text.batch([TEXT, "Stages"]),
    }


def called(chat) -> object:
    """What ``chat`` answers, or why LangChain cannot read that: vLLM does not hold the arguments of a
    named tool to its schema, and the tests' model is a random one."""
    try:
        answer = chat.invoke(CHAT)
    except (OutputParserException, ValidationError) as error:
        return str(error)
    return fields(answer) if hasattr(answer, "response_metadata") else answer


def fields(message) -> dict[str, object]:
    """A message without its identifiers and times."""
    metadata = message.response_metadata
    return {
        "content": message.content,
        "tools": [(call["name"], call["args"]) for call in message.tool_calls],
        "reason": metadata.get("finish_reason"),
        "log-probabilities": metadata.get("logprobs"),
        "usage": message.usage_metadata,
    }


if __name__ == "__main__":
    model, _, *addresses = sys.argv[1:]
    print(json.dumps([answers(model, address) for address in addresses]))
