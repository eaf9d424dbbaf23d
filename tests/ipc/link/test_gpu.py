"""Every transport with tensors on GPUs, between two processes.

Never run where this was written: no GPU there. What does not need one (records, handles, order of
copies and events, deaths) runs with stand-ins in all other files of this directory.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch

from sipipe.ipc.link.endpoint import LinkEndpoint, create_link, open_receiver, open_sender

BOUND = 120.0
SIZES = [64, 1, 7, 64, 33, 2, 0, 64]


def needs(count: int) -> Any:
    return pytest.mark.skipif(
        torch.cuda.device_count() < count,
        reason="needs a CUDA device" if count == 1 else "needs two CUDA devices",
    )


def hidden(num_tokens: int, seed: int, width: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        key: torch.randn(num_tokens, width, generator=generator).to(torch.bfloat16)
        for key in ("hidden_states", "residual")
    }


def width_of(iteration: int) -> int:
    return 24 if iteration < len(SIZES) else 4096  # a larger structure, half-way


def later_stage(endpoint: LinkEndpoint, answers: Any) -> None:
    torch.cuda.set_device(torch.cuda.device_count() - 1)
    with open_receiver(endpoint) as receiver:
        for iteration, num_tokens in enumerate(2 * SIZES):
            receiver.post(iteration, num_tokens)
            taken = receiver.take(iteration, BOUND)
            same = all(
                taken[key].is_cuda and torch.equal(taken[key].cpu(), tensor)
                for key, tensor in hidden(num_tokens, iteration, width_of(iteration)).items()
            )
            receiver.release(iteration)
            answers.send(same)
        answers.recv()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("shm", marks=needs(1)),
        pytest.param("socket", marks=needs(1)),
        pytest.param("cuda_ipc", marks=needs(1)),
        pytest.param("nccl", marks=needs(2)),
    ],
)
def test_gpu_tensors_arrive_on_the_gpu(kind):
    torch.cuda.set_device(0)
    endpoint = create_link(kind, max_tokens=64, device="cuda", stall_timeout=BOUND)
    context = multiprocessing.get_context("spawn")
    answers, theirs = context.Pipe()
    stage = context.Process(target=later_stage, args=(endpoint, theirs))
    stage.start()
    theirs.close()
    try:
        with open_sender(endpoint) as sender:
            for iteration, num_tokens in enumerate(2 * SIZES):
                made = hidden(num_tokens, iteration, width_of(iteration))
                sent = {key: tensor.cuda() for key, tensor in made.items()}
                for tensor in sent.values():
                    for _ in range(50):
                        tensor.mul_(1.0)  # work queued before the hand-over
                sender.send(iteration, num_tokens, sent)
                if iteration % 3 == 0:
                    sender.wait_sent(BOUND)
                    for tensor in sent.values():
                        tensor.zero_()  # after the copies, says wait_sent
            for iteration in range(2 * len(SIZES)):
                assert answers.poll(BOUND)
                assert answers.recv(), iteration
            answers.send(None)
        stage.join(BOUND)
        assert stage.exitcode == 0
    finally:
        stage.kill()
        stage.join()
