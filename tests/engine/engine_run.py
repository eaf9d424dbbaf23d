"""One engine in a process of its own, driven over a pipe: a JSON line in, a RESULT line out, into the
file whose descriptor is the first argument.

Used by the engine tests (see ``engines.py``) for both sides of a comparison, stock vLLM and
SiPipe, so that neither leaves anything in the test process. The first line says which engine;
every further line is a list of batches to run, until the pipe ends.
"""

import gc
import json
import os
import signal
import sys
import threading
import time

# Also in the processes that vLLM and SiPipe start, which import this file as the user's main
# module: a third of what importing vLLM takes is the collector's, which finds nothing.
gc.set_threshold(20_000, 20, 20)

if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    # Here and again in the engine's own process: vLLM's sampler has twins of its kernels
    # (sampler_twins.py), or Triton's interpreter.
    from sipipe.engine.setup import compatibility

    compatibility.HAS_TRITON = True
for path in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    if path and path not in sys.path:  # this process was forked, and its children take this over
        sys.path.append(path)

# Triton has to be told before vLLM is imported; on a GPU processes are users' processes.
if not {"TRITON_INTERPRET", "SIPIPE_TESTS_START_ANEW"} & os.environ.keys():
    sys.path.append(os.path.dirname(__file__))
    from forked_children import start_by_fork

    start_by_fork()


def end_with_the_test() -> None:
    """A pytest that was killed leaves no engine behind: this process has a group of its own."""
    test = os.getppid()

    def watch() -> None:
        while os.getppid() == test:
            time.sleep(1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    end_with_the_test()
    spec = json.loads(sys.stdin.readline())
    from vllm import LLM

    engine = spec["engine"]
    if spec["sipipe"] is not None:
        engine["distributed_executor_backend"] = "sipipe.Executor"
        engine["additional_config"] = {"sipipe": spec["sipipe"]}
    engine.setdefault("disable_log_stats", True)
    llm = LLM(model=spec["model"], **engine)
    with open(int(sys.argv[1]), "w", encoding="ascii") as answers:
        for line in sys.stdin:
            print("GENERATING", file=answers, flush=True)
            results = [run(llm, batch) for batch in json.loads(line)]
            print("RESULT " + json.dumps(results), file=answers, flush=True)


def run(llm, batch):
    """The results of one batch: of requests, of embeddings, or values of metrics."""
    from vllm.lora.request import LoRARequest

    if "embed" in batch:
        outputs = llm.embed([prompt(p) for p in batch["embed"]], use_tqdm=False)
        return [output.outputs.embedding for output in outputs]
    if "metrics" in batch:
        metrics = [metric for metric in llm.get_metrics() if batch["metrics"] in metric.name]
        values = {
            metric.name: metric.value
            if hasattr(metric, "value")
            else getattr(metric, "values", None)
            for metric in metrics
        }
        return {name: value for name, value in values.items() if value is not None}
    if "aborts" in batch:
        return run_and_abort(llm.llm_engine, batch)
    adapters = None
    if batch.get("lora"):
        adapters = [
            LoRARequest(adapter[0], adapter[1], adapter[2]) if adapter else None
            for adapter in batch["lora"]
        ]
    outputs = llm.generate(
        [prompt(p) for p in batch["prompts"]],
        [sampling_params(p) for p in batch["params"]],
        use_tqdm=False,
        lora_request=adapters,
    )
    return [request(output) for output in outputs]


def run_and_abort(engine, batch):
    """The results of a batch whose requests are aborted after the engine's step that
    ``batch["aborts"]`` has for each, or never where that is -1. None is the result of a request that
    was aborted before its end; an output that comes of it later fails."""
    finished = {}
    aborted = set()
    step = 0
    for index, (spec, params) in enumerate(zip(batch["prompts"], batch["params"], strict=True)):
        engine.add_request(str(index), prompt(spec), sampling_params(params))
    while engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in engine.step() if output.finished}
        step += 1
        due = {str(index) for index, last in enumerate(batch["aborts"]) if last == step}
        running = due - finished.keys()
        engine.abort_request([*running])
        aborted |= running
    assert not aborted & finished.keys(), aborted
    names = [str(index) for index in range(len(batch["prompts"]))]
    return [None if name in aborted else request(finished[name]) for name in names]


def prompt(spec):
    """vLLM's prompt of ``spec``: a text; token ids; token ids with the number of an image of noise and
    perhaps its size; or the shape and number of embeddings of noise."""
    if isinstance(spec, dict) and "embeddings" in spec:
        import torch

        generator = torch.Generator().manual_seed(spec["seed"])
        return {"prompt_embeds": torch.randn(spec["embeddings"], generator=generator)}
    if isinstance(spec, dict):
        import numpy as np
        from PIL import Image

        size = (*spec.get("size", (28, 28)), 3)
        noise = np.random.default_rng(spec["image"]).integers(0, 255, size, np.uint8)
        image = {"image": Image.fromarray(noise)}
        return {"prompt_token_ids": spec["tokens"], "multi_modal_data": image}
    return {"prompt_token_ids": spec} if isinstance(spec, list) else spec


def sampling_params(values):
    """vLLM's parameters of ``values``, which JSON has brought."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    bias = values.get("logit_bias")
    if bias:  # JSON has no integer keys
        values["logit_bias"] = {int(token): value for token, value in bias.items()}
    structured = values.pop("structured_outputs", None)
    if structured:
        values["structured_outputs"] = StructuredOutputsParams(**structured)
    return SamplingParams(**values)


def request(output):
    """An output of vLLM's, as JSON has it."""
    result = {
        "cached": output.num_cached_tokens,
        "prompt_logprobs": positions(output.prompt_logprobs),
    }
    if output.prompt_token_id_logprobs is not None:
        result["named"] = output.prompt_token_id_logprobs.tolist()
    result["outputs"] = [_sequence(sequence) for sequence in output.outputs]
    return result


def _sequence(sequence):
    """One sequence of an output, as JSON has it."""
    result = {
        "token_ids": list(sequence.token_ids),
        "text": sequence.text,
        "finish_reason": sequence.finish_reason,
        "stop_reason": sequence.stop_reason,
        "logprobs": positions(sequence.logprobs),
    }
    experts = getattr(sequence, "routed_experts", None)
    if experts is not None:
        result["routed_experts"] = experts.tolist()
    return result


def positions(logprobs):
    """[{token id: [logprob, rank]}] by position; of flat log-probabilities, their number by position."""
    if logprobs is None:
        return None
    if hasattr(logprobs, "start_indices"):
        ends = zip(logprobs.start_indices, logprobs.end_indices, strict=True)
        return [end - start for start, end in ends]
    return [_by_token(position) for position in logprobs]


def _by_token(position):
    if position is None:
        return None
    return {str(token): [entry.logprob, entry.rank] for token, entry in position.items()}


if __name__ == "__main__":
    main()
