"""One process of a chain of stages, run by test_against_vllm.

Every hand-over is made twice, by vLLM's send_tensor_dict and by a SiPipe link, and compared bit
for bit where it arrives. Arguments: rank, pp, tp, port, a file with the pickled links,
the descriptors of this rank's sockets. Prints
``equal N`` on success.
"""

from __future__ import annotations

import pickle
import socket
import sys
from pathlib import Path

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state

from sipipe.ipc.link.endpoint import open_receiver, open_sender

H = 48
DTYPES = [torch.bfloat16, torch.float32, torch.float16]
# What the model families hand over: most two tensors, some one (GPT-2, OPT, Gemma 3n's single
# stream), Qwen3-VL deepstack features besides, whose rows also follow the batch.
FAMILIES = [
    ["hidden_states", "residual"],
    ["hidden_states"],
    ["hidden_states", "residual", "deepstack_input_embeds_0", "deepstack_input_embeds_1"],
]
SIZES = [7, 1, 333, 512, 2, 129, 64, 511, 31, 1, 256, 97]


def first_stage(iteration: int, num_tokens: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(iteration)
    return {
        key: torch.randn(num_tokens, H, generator=generator).to(DTYPES[iteration // 4 % 3])
        for key in FAMILIES[iteration // 2 % 3]
    }


def main() -> None:
    rank, pp, tp, port = (int(argument) for argument in sys.argv[-5:-1])
    links = pickle.loads(Path(sys.argv[-1]).read_bytes())
    sockets = [socket.socket(fileno=int(descriptor)) for descriptor in sys.argv[1:-5]]
    torch.set_num_threads(1)
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(
            pp * tp, rank, f"tcp://127.0.0.1:{port}", rank, backend="gloo"
        )
        parallel_state.initialize_model_parallel(tp, pp)
    stages, ranks = parallel_state.get_pp_group(), parallel_state.get_tp_group()
    stages.use_cpu_custom_send_recv = False  # the path that every device but the CPU takes
    stage, shard = stages.rank_in_group, ranks.rank_in_group
    gather = ranks if tp > 1 else None
    receiver = sender = None
    if stage > 0:
        receiver = open_receiver(links[stage - 1, shard], sockets[0])
    if stage < pp - 1:
        sender = open_sender(links[stage, shard], sockets[-1])
    compared = 0
    for iteration, num_tokens in enumerate(SIZES):
        if receiver is None:
            tensors = first_stage(iteration, num_tokens)
        else:
            stock = stages.recv_tensor_dict(all_gather_group=gather)
            tensors = receiver.take(iteration, num_tokens, 120)
            assert list(tensors) == list(stock), (list(tensors), list(stock))
            for key, tensor in tensors.items():
                assert tensor.dtype == stock[key].dtype
                assert tensor.shape == stock[key].shape
                assert torch.equal(tensor, stock[key]), (iteration, key)
                compared += 1
        outputs = {key: tensor * 2 + 1 for key, tensor in tensors.items()}
        if receiver is not None:
            receiver.release(iteration)
        if sender is not None:
            sender.send(iteration, num_tokens, outputs)
            stages.send_tensor_dict(outputs, all_gather_group=gather)
    torch.distributed.barrier()
    for end in (sender, receiver):
        if end is not None:
            end.close()
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    print(f"equal {compared}", flush=True)


if __name__ == "__main__":
    main()
