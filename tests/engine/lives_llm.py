"""An engine in the user's own process, as a script has it; it says READY and waits for its input, a line
each: "generate", or the name of a method that is called of all workers."""

import sys

if __name__ == "__main__":
    from vllm import LLM

    llm = LLM(
        model=sys.argv[1],
        distributed_executor_backend="sipipe.Executor",
        pipeline_parallel_size=2,
        enforce_eager=True,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        disable_log_stats=True,
    )
    print("\nREADY", flush=True)  # in a line of its own, whatever a worker has begun to write
    for method in sys.stdin:
        print("\nCALLS", flush=True)
        if method == "generate\n":
            llm.generate("a prompt", use_tqdm=False)
        else:
            llm.collective_rpc(method.strip())
