"""One engine with `stage_test_worker.StageTestWorker`; a workload through both of its paths.

Reads a specification as JSON on standard input, prints ``RESULT`` and JSON. A process of its
own, since vLLM's CPU engine can start only once in a process.
"""

import json
import os
import random
import sys


def main() -> None:
    spec = json.load(sys.stdin)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [sys.path[0], *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    slots = int(os.environ.get("STAGE_SLOTS", "1"))
    engine = spec["engine"]
    parallel = engine.get("tensor_parallel_size", 1) * engine.get("pipeline_parallel_size", 1)
    if parallel == 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        if slots > 1:  # as many batches in flight as a pipeline has
            from vllm.config import VllmConfig

            VllmConfig.max_concurrent_batches = property(lambda self: slots)
    from vllm import LLM

    llm = LLM(
        model=spec["model"],
        dtype="float32",
        seed=0,
        async_scheduling=False,
        disable_log_stats=True,
        skip_tokenizer_init=True,
        worker_cls="stage_test_worker.StageTestWorker",
        **engine,
    )
    runs = []
    for stock, what in spec["runs"]:
        llm.collective_rpc("use_stock", args=(stock,))
        llm.reset_prefix_cache()
        runs.append(workload(llm, what))
    facts = llm.collective_rpc("facts")  # of every worker
    print("RESULT " + json.dumps({"runs": runs, "facts": facts}), flush=True)


def workload(llm, spec):
    """Add requests as the run goes on, abort some; returns tokens by request number."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    rng = random.Random(spec.get("seed", 0))
    todo = []
    for number in range(spec["requests"]):
        prompt = [rng.randrange(3, 1000) for _ in range(rng.randint(*spec["prompt"]))]
        if spec.get("shared", True) and number % 3 == 0:  # a shared beginning, for the prefix cache
            prompt = list(range(3, 40)) + prompt
        params = SamplingParams(
            temperature=0,
            ignore_eos=True,
            max_tokens=rng.randint(*spec["output"]),
            prompt_logprobs=spec.get("prompt_logprobs"),
            detokenize=False,
        )
        lora = None
        if spec.get("loras"):
            which = number % (len(spec["loras"]) + 1)
            if which:
                lora = LoRARequest(f"adapter{which}", which, spec["loras"][which - 1])
        todo.append((number, prompt, params, lora))
    engine = llm.llm_engine
    tokens, scores, step = {}, {}, 0
    ids = {}
    while todo or engine.has_unfinished_requests():
        if step % spec.get("every", 1) == 0:
            for number, prompt, params, lora in todo[: spec.get("at_once", 4)]:
                ids[str(number)] = engine.add_request(
                    str(number), {"prompt_token_ids": prompt}, params, lora_request=lora
                )
            del todo[: spec.get("at_once", 4)]
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
            if output.prompt_logprobs:
                scores[output.request_id] = [
                    None if at is None else {str(t): lp.logprob for t, lp in at.items()}
                    for at in output.prompt_logprobs
                ]
        for number, at in spec.get("aborts", {}).items():
            if len(tokens.get(number, ())) >= at:
                engine.abort_request([number])
        step += 1
    return {"tokens": tokens, "prompt_logprobs": scores}


if __name__ == "__main__":
    main()
