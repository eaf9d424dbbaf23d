"""Run one engine over one workload and print what it said, as JSON: a process per engine.

Used by the engine tests (see ``engines.py``) for both sides of a comparison, stock vLLM and
SiPipe, so that neither leaves anything in the test process.
"""

import json
import os
import signal
import sys
import threading
import time


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
    spec = json.load(sys.stdin)
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    engine = spec["engine"]
    if spec["sipipe"] is not None:
        engine["distributed_executor_backend"] = spec.get("backend", "sipipe.Executor")
        engine["additional_config"] = {"sipipe": spec["sipipe"]}
    llm = LLM(
        model=spec["model"],
        skip_tokenizer_init=spec.get("skip_tokenizer", False),
        disable_log_stats=True,
        **engine,
    )
    results = []
    for batch in spec["batches"]:
        prompts = [{"prompt_token_ids": p} if isinstance(p, list) else p for p in batch["prompts"]]
        params = [sampling_params(p) for p in batch["params"]]
        lora = batch.get("lora")
        print("GENERATING", flush=True)
        outputs = llm.generate(
            prompts,
            params,
            use_tqdm=False,
            lora_request=[LoRARequest(*at) if at else None for at in lora] if lora else None,
        )
        results.append([request(output) for output in outputs])
    print("RESULT " + json.dumps(results), flush=True)


def sampling_params(values):
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    structured = values.pop("structured_outputs", None)
    if bias := values.get("logit_bias"):  # JSON has no integer keys
        values["logit_bias"] = {int(token): value for token, value in bias.items()}
    return SamplingParams(
        **values,
        structured_outputs=StructuredOutputsParams(**structured) if structured else None,
    )


def request(output):
    return {
        "prompt_logprobs": positions(output.prompt_logprobs),
        "outputs": [
            {
                "token_ids": list(sequence.token_ids),
                "text": sequence.text,
                "finish_reason": sequence.finish_reason,
                "logprobs": positions(sequence.logprobs),
            }
            for sequence in output.outputs
        ],
    }


def positions(logprobs):
    """[{token id: [logprob, rank]}] per position."""
    if logprobs is None:
        return None
    return [
        None if at is None else {str(t): [lp.logprob, lp.rank] for t, lp in at.items()}
        for at in logprobs
    ]


if __name__ == "__main__":
    main()
