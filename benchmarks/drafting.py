"""What drafting adds to the way from the last sampler to the next dispatch, by request.

    python -m benchmarks.drafting [--requests 1,8,32,128] [--passes 400]

Sequences that go round, so that each has drafts in every pass, as long as may be: more than a served
text has. *proposed*: behind a draw, in the sampler. *taken*: out of its message, by the
scheduler, for its next turn. *indexed*: accepted tokens, while logits are computed and nobody waits.
``suffix`` where arctic-inference is installed. One thread; medians.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.request import RequestStatus

from benchmarks.harness import report
from sipipe.engine.iteration.work import Work
from sipipe.engine.scheduling.speculation import Speculation
from sipipe.messages.start_records import NGramSettings, SuffixSettings
from sipipe.messages.step import Sampled, Step, decode_sampled, encode, int32_bytes, int32_view
from sipipe.sampler.drafts import NoDrafts, drafter

PROMPT = 400
"""Tokens of a sequence at first."""
ROUND = 60
"""Tokens after which a sequence comes again."""
METHODS: dict[str, NGramSettings | SuffixSettings] = {
    "ngram": NGramSettings(num_speculative_tokens=16, prompt_lookup_min=2, prompt_lookup_max=4),
    "suffix": SuffixSettings(
        num_speculative_tokens=16,
        suffix_decoding_max_tree_depth=24,
        suffix_decoding_max_cached_requests=1000,
        suffix_decoding_max_spec_factor=1.0,
        suffix_decoding_min_token_prob=0.1,
    ),
}


class Requests:
    """What :class:`Speculation` asks of vLLM's scheduler."""

    rows, max_num_scheduled_tokens, num_spec_tokens = 4096, 8192, 16

    def __init__(self, count: int) -> None:
        self.running = [
            SimpleNamespace(
                request_id=str(i),
                spec_token_ids=[],
                max_tokens=1 << 20,
                num_output_tokens=0,
                structured_output_request=None,
                status=RequestStatus.RUNNING,
            )
            for i in range(count)
        ]
        self.requests = {request.request_id: request for request in self.running}
        self.max_num_running_reqs = count
        self.kv_cache_manager = SimpleNamespace(usage=0.5)
        self.tracker = SimpleNamespace(worth=0.1, is_last=lambda number, name: True)
        self.telemetry = SimpleNamespace(live=SimpleNamespace(add=lambda word, by: None))
        self.structured_output_manager = SimpleNamespace(tokenizer=None, reasoner_cls=None)
        self.iterations = SimpleNamespace(drafts=lambda: 0)

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), 0

    def update_draft_token_ids(self, drafts: Any) -> None:
        for name, tokens in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            self.requests[name].spec_token_ids = tokens


def measured(drafts: NoDrafts, count: int, passes: int) -> dict[str, float]:
    """Microseconds a request of each part, and how many had drafts."""
    handles = np.arange(count, dtype=np.int32)
    for handle in handles.tolist():
        prompt = (handle + np.arange(PROMPT, dtype=np.int32)) % ROUND
        drafts.join(handle, prompt, prompt[:0])
    scheduler = Requests(count)
    speculation = Speculation(scheduler, None)
    names = list(scheduler.requests)
    spent: dict[str, list[float]] = {"proposed": [], "taken": [], "indexed": []}
    had = 0
    for number in range(passes):
        drawn = ((handles + PROMPT + number) % ROUND).astype(np.int32)
        began = time.perf_counter_ns()
        found = drafts.propose(handles, handles, drawn, 0.1)
        proposed = time.perf_counter_ns()
        message = encode(Sampled(number, int32_bytes(handles), drawn.tobytes(), drafts=found))
        sent = time.perf_counter_ns()
        part = decode_sampled(message)
        told = {names[row]: int32_view(tokens).tolist() for row, tokens in part.drafts}
        iteration: Any = SimpleNamespace(
            number=number,
            output=SimpleNamespace(scheduled_spec_decode_tokens={}),
            work=Work(step=Step(number), sampled=names),
            tokens=(part,),
            errors={},
            drafts=told,
        )
        speculation.take(iteration)
        speculation.fit()
        taken = time.perf_counter_ns()
        drafts.append(handles.tolist(), drawn.tolist())
        indexed = time.perf_counter_ns()
        had += len(found)
        times = (proposed - began, taken - sent, indexed - taken)
        for part_of, nanoseconds in zip(spent.values(), times, strict=True):
            part_of.append(nanoseconds / count / 1e3)
    row = {name: statistics.median(times[passes // 4 :]) for name, times in spent.items()}
    return row | {"with drafts %": 100 * had / passes / count}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", default="1,8,32,128")
    parser.add_argument("--passes", type=int, default=400)
    args = parser.parse_args()
    rows = []
    for method, settings in METHODS.items():
        if method == "suffix" and importlib.util.find_spec("arctic_inference") is None:
            print("suffix: arctic-inference is not installed here, left out")
            continue
        for count in map(int, args.requests.split(",")):
            found = measured(drafter(settings, 1 << 20), count, args.passes)
            row: dict[str, Any] = {"method": method, "requests": count}
            row |= {f"{name} µs" if "%" not in name else name: v for name, v in found.items()}
            row["in the way µs"] = found["proposed"] + found["taken"]
            rows.append(row)
    report(
        "drafting",
        "Drafting, microseconds a request",
        rows,
        note=f"one thread, prompts of {PROMPT} tokens; in the way: from the last sampler's draw to the "
        "next dispatch; a pass has fixed costs, which few requests share",
    )


if __name__ == "__main__":
    main()
