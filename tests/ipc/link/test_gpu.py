"""Every transport with tensors on GPUs, between two processes.

docs/gpu.md says where it ran. What does not need a GPU (headers, handles, order of copies
and events, deaths) runs with a stand-in in all other files of this directory.
"""

from __future__ import annotations

import multiprocessing
import socket
from contextlib import closing
from typing import Any

import pytest
import torch
from tests.ipc.link.conftest import hidden

from sipipe.ipc.link.endpoint import open_receiver, open_sender
from sipipe.ipc.link.schema import TensorSchema
from sipipe.ipc.link.trial import TriedReceiver, TriedSender
from sipipe.messages.link import LinkEndpoint, LinkTrial

BOUND = 120.0
SIZES = [64, 1, 7, 64, 33, 2, 0, 64]


def width_of(iteration: int) -> int:
    return 24 if iteration < len(SIZES) else 4096  # a larger schema, half-way


def later_stage(endpoint: LinkEndpoint, sock: socket.socket, answers: Any) -> None:
    torch.cuda.set_device(torch.cuda.device_count() - 1)
    with closing(open_receiver(endpoint, sock)) as receiver:
        for iteration, num_tokens in enumerate(2 * SIZES):
            taken = receiver.take(iteration, num_tokens, BOUND)
            same = all(
                taken[key].is_cuda and torch.equal(taken[key].cpu(), tensor)
                for key, tensor in hidden(num_tokens, iteration, width_of(iteration)).items()
            )
            receiver.release(iteration)
            answers.send(same)
        answers.recv()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["shm", "cuda_ipc"])
def test_gpu_tensors_arrive_on_the_gpu(kind, pair):
    torch.cuda.set_device(0)
    endpoint = LinkEndpoint(kind=kind, buffer_tokens=64, device="cuda", stall_timeout=BOUND)
    context = multiprocessing.get_context("spawn")
    answers, theirs = context.Pipe()
    stage = context.Process(target=later_stage, args=(endpoint, pair[1], theirs))
    stage.start()
    theirs.close()
    pair[1].close()
    try:
        with closing(open_sender(endpoint, pair[0])) as sender:
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


def tried_stage(trial: LinkTrial, schema: TensorSchema, sock: socket.socket, answers: Any) -> None:
    if trial.endpoint.device == "cuda":
        torch.cuda.set_device(torch.cuda.device_count() - 1)
    end = TriedReceiver(trial, schema, sock, lambda _: None)
    answers.send(end.report())
    answers.recv()
    end.close()


NEEDS_A_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
)


@pytest.mark.parametrize(
    ("kind", "device"),
    [
        pytest.param("shm", "cpu", marks=pytest.mark.ci),
        pytest.param("shm", "cuda", marks=NEEDS_A_GPU),
        pytest.param("cuda_ipc", "cuda", marks=NEEDS_A_GPU),
    ],
)
def test_a_link_passes_its_trial_between_two_processes(kind, device, pair):
    endpoint = LinkEndpoint(kind=kind, buffer_tokens=512, device=device, stall_timeout=BOUND)
    schema = TensorSchema.capture(hidden(64, width=4096), 64)
    trial = LinkTrial(pair=(0, 1), endpoint=endpoint, tensors=schema.encode(), seconds=BOUND)
    context = multiprocessing.get_context("spawn")
    answers, theirs = context.Pipe()
    stage = context.Process(target=tried_stage, args=(trial, schema, pair[1], theirs))
    stage.start()
    theirs.close()
    pair[1].close()
    try:
        end = TriedSender(trial, schema, pair[0], lambda _: None)
        assert not end.report().failure
        assert answers.poll(BOUND)
        assert not answers.recv().failure
        answers.send(None)
        end.close()
        stage.join(BOUND)
        assert stage.exitcode == 0
    finally:
        stage.kill()
        stage.join()
