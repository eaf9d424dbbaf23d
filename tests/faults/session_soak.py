"""``python -m tests.faults.session_soak``: sessions amid aborts, pauses and resets, and what they get.

One engine with a tiny model in two stages that schedules ahead, whose cache is too small for its
clients. Each client holds a session, or asks for a text as a whole; some leave, abort or say nothing
for a while. Meanwhile the engine is paused in each of vLLM's three modes, and its caches are reset.
Every text that is not aborted has to be token for token that of a request of its own, asked before.
In the end nothing may be held. ``--minutes 10 --keep`` writes session_soak.json and the table in
README.md beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from contextlib import aclosing
from pathlib import Path

ROOT = Path(__file__).parents[2]
LENGTH = 128
SEATS = 8
BLOCKS = 14
"""KV cache blocks of 32 tokens: for three texts of full length."""
CLIENTS = 14
BOUND = 120.0
"""Seconds after which a client that was told nothing has hung."""
WORDS = {
    "whole sessions": "whole sessions",
    "turns exact": "turns of sessions, each token right",
    "requests exact": "requests of one prompt, each token right",
    "told of an abort": "clients that were told of an abort",
    "left": "clients that left amid their text",
    "aborted by name": "requests aborted by their id",
    "pause abort": "pauses that abort",
    "pause wait": "pauses that wait",
    "pause keep": "pauses that keep",
    "resets": "resets of all caches, with what runs",
    "silent": "sessions silent for a second or more between turns",
    "WRONG": "wrong tokens",
    "HUNG": "clients that hung",
    "FAILED": "errors",
}


def scripts(rng: random.Random) -> list[list[tuple[list[int], int]]]:
    """Turns of the texts: prompts, and how many tokens each asks for."""
    return [
        [
            ([rng.randrange(3, 900) for _ in range(rng.randint(1, 16))], rng.randint(1, 12))
            for _ in range(rng.randint(1, 4))
        ]
        for _ in range(12)
    ]


class Soak:
    """One engine and its clients. ``ends`` counts how it went."""

    def __init__(self, engine, seed: int) -> None:
        self.engine = engine
        self.ends: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._scripts = scripts(self._random)
        self._texts: list[list[list[int]]] = []
        """By script: the tokens of each turn."""
        self._live: set[str] = set()
        self._number = 0

    async def run(self, seconds: float) -> None:
        for script in self._scripts:
            self._texts.append(await self._whole(script))
        ending = time.monotonic() + seconds
        going: set[asyncio.Task] = set()
        breaking = asyncio.create_task(self._break(ending))
        while time.monotonic() < ending and not self._is_bad():
            while len(going) < CLIENTS:
                going.add(asyncio.create_task(self._client()))
            done, going = await asyncio.wait(going, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                self.ends[task.result()] += 1
        await breaking
        for task in going:
            self.ends[await task] += 1
        if (
            self.engine.output_processor.request_states
            or not await self.engine.reset_prefix_cache()
        ):
            self.ends["FAILED"] += 1
            print("something is held in the end", flush=True)

    def _is_bad(self) -> bool:
        return any(self.ends[word] for word in ("WRONG", "HUNG", "FAILED"))

    async def _whole(self, script) -> list[list[int]]:
        """What requests of the whole text are answered, turn by turn."""
        said: list[int] = []
        answers = []
        for prompt, count in script:
            said += prompt
            answers.append(await self._ask(said, count, self._name("o")))
            said += answers[-1][:-1]
        return answers

    def _name(self, letter: str) -> str:
        self._number += 1
        return f"{letter}{self._number}"

    async def _ask(self, prompt, count, name) -> list[int] | None:
        """A request's tokens; None: it was aborted."""
        from vllm.inputs import TokensPrompt

        tokens: list[int] = []
        whole = TokensPrompt(prompt_token_ids=list(prompt))
        async for output in self.engine.generate(whole, params(count), name):
            tokens += output.outputs[0].token_ids
            if output.outputs[0].finish_reason == "abort":
                return None
        return tokens

    async def _client(self) -> str:
        """One client; the word that counts how it went."""
        rng = random.Random(self._random.random())
        index = rng.randrange(len(self._scripts))
        name = self._name("s")
        self._live.add(name)
        try:
            if rng.random() < 0.3:
                work = self._plain(index, name)
            else:
                work = self._session(index, name, rng)
            return await asyncio.wait_for(work, BOUND)
        except TimeoutError:
            print(f"{name} has hung", flush=True)
            return "HUNG"
        except Exception as error:
            print(f"{name}: {error!r}", flush=True)
            return "FAILED"
        finally:
            self._live.discard(name)

    async def _plain(self, index: int, name: str) -> str:
        script = self._scripts[index]
        texts = self._texts[index]
        said: list[int] = []
        for (prompt, _), text in zip(script[:-1], texts, strict=False):
            said += [*prompt, *text[:-1]]
        tokens = await self._ask(said + script[-1][0], script[-1][1], name)
        if tokens is None:
            return "told of an abort"
        return "requests exact" if tokens == texts[-1] else self._wrong(name, tokens, texts[-1])

    async def _session(self, index: int, name: str, rng: random.Random) -> str:
        from vllm.engine.protocol import StreamingInput
        from vllm.inputs import TokensPrompt

        answered: asyncio.Queue[None] = asyncio.Queue()
        at_once = rng.random() < 0.2
        leaves = rng.random() < 0.1

        async def turns():
            for prompt, count in self._scripts[index]:
                tokens = TokensPrompt(prompt_token_ids=list(prompt))
                yield StreamingInput(prompt=tokens, sampling_params=params(count))
                if not at_once:
                    await answered.get()
                    if rng.random() < 0.1:
                        self.ends["silent"] += 1
                        await asyncio.sleep(rng.uniform(1, 4))
                    elif rng.random() < 0.5:
                        await asyncio.sleep(rng.uniform(0, 0.2))

        texts = self._texts[index]
        number = 0
        tokens: list[int] = []
        async with aclosing(self.engine.generate(turns(), params(1), name)) as outputs:
            async for output in outputs:
                sequence = output.outputs[0]
                tokens += sequence.token_ids
                if sequence.finish_reason == "abort":
                    return "told of an abort"
                if leaves and rng.random() < 0.3:
                    return "left"
                # Turns that were given at once can come as one output.
                while number < len(texts) and len(tokens) >= len(texts[number]):
                    turn = tokens[: len(texts[number])]
                    if turn != texts[number]:
                        return self._wrong(name, turn, texts[number])
                    del tokens[: len(turn)]
                    self.ends["turns exact"] += 1
                    number += 1
                    await answered.put(None)
        if number < len(texts):
            return self._wrong(name, tokens, texts[number])
        return "whole sessions"

    def _wrong(self, name, tokens, expected) -> str:
        print(f"{name}: {tokens}, not {expected}", flush=True)
        return "WRONG"

    async def _break(self, ending: float) -> None:
        """Pause, reset and abort at random moments."""
        engine = self.engine
        rng = self._random
        while time.monotonic() < ending and not self._is_bad():
            await asyncio.sleep(rng.expovariate(1.5))
            kind = rng.random()
            if kind < 0.4:
                mode = rng.choice(["wait", "wait", "keep", "keep", "abort"])
                await asyncio.wait_for(
                    engine.pause_generation(mode=mode, clear_cache=rng.random() < 0.5), BOUND
                )
                await asyncio.sleep(rng.choice([0, rng.uniform(0, 0.3)]))
                await engine.resume_generation()
                self.ends[f"pause {mode}"] += 1
            elif kind < 0.7:
                assert await engine.reset_prefix_cache(reset_running_requests=True)
                await engine.reset_mm_cache()
                await engine.reset_encoder_cache()
                self.ends["resets"] += 1
            elif self._live:
                await engine.abort(rng.choice(sorted(self._live)))
                self.ends["aborted by name"] += 1


def params(count: int):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0,
        ignore_eos=True,
        max_tokens=count,
        output_kind=RequestOutputKind.DELTA,
    )


def markdown(kept) -> str:
    """The table of README.md, of what session_soak.json holds."""
    ends = kept["ends"]
    lines = [f"{kept['minutes']:g} minutes; {kept['machine']}, {kept['date']}.", ""]
    lines += ["| what | count |", "| --- | --: |"]
    lines += [f"| {words} | {ends.get(word, 0):,} |" for word, words in WORDS.items()]
    return "\n".join(lines)


async def soak(path: Path, options) -> Counter:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(path),
            dtype="float32",
            max_model_len=LENGTH,
            max_num_seqs=SEATS,
            pipeline_parallel_size=options.stages,
            enforce_eager=True,
            async_scheduling=True if options.stages > 1 else None,
            distributed_executor_backend="sipipe.Executor",
            block_size=32,
            num_gpu_blocks_override=BLOCKS,
        )
    )
    run = Soak(engine, options.seed)
    try:
        await run.run(options.minutes * 60)
    finally:
        engine.shutdown()
    return run.ends


def main() -> int:
    """0: no token was wrong, no client hung or failed, and nothing was held in the end."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.session_soak")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="write session_soak.json and the page")
    options = parser.parse_args()
    from tests.engine.engines import model
    from tests.faults.suite import keep, machine

    scratch = Path(tempfile.mkdtemp(prefix="soak"))
    ends = asyncio.run(soak(model(scratch), options))
    shutil.rmtree(scratch, ignore_errors=True)
    kept = {"minutes": options.minutes, "stages": options.stages, "seed": options.seed}
    kept |= {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "ends": dict(ends)}
    print(markdown(kept))
    print("SUMS " + json.dumps(kept["ends"]))
    if options.keep:
        keep("session_soak", kept, markdown(kept))
    return int(any(ends[word] for word in ("WRONG", "HUNG", "FAILED")))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
