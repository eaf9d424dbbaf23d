"""Three hundred clients for five minutes: each asks, streams, gives up or waits, and asks again.

Every answer is compared with that of a quiet server. A client that gets another status than 200, or
waits for longer than :data:`PATIENCE`, is counted.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from random import Random
from typing import Any

import aiohttp
from tests.faults.served import Clients, Row, scratch_directory

NAME = "300 clients for five minutes"
KINDS = {NAME: 300}
CLIENTS = 300
SECONDS = 300.0
PATIENCE = 240.0
PROMPTS = 24


def run(only: str, seed: int, scale: float, each: Any = lambda *_: None) -> list[dict[str, Any]]:
    """The row of the table, if the name is asked for; ``scale``: of the five minutes."""
    if not re.search(only, NAME):
        return []
    from tests.engine.engines import model
    from tests.engine.servers import Server, health

    row = Row(NAME)
    with scratch_directory() as scratch:
        path = model(scratch)
        options = ["--max-model-len", "256", "--dtype", "float32", "--enforce-eager"]
        with Server(path, scratch / "log", *options, temporary=scratch) as server:
            clients = Clients(PROMPTS, seed)
            clients.learn(server.address)
            asyncio.run(_crowd(row, server.address, clients, SECONDS * scale, seed))
            if health(server.address) != 200 or clients.verdict(server.address) != "recovered":
                row.add("unclear", server.log.read_text()[-800:])
    rows = [row.finished()]
    each(NAME, rows[0]["injected"], rows[0]["why"][:5])
    return rows


async def _crowd(row: Row, address: str, clients: Clients, seconds: float, seed: int) -> None:
    timeout = aiohttp.ClientTimeout(total=PATIENCE)
    connector = aiohttp.TCPConnector(limit=0)
    ends = time.monotonic() + seconds
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        await asyncio.gather(
            *(_client(row, session, address, clients, ends, Random(f"{seed} {number}"))
              for number in range(CLIENTS))
        )  # fmt: skip


async def _client(
    row: Row, session: Any, address: str, clients: Clients, ends: float, rng: Random
) -> None:
    while time.monotonic() < ends:
        number = rng.randrange(len(clients.prompts))
        wanted = clients.expected[number]
        length = rng.randint(1, len(wanted))
        gives_up = rng.random() < 0.1
        body = {"model": "tiny", "prompt": clients.prompts[number], "max_tokens": length}
        body |= {"temperature": 0.0, "ignore_eos": True, "stream": gives_up or rng.random() < 0.5}
        body |= {"return_token_ids": True}
        try:
            async with session.post(f"{address}/v1/completions", json=body) as answer:
                if answer.status != 200:
                    row.add("unclear", f"{answer.status}: {(await answer.text())[:200]}")
                    continue
                if gives_up:
                    await answer.content.readline()
                    row.add("recovered")
                    continue
                said = await _tokens(answer, streamed=body["stream"])
        except TimeoutError:
            row.add("hung", f"no answer within {PATIENCE} s")
            continue
        except aiohttp.ClientError as error:
            row.add("unclear", f"{type(error).__name__}: {error}")
            continue
        row.add("recovered" if said == wanted[:length] else "wrong", f"{number}: {said}")
        if rng.random() < 0.3:
            await asyncio.sleep(rng.random())


async def _tokens(answer: Any, *, streamed: bool) -> list[int]:
    if not streamed:
        return list((await answer.json())["choices"][0]["token_ids"])
    found: list[int] = []
    async for line in answer.content:
        data = line.removeprefix(b"data: ").strip()
        if data and data != b"[DONE]":
            for choice in json.loads(data).get("choices", ()):
                found += choice["token_ids"]
    return found
