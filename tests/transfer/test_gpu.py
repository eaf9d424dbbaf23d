"""GPU tensors, staged through host memory. Not run where this was written: no GPU there."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sipipe.transfer import open_receiver, open_sender

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_gpu_tensors_arrive_on_the_gpu(endpoint, hidden):
    endpoint = dataclasses.replace(endpoint, device="cuda")
    with open_sender(endpoint) as sender, open_receiver(endpoint) as receiver:
        for iteration in range(8):
            receiver.post(iteration, 64)
            sent = {key: tensor.cuda() for key, tensor in hidden(64, iteration).items()}
            for tensor in sent.values():
                for _ in range(50):
                    tensor.mul_(1.0)  # work queued before the hand-over
            sender.send(iteration, 64, sent)
            got = receiver.take(iteration, 60)
            for key, tensor in sent.items():
                assert got[key].is_cuda
                assert torch.equal(got[key], tensor)
            receiver.release(iteration)
