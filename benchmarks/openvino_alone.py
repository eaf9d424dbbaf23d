"""OpenVINO GenAI on loads of its own, for :mod:`benchmarks.peers`; run by the Python that has it.

``python openvino_alone.py FILE.gguf LOADS``: LOADS is a JSON list of objects with ``prompt`` (fewest
and most tokens), ``tokens`` (fewest and most new ones), ``requests``, and perhaps ``temperature`` and
``top_p``. Prints a JSON list of tokens/s. Imports nothing of this project, which that Python does not have.
"""

import json
import random
import sys
import time
from typing import Any

WORDS = 40_000
"""Token ids below which prompts are drawn: every model's vocabulary has as many."""


def main() -> None:
    # Only the peers' environment has these two.
    import numpy
    import openvino  # type: ignore[import-not-found]
    import openvino_genai  # type: ignore[import-not-found]

    file, loads = sys.argv[1], json.loads(sys.argv[2])
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs = max(load["requests"] for load in loads)
    scheduler.cache_size = 2  # GiB
    scheduler.enable_prefix_caching = False
    pipeline = openvino_genai.ContinuousBatchingPipeline(file, scheduler, "CPU")
    draw = random.Random(0)

    def measured(load: dict[str, Any], requests: int) -> float:
        fewest, most = load["prompt"]
        lengths = [draw.randint(fewest, most) for _ in range(requests)]
        prompts = [
            openvino.Tensor(numpy.array([[draw.randrange(3, WORDS) for _ in range(length)]]))
            for length in lengths
        ]
        wanted = [draw.randint(*load["tokens"]) for _ in range(requests)]
        configs = []
        for tokens in wanted:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens = tokens
            config.ignore_eos = True
            if load.get("temperature"):
                config.do_sample = True
                config.temperature = load["temperature"]
                config.top_p = load.get("top_p", 1.0)
            configs.append(config)
        began = time.perf_counter()
        results = pipeline.generate(prompts, configs)
        seconds = time.perf_counter() - began
        made = sum(len(result.m_generation_ids[0]) for result in results)
        if made != sum(wanted):
            sys.exit(f"OpenVINO made {made} tokens in place of {sum(wanted)}")
        return float(made / seconds)

    measured(loads[0], 2)
    print(json.dumps([measured(load, load["requests"]) for load in loads]))


if __name__ == "__main__":
    main()
