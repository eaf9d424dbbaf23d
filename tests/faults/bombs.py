"""Requests that ask for too much: of every number, list, text and nesting that the API takes.

One ``sipipe serve`` with a tiny model in two stages. Each request of
:data:`BOMBS` is sent while other clients are served. Their tokens are those of a quiet server, the
server lives, and the status is stock vLLM's (bombs.json) or a better one: no 5xx where stock has
another, and none that stock has not.
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.faults.served import Clients, Row, scratch_directory

SECONDS = 120.0
"""Until a bomb is answered; a whole machine's other work included."""
GOOD = 2
"""Clients beside each."""
KEPT = Path(__file__).with_name("bombs.json")
"""Stock vLLM's status of each: its number, 0 (no answer), or "ended" (its server did). Those that it was
not asked may have no 5xx here."""
TEXT = {"prompt": "a b c", "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"


def _deep(depth, around='{"a":%s}'):
    """JSON nested this deep, as text."""
    before, after = around.split("%s")
    return before * depth + "1" + after * depth


def _schema(properties, **more):
    named = {f"p{i}": {"type": "string"} for i in range(properties)}
    return {"type": "object", "properties": named, "required": [*named]} | more


def _nested_schema(depth):
    inner = {"type": "string"}
    for _ in range(depth):
        inner = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
    return inner


def _tool(i, parameters):
    return {"type": "function", "function": {"name": f"f{i}", "parameters": parameters}}


HUGE = (10**9, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**30, -1, -(2**63), 1.5)
"""Where whole numbers end."""
REALS = ("NaN", "Infinity", "-Infinity", "1e308", "1e-300", "1e-45", "-1e308", "-0.0")
"""As JSON's text; Python's reader takes them all."""


def _numbers():
    names = ("n", "logprobs", "prompt_logprobs", "max_tokens", "min_tokens", "top_k", "seed")
    names += ("priority", "truncate_prompt_tokens", "thinking_token_budget")
    for name in names:
        for value in HUGE:
            yield f"{name} {value}", COMPLETIONS, TEXT | {name: value}
    for value in HUGE:
        yield f"best_of {value}", COMPLETIONS, TEXT | {"best_of": value}
        yield f"top_logprobs {value}", CHATS, CHAT | {"logprobs": True, "top_logprobs": value}
        yield f"stop token {value}", COMPLETIONS, TEXT | {"stop_token_ids": [value]}
        yield f"allowed token {value}", COMPLETIONS, TEXT | {"allowed_token_ids": [value]}
        yield f"biased token {value}", COMPLETIONS, TEXT | {"logit_bias": {str(value): 1}}
        yield f"prompt token {value}", COMPLETIONS, TEXT | {"prompt": [value]}
        yield f"beams {value}", COMPLETIONS, TEXT | {"use_beam_search": True, "n": value}
        yield f"detokenized token {value}", "/detokenize", {"tokens": [value]}
        asked = {"prompt": "a", "max_tokens": 2, "stream_options": {"include_usage": value}}
        yield f"usage {value}", COMPLETIONS, asked | {"stream": True}


def _reals():
    names = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty")
    names += ("frequency_penalty", "length_penalty")
    for name in names:
        for value in REALS:
            body = json.dumps(TEXT)[:-1] + f', "{name}": {value}}}'
            yield f"{name} {value}", COMPLETIONS, body
    for value in REALS:
        yield (
            f"bias {value}",
            COMPLETIONS,
            json.dumps(TEXT)[:-1] + f', "logit_bias": {{"5": {value}}}}}',
        )


def _lists():
    ids = [i % 900 + 3 for i in range(100_000)]
    yield "10^5 stops", COMPLETIONS, TEXT | {"stop": [f"z{i}" for i in range(100_000)]}
    yield "10^5 stop tokens", COMPLETIONS, TEXT | {"stop_token_ids": ids}
    yield "10^5 biases", COMPLETIONS, TEXT | {"logit_bias": {str(i): 1 for i in range(100_000)}}
    yield "900 biases", COMPLETIONS, TEXT | {"logit_bias": {str(i): -100 for i in range(900)}}
    yield "10^4 bad words", COMPLETIONS, TEXT | {"bad_words": [f"w{i}" for i in range(10_000)]}
    yield "a bad word of 10^5", COMPLETIONS, TEXT | {"bad_words": ["w" * 100_000]}
    yield "an empty bad word", COMPLETIONS, TEXT | {"bad_words": [""]}
    yield "10^5 allowed tokens", COMPLETIONS, TEXT | {"allowed_token_ids": ids}
    yield "no allowed token", COMPLETIONS, TEXT | {"allowed_token_ids": []}
    yield "2,000 prompts", COMPLETIONS, TEXT | {"prompt": [[5, 6]] * 2000, "max_tokens": 1}
    yield "10^5 prompt tokens", COMPLETIONS, TEXT | {"prompt": ids}
    yield "no prompt token", COMPLETIONS, TEXT | {"prompt": []}
    yield "an empty prompt", COMPLETIONS, TEXT | {"prompt": [[]]}
    yield "a prompt of 10^6", COMPLETIONS, TEXT | {"prompt": "a " * 500_000}
    yield "a stop of 10^6", COMPLETIONS, TEXT | {"stop": "z" * 1_000_000}
    yield "an empty stop", COMPLETIONS, TEXT | {"stop": [""]}
    yield "all scores of a prompt", COMPLETIONS, TEXT | {"prompt": ids[:200], "prompt_logprobs": 20}
    yield "echoed scores", COMPLETIONS, TEXT | {"prompt": ids[:200], "echo": True, "logprobs": 20}
    yield "200 answers", COMPLETIONS, TEXT | {"n": 200, "temperature": 1.0}
    yield "10^4 messages", CHATS, CHAT | {"messages": CHAT["messages"] * 10_000}
    yield "no message", CHATS, CHAT | {"messages": []}
    tools = [_tool(i, _schema(5)) for i in range(3000)]
    yield "3,000 tools", CHATS, CHAT | {"tools": tools, "tool_choice": "required"}
    yield "300 tools", CHATS, CHAT | {"tools": tools[:300], "tool_choice": "required"}
    yield "a user's name of 10^6", COMPLETIONS, TEXT | {"user": "u" * 1_000_000}
    yield "a model's name of 10^6", COMPLETIONS, TEXT | {"model": "m" * 1_000_000}
    yield "a salt of 10^6", COMPLETIONS, TEXT | {"cache_salt": "s" * 1_000_000}
    yield "a request's name of 10^5", COMPLETIONS, TEXT | {"request_id": "r" * 100_000}
    yield (
        "10^4 extra arguments",
        COMPLETIONS,
        TEXT | {"vllm_xargs": {f"x{i}": i for i in range(10_000)}},
    )
    yield "extra transfer", COMPLETIONS, TEXT | {"kv_transfer_params": {"do_remote_prefill": True}}
    yield "10^4 unknown keys", COMPLETIONS, TEXT | {f"k{i}": i for i in range(10_000)}
    yield "embeds of nothing", COMPLETIONS, {"prompt_embeds": "AAAA", "max_tokens": 2}
    yield "embeds of 10^6", COMPLETIONS, {"prompt_embeds": "A" * 1_000_000, "max_tokens": 2}


def _grammars():
    def structured(**asked):
        return TEXT | {"structured_outputs": asked, "max_tokens": 4}

    yield "a schema of 5,000 names", COMPLETIONS, structured(json=_schema(5000))
    yield "a schema 200 deep", COMPLETIONS, structured(json=_nested_schema(200))
    many = {"type": "array", "items": {"type": "string"}, "minItems": 10**9}
    yield "a list of 10^9", COMPLETIONS, structured(json=many)
    yield "a text of 10^9", COMPLETIONS, structured(json={"type": "string", "minLength": 10**9})
    yield "a schema in a circle", COMPLETIONS, structured(json={"$ref": "#"})
    yield "a schema of elsewhere", COMPLETIONS, structured(json={"$ref": "http://127.0.0.1:1/x"})
    yield "a number, no schema", COMPLETIONS, structured(json="5")
    yield "a text, no schema", COMPLETIONS, structured(json="{")
    yield "10^4 choices", COMPLETIONS, structured(choice=[f"c{i}" for i in range(10_000)])
    yield "a choice of 10^5", COMPLETIONS, structured(choice=["c" * 100_000])
    yield "no choice", COMPLETIONS, structured(choice=[])
    yield "an empty choice", COMPLETIONS, structured(choice=[""])
    yield "choices within characters", COMPLETIONS, structured(choice=["北京市", "上海市"])
    yield "a pattern 10^9 times", COMPLETIONS, structured(regex="(a{1,1000}){1,1000000}")
    yield "a pattern 1,000 deep", COMPLETIONS, structured(regex="(" * 1000 + "a" + ")" * 1000)
    yield "a pattern that looks back", COMPLETIONS, structured(regex=r"(a)\1(?=b)")
    yield "no pattern", COMPLETIONS, structured(regex="")
    yield "a pattern of nothing", COMPLETIONS, structured(regex="[^\\s\\S]")
    yield "a grammar in a circle", COMPLETIONS, structured(grammar="root ::= root")
    yield "no grammar", COMPLETIONS, structured(grammar="")
    yield "a grammar of 10^5", COMPLETIONS, structured(grammar="root ::= " + "a " * 50_000)
    yield "a tag of nothing", COMPLETIONS, structured(structural_tag="{}")
    yield "two grammars", COMPLETIONS, structured(regex="a", choice=["b"])
    yield "a name of NUL", COMPLETIONS, structured(choice=["a\0b", "\0"])
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": _schema(3000)}}
    yield "a form of 3,000 names", CHATS, CHAT | {"response_format": form}
    yield "a form of nothing", CHATS, CHAT | {"response_format": {"type": "json_schema"}}


def _texts():
    odd = {
        "NUL": "a\0b\0",
        "half a pair": "\ud800",
        "the other half": "\udfff a",
        "not a character": "\uffff\ufffe",
        "right to left": "\u202e\u2066 a",
        "marks": "e" + "\u0301" * 20_000,
        "no space": "a" * 50_000,
        "spaces": " " * 50_000,
        "of the tokenizer": "<s></s><unk><|endoftext|><|im_start|>" * 100,
    }
    for name, text in odd.items():
        yield f"prompt: {name}", COMPLETIONS, TEXT | {"prompt": text}
        yield f"stop: {name}", COMPLETIONS, TEXT | {"stop": [text]}
        yield f"bad word: {name}", COMPLETIONS, TEXT | {"bad_words": [text]}
        yield f"choice: {name}", COMPLETIONS, TEXT | {"structured_outputs": {"choice": [text]}}
        yield f"message: {name}", CHATS, CHAT | {"messages": [{"role": "user", "content": text}]}
        yield f"role: {name}", CHATS, CHAT | {"messages": [{"role": text, "content": "a"}]}
        yield f"request's name: {name}", COMPLETIONS, TEXT | {"request_id": text}
        yield f"salt: {name}", COMPLETIONS, TEXT | {"cache_salt": text}
        yield f"tokenize: {name}", "/tokenize", {"prompt": text}


def _nested():
    head = json.dumps(TEXT)[:-1]
    for depth in (100, 900, 5000, 100_000):
        for around in ('{"a":%s}', "[%s]"):
            deep = _deep(depth, around)
            kind = "objects" if "a" in around else "lists"
            for key in ("prompt", "vllm_xargs", "kv_transfer_params", "logit_bias", "unknown"):
                yield f"{key}: {depth} {kind}", COMPLETIONS, f'{head}, "{key}": {deep}}}'
            asked = f'{head}, "structured_outputs": {{"json": {deep}}}}}'
            yield f"schema: {depth} {kind}", COMPLETIONS, asked
    for name, body in {
        "nothing": "",
        "half": head,
        "a list": "[]",
        "null": "null",
        "a number": "1" * 10_000,
        "bytes": b"\xff\xfe\x00",
        "twice": f'{head}, "n": 1, "n": 1000000000}}',
        "UTF-16": json.dumps(TEXT).encode("utf-16"),
    }.items():
        yield f"body: {name}", COMPLETIONS, body


BOMBS = {
    "a request has a number out of all bounds": _numbers,
    "a request has a real number that is none": _reals,
    "a request has a list or text without end": _lists,
    "a request has a grammar without end": _grammars,
    "a request has text that is none": _texts,
    "a request is nested without end, or no request": _nested,
}
KINDS = BOMBS


def send(address, path, body) -> int:
    """The status of the answer, which is read to its end; 0: none came within the bound."""
    if isinstance(body, dict):
        body = json.dumps({"model": "tiny"} | body)
    elif isinstance(body, str) and body.startswith("{"):
        body = '{"model": "tiny", ' + body[1:]
    data = body if isinstance(body, bytes) else body.encode()
    request = urllib.request.Request(address + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            error.read()
            return int(error.code)
    except OSError:
        return 0


def worse(status, stock) -> bool:
    """Whether a status is worse than stock vLLM's."""
    if status == 0 or status >= 500:
        return stock not in (status, "ended")
    return False


def run(only, seed, scale, each=lambda *_: None, *, stock=False):
    """A row of the table for each kind of such a name; ``stock``: write bombs.json anew, with the
    status of stock vLLM's server for each, without clients beside."""
    kinds = {name: made for name, made in BOMBS.items() if re.search(only, name)}
    if not kinds:
        return []
    from tests.engine import servers
    from tests.engine.engines import model
    from tests.engine.servers import health

    known = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    clients, rows = Clients(GOOD, seed), []
    with scratch_directory() as scratch:
        path = model(scratch)
        options = ["--max-model-len", "512", "--dtype", "float32", "--enforce-eager"]
        if stock:
            # One stage answers as two do, and stock's second stage would need a warm-up pass.
            options += ["-pp", "1"]
        start = servers.stock if stock else servers.Server
        server = start(path, scratch / "log", *options, temporary=scratch)
        try:
            clients.learn(server.address)
            for name, bombs in kinds.items():
                row = Row(name)
                for label, where, body in list(bombs())[:: max(1, round(1 / scale))]:
                    with ThreadPoolExecutor(1) as sender:
                        sent = sender.submit(send, server.address, where, body)
                        verdict = "recovered" if stock else clients.verdict(server.address)
                    status = sent.result()
                    lives = health(server.address) == 200
                    if stock:
                        known[label] = status if lives else "ended"
                        KEPT.write_text(json.dumps(known, indent=0, sort_keys=True) + "\n")
                    elif not lives:
                        verdict = "unclear"
                    elif verdict == "recovered" and worse(status, known.get(label, 400)):
                        verdict = "unclear" if status else "hung"
                    row.add(verdict, f"{label}: {status}, {verdict}, {lives=}")
                    if not lives:
                        server.close()
                        server = start(path, scratch / "log", *options, temporary=scratch)
                rows.append(row.finished())
                each(name, rows[-1]["injected"], row.counts)
        finally:
            server.close()
    return rows
