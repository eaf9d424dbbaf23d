"""One engine in a process of its own, driven over a pipe: a JSON line in, a RESULT line out.

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
    llm = LLM(model=spec["model"], **{"disable_log_stats": True, **engine})
    for line in sys.stdin:
        print("GENERATING", flush=True)
        print("RESULT " + json.dumps([run(llm, batch) for batch in json.loads(line)]), flush=True)


def run(llm, batch):
    from vllm.lora.request import LoRARequest

    if "embed" in batch:
        said = llm.embed([prompt(p) for p in batch["embed"]], use_tqdm=False)
        return [output.outputs.embedding for output in said]
    if "metrics" in batch:  # those with this in their names
        found = [metric for metric in llm.get_metrics() if batch["metrics"] in metric.name]
        return {metric.name: metric.value for metric in found if hasattr(metric, "value")}
    if "aborts" in batch:
        return run_and_abort(llm.llm_engine, batch)
    lora = batch.get("lora")
    outputs = llm.generate(
        [prompt(p) for p in batch["prompts"]],
        [sampling_params(p) for p in batch["params"]],
        use_tqdm=False,
        lora_request=[LoRARequest(*at) if at else None for at in lora] if lora else None,
    )
    return [request(output) for output in outputs]


def run_and_abort(engine, batch):
    """``batch["aborts"]``: the engine's step after which each request is aborted, or -1. None
    stands for a request that was, before its end; nothing is heard of it any more."""
    done, gone, step = {}, set(), 0
    for i, (said, params) in enumerate(zip(batch["prompts"], batch["params"], strict=True)):
        engine.add_request(str(i), prompt(said), sampling_params(params))
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
        step += 1
        now = {str(i) for i, at in enumerate(batch["aborts"]) if at == step} - done.keys()
        engine.abort_request([*now])
        gone |= now
    assert not gone & done.keys(), gone
    every = map(str, range(len(batch["prompts"])))
    return [None if name in gone else request(done[name]) for name in every]


def prompt(said):
    """A text, token ids, token ids and the number of an image of noise, perhaps with its size, or
    the shape and number of embeddings of noise."""
    if isinstance(said, dict) and "embeddings" in said:
        import torch

        noise = torch.randn(
            said["embeddings"], generator=torch.Generator().manual_seed(said["seed"])
        )
        return {"prompt_embeds": noise}
    if isinstance(said, dict):
        import numpy as np
        from PIL import Image

        size = (*said.get("size", (28, 28)), 3)
        noise = np.random.default_rng(said["image"]).integers(0, 255, size, np.uint8)
        seen = {"image": Image.fromarray(noise)}
        return {"prompt_token_ids": said["tokens"], "multi_modal_data": seen}
    return {"prompt_token_ids": said} if isinstance(said, list) else said


def sampling_params(values):
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    structured = values.pop("structured_outputs", None)
    if bias := values.get("logit_bias"):  # JSON has no integer keys
        values["logit_bias"] = {int(token): value for token, value in bias.items()}
    return SamplingParams(
        **values, structured_outputs=StructuredOutputsParams(**structured) if structured else None
    )


def request(output):
    named = output.prompt_token_id_logprobs
    return {
        "cached": output.num_cached_tokens,
        "prompt_logprobs": positions(output.prompt_logprobs),
        **({} if named is None else {"named": named.tolist()}),
        "outputs": [
            {
                "token_ids": list(sequence.token_ids),
                "text": sequence.text,
                "finish_reason": sequence.finish_reason,
                "stop_reason": sequence.stop_reason,
                "logprobs": positions(sequence.logprobs),
                **_experts(sequence),
            }
            for sequence in output.outputs
        ],
    }


def _experts(sequence):
    found = getattr(sequence, "routed_experts", None)
    return {} if found is None else {"routed_experts": found.tolist()}


def positions(logprobs):
    """[{token id: [logprob, rank]}] per position; of flat ones, how many there are."""
    if logprobs is None:
        return None
    if hasattr(logprobs, "start_indices"):
        ends = zip(logprobs.start_indices, logprobs.end_indices, strict=True)
        return [end - start for start, end in ends]
    return [
        None if at is None else {str(t): [lp.logprob, lp.rank] for t, lp in at.items()}
        for at in logprobs
    ]


if __name__ == "__main__":
    main()
