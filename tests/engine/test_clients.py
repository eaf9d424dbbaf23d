"""Clients get stock's answers from a server of SiPipe: openai's client, LangChain, litellm, lm_eval,
GuideLLM, and plain HTTP.

Each call is made of both servers, and what they answer is compared as a whole but for names and times.
All tokens are greedy, since a seed draws other tokens than stock's (docs/compatibility.md). Those
clients that .venv has not run in an environment of their own (scripts/clients.py), each as a program in
clients/ that asks both servers and prints what they answered.
"""

import http.client
import json
import os
import subprocess
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import openai
import pytest
from tests.engine import servers
from tests.engine.engines import model
from tests.engine.servers import MODEL, Server
from tests.programs import load

pytestmark = [pytest.mark.engine, pytest.mark.ci]

VOLATILE = frozenset(
    {
        "completed_at",
        "created",
        "created_at",
        "id",
        "item_id",
        "owned_by",
        "permission",
        "request_id",
        "root",
        "system_fingerprint",
    }
)
"""Fields that differ from one answer to the next, or name a file."""
PROGRAMS = Path(__file__).with_name("clients")
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false",
    "DO_NOT_TRACK": "1",
    "NO_PROXY": "127.0.0.1",
}
"""Variables of clients that are to ask nobody but the servers."""
TEXT = "Once upon a time there was a pipeline"
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is a microbatch?"},
]
SCHEMA = {
    "type": "object",
    "properties": {"stage": {"type": "integer"}, "name": {"enum": ["first", "last"]}},
    "required": ["stage", "name"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "find_stage", "description": "Find a stage", "parameters": SCHEMA},
}
GREEDY = {"model": MODEL, "temperature": 0.0, "max_tokens": 12}
LONG_ENOUGH = GREEDY | {"max_tokens": 60}
TO_THE_END = GREEDY | {"extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def addresses(models, tmp_path_factory):
    """Addresses of two servers of one model: SiPipe's and stock's."""
    logs = tmp_path_factory.mktemp("clients")
    path = model(models)
    options = ("--enforce-eager", "--max-model-len", "256", "--dtype", "float32")
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with ExitStack() as stack:
        ours = stack.enter_context(Server(path, logs / "sipipe", *options, *tools, forked=True))
        # Of one stage: with two, uncompiled, stock 0.32 ends at its first request on CPUs.
        one_stage = (*options, *tools, "-pp", "1")
        stocks = stack.enter_context(
            Server(path, logs / "stock", *one_stage, module=servers.VLLM, forked=True)
        )
        yield ours.address, stocks.address


def comparable(answer):
    """An answer, of a client or from JSON, without what differs from one answer to the next."""
    if hasattr(answer, "model_dump"):
        answer = answer.model_dump()
    if isinstance(answer, dict):
        return {name: comparable(value) for name, value in answer.items() if name not in VOLATILE}
    if isinstance(answer, list | tuple):
        return [comparable(value) for value in answer]
    return round(answer, 3) if isinstance(answer, float) else answer


def joined(chunks):
    """A streamed answer, however it was cut: each choice's text and reason, and the usage."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    usage = None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text = choice.text if hasattr(choice, "text") else choice.delta.content
            texts[choice.index] = texts.get(choice.index, "") + (text or "")
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    return texts, reasons, comparable(usage)


COMPLETIONS = {
    "text": {"prompt": TEXT},
    "token ids": {"prompt": [5, 6, 7, 8]},
    "several prompts": {"prompt": [TEXT, "Stages"]},
    "echo": {"prompt": TEXT, "echo": True},
    "log-probabilities": {"prompt": TEXT, "logprobs": 3},
    "echo of log-probabilities": {"prompt": TEXT, "echo": True, "logprobs": 1},
    "penalties": {"prompt": TEXT, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "bias": {"prompt": TEXT, "logit_bias": {"17": 100}},
    "a stop string": {"prompt": TEXT, "stop": ["e", "a"]},
    "one token": {"prompt": TEXT, "max_tokens": 1},
    # Its last token ends a character; behind half a one, stock repeats the prompt.
    "up to the context": {"prompt": [*range(3, 252), 40], "max_tokens": 6},
    "token ids returned": {"prompt": TEXT, "extra_body": {"return_token_ids": True}},
    "prompt log-probabilities": {"prompt": TEXT, "extra_body": {"prompt_logprobs": 2}},
    "a regular expression": {
        "prompt": TEXT,
        "extra_body": {"structured_outputs": {"regex": "[ab]{3}"}},
    },
    "a choice": {
        "prompt": TEXT,
        "extra_body": {"structured_outputs": {"choice": ["left", "right"]}},
    },
}
CHATS = {
    "messages": {},
    "log-probabilities": {"logprobs": True, "top_logprobs": 3},
    "a stop string": {"stop": "e"},
    "JSON": LONG_ENOUGH | {"response_format": {"type": "json_object"}},
    "a schema": LONG_ENOUGH
    | {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "stage", "schema": SCHEMA, "strict": True},
        }
    },
    "tools that are not called": {"tools": [TOOL], "tool_choice": "none"},
    "a named tool": LONG_ENOUGH
    | {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "find_stage"}},
    },
    "a required tool": LONG_ENOUGH | {"tools": [TOOL], "tool_choice": "required"},
    "tools by their parser": {"tools": [TOOL], "tool_choice": "auto"},
    "a prefix to continue": {
        "messages": [*CHAT, {"role": "assistant", "content": "It is"}],
        "extra_body": {"continue_final_message": True, "add_generation_prompt": False},
    },
}
WRONG = {
    "an unknown model": {"model": "nobody's"},
    "a temperature below zero": {"temperature": -1.0},
    "no choice": {"n": 0},
    "several greedy choices": {"n": 2},
    "too long a prompt": {"prompt": list(range(3, 400))},
    "too many tokens": {"max_tokens": 10_000},
    "too many log-probabilities": {"logprobs": 1000},
    "a wrong expression": {"extra_body": {"structured_outputs": {"regex": "["}}},
    "an empty prompt": {"prompt": []},
    "a token that is none": {"prompt": [10**6]},
}


@pytest.mark.parametrize("asked", COMPLETIONS.values(), ids=COMPLETIONS)
def test_completions_of_openais_client_equal_stocks(addresses, asked):
    def ask(client):
        return comparable(client.completions.create(**TO_THE_END | asked))

    assert_alike(addresses, ask)


@pytest.mark.parametrize("asked", CHATS.values(), ids=CHATS)
def test_chats_of_openais_client_equal_stocks(addresses, asked):
    def ask(client):
        return comparable(client.chat.completions.create(**GREEDY | {"messages": CHAT} | asked))

    assert_alike(addresses, ask)


@pytest.mark.parametrize("asked", [{}, {"stop": ["e"]}, {"seed": 7}], ids=str)
def test_streams_of_openais_client_equal_stocks(addresses, asked):
    streamed = GREEDY | {"stream": True, "stream_options": {"include_usage": True}} | asked

    def ask(client):
        with client.completions.create(prompt=TEXT, **streamed) as completion:
            text = joined(completion)
        with client.chat.completions.create(messages=CHAT, **streamed) as chat:
            return text, joined(chat)

    assert_alike(addresses, ask)


def test_responses_of_openais_client_equal_stocks(addresses):
    def ask(client):
        answer = client.responses.create(
            model=MODEL, input="What is a stage?", temperature=0.0, max_output_tokens=12
        )
        return answer.output_text, answer.status, comparable(answer.usage)

    assert_alike(addresses, ask)


def test_models_of_openais_client_equal_stocks(addresses):
    assert_alike(addresses, lambda client: comparable(list(client.models.list())))


@pytest.mark.parametrize("asked", WRONG.values(), ids=WRONG)
def test_refusals_of_openais_client_equal_stocks(addresses, asked):
    def ask(client):
        with pytest.raises(openai.APIStatusError) as refusal:
            client.completions.create(**GREEDY | {"prompt": TEXT} | asked)
        return refusal.value.status_code, comparable(refusal.value.body)

    assert_alike(addresses, ask)


def test_what_a_generating_model_has_not_is_refused_as_by_stock(addresses):
    def ask(client):
        with pytest.raises(openai.APIStatusError) as refusal:
            client.embeddings.create(model=MODEL, input=TEXT)
        return refusal.value.status_code

    assert_alike(addresses, ask)


def assert_alike(addresses, ask) -> None:
    """Have openai's client ``ask`` SiPipe's server and stock's, and compare what it returns."""
    answers = []
    for address in addresses:
        with openai.OpenAI(
            base_url=f"{address}/v1",
            api_key="none",
            max_retries=0,
            timeout=120,
            http_client=openai.DefaultHttpxClient(trust_env=False),  # no proxy of the environment
        ) as client:
            answers.append(ask(client))
    ours, stocks = answers
    assert ours == stocks


@pytest.fixture(scope="module")
def clients_python() -> Path:
    """The Python that has the clients that .venv has not."""
    script = load("scripts", "clients.py")
    try:
        return script.make()
    except script.UnavailableError as error:
        pytest.skip(str(error))


def answers_of(program, clients_python, addresses, models, tmp_path) -> list:
    """What each server answered one of :data:`PROGRAMS`."""
    command = [clients_python, PROGRAMS / f"{program}.py", MODEL, model(models), *addresses]
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = {**inherited, **OFFLINE, "HF_HOME": str(tmp_path), "OPENAI_API_KEY": "none"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-8000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(1200)  # with the download
@pytest.mark.parametrize("program", ["langchain_calls", "litellm_calls", "lm_eval_tasks"])
def test_answers_of_other_clients_equal_stocks(
    program, clients_python, addresses, models, tmp_path
):
    ours, stocks = answers_of(program, clients_python, addresses, models, tmp_path)
    assert ours.keys() == stocks.keys()
    for call, answer in ours.items():
        assert comparable(answer) == near(comparable(stocks[call])), call


def near(answer: object) -> object:
    """``answer``, whose numbers equal those that rounding may make of them: lm_eval adds up the
    log-probabilities of tokens."""
    match answer:
        case dict():
            return {name: near(value) for name, value in answer.items()}
        case list():
            return [near(value) for value in answer]
        case float():
            return pytest.approx(answer, rel=1e-5, abs=1e-5)
    return answer


@pytest.mark.timeout(1200)  # with the download
def test_guidellms_requests_end_well(clients_python, addresses, models, tmp_path):
    ours, stocks = answers_of("guidellm_load", clients_python, addresses, models, tmp_path)
    assert ours.keys() == stocks.keys()
    for form, report in ours.items():
        counts = report["requests"]
        assert counts["errored"] == counts["incomplete"] == 0
        # How many it reports is GuideLLM's: on a busy machine it left out two of twelve, of stock's.
        assert counts["successful"] == counts["total"] > 0
        assert set(report["tokens"]) == set(stocks[form]["tokens"])


def text(content: object) -> str:
    return content if isinstance(content, str) else json.dumps(content)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/health", None),
        ("GET", "/ping", None),
        ("GET", "/v1/models", None),
        ("GET", "/v1/models/nobodys", None),
        ("GET", "/nowhere", None),
        ("GET", "/v1/completions", None),
        ("POST", "/tokenize", {"model": MODEL, "prompt": TEXT}),
        ("POST", "/tokenize", {"model": MODEL, "messages": CHAT}),
        ("POST", "/detokenize", {"model": MODEL, "tokens": [5, 6, 7]}),
        ("POST", "/v1/completions", GREEDY | {"prompt": TEXT}),
        ("POST", "/v1/completions", {"prompt": TEXT, "max_tokens": 4, "temperature": 0}),
        ("POST", "/v1/completions", "{"),
        ("POST", "/v1/completions", []),
        ("POST", "/v1/completions", {}),
        ("POST", "/v1/completions", GREEDY | {"prompt": TEXT, "max_tokens": "many"}),
        ("POST", "/v1/completions", GREEDY | {"prompt": TEXT, "unknown": 1}),
        ("POST", "/v1/chat/completions", GREEDY | {"messages": CHAT}),
        ("POST", "/v1/chat/completions", GREEDY | {"messages": [{"role": "user"}]}),
        ("POST", "/v1/chat/completions", GREEDY),
    ],
    ids=str,
)
def test_plain_http_equals_stock(addresses, method, path, body):
    content = None if body is None else text(body)
    headers = {"Content-Type": "application/json"}
    answers = []
    for address in addresses:
        connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=120)
        connection.request(method, path, content, headers)
        response = connection.getresponse()
        payload = response.read().decode()
        connection.close()
        is_json = response.headers.get_content_type() == "application/json"
        answers.append((response.status, comparable(json.loads(payload)) if is_json else payload))
    ours, stocks = answers
    assert ours == stocks
