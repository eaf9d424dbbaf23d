"""The bank of captured graphs; what needs a device is marked ``gpu``."""

import pytest

from sipipe.worker.graph_bank import GraphBank


def test_a_batch_runs_in_the_smallest_size_that_holds_it():
    bank = GraphBank([8, 1, 4, 8], versions=2)
    assert bank.sizes == (1, 4, 8)
    assert [bank.size_for(n) for n in (1, 2, 4, 5, 8, 9)] == [1, 4, 4, 8, 8, None]
    with pytest.raises(KeyError):
        bank.replay(0, 4)
    with pytest.raises(ValueError, match="1 or more"):
        GraphBank([], versions=2)


def test_capturing_without_a_device_says_so():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a device")
    with pytest.raises(RuntimeError, match="needs a CUDA device"):
        GraphBank([1], versions=1).capture(lambda version, size: None)


@pytest.mark.gpu
def test_each_version_reads_its_own_buffers():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8)
    ).cuda()
    sizes = (1, 4, 8)
    inputs = [torch.zeros(max(sizes), 16, device="cuda") for _ in range(2)]
    bank = GraphBank(sizes, versions=2)
    with torch.inference_mode():
        bank.capture(lambda version, size: model(inputs[version][:size]))
        assert len(bank) == 6
        for iteration in range(20):
            version, batch = iteration % 2, 1 + iteration % 8
            data = torch.randn(batch, 16, device="cuda")
            other = inputs[1 - version].clone()
            inputs[version][:batch] = data
            size = bank.size_for(batch)
            result = bank.replay(version, size)[:batch].clone()
            torch.cuda.synchronize()
            torch.testing.assert_close(result, model(data))
            assert torch.equal(inputs[1 - version], other)
