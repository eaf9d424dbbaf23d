"""The name of a GPU, which is the same in every process; torch's answers are a table's."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from sipipe.gpu_slices import VISIBLE  # noqa: E402
from sipipe.ipc.link.cuda_device import gpu_name  # noqa: E402


@pytest.mark.parametrize("order", ["abcd", "dcba", "bd", "c"])
def test_an_index_is_a_process_own_and_a_name_is_not(monkeypatch, order):
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=order[index])
    )
    assert [gpu_name(index) for index in range(len(order))] == [*order]


def test_a_slice_has_its_own_name_and_not_that_of_its_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="a"))
    names = []
    for visible in ("MIG-x", "MIG-y"):
        monkeypatch.setenv(VISIBLE, visible)
        names.append(gpu_name(0))
    assert names == ["MIG-x", "MIG-y"]
