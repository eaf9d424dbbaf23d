"""Slices of GPUs, by their names in ``CUDA_VISIBLE_DEVICES``."""

from types import SimpleNamespace

import pytest

from sipipe import gpu_slices
from sipipe.gpu_slices import VISIBLE, find_gpus_of_slices, named_slices, slice_for_worker


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, ()),
        ("", ()),
        ("0,1", ()),
        ("GPU-8932f937,MIG-a", ()),
        ("MIG-a", ("MIG-a",)),
        ("MIG-b, MIG-a", ("MIG-b", "MIG-a")),
        ("MIG-a,MIG-a,MIG-b", ("MIG-a", "MIG-b")),
        ("MIG-a,1,MIG-b", ("MIG-a",)),
        ("MIG-GPU-8932f937/1/0,MIG-GPU-8932f937/2/0",) * 2,
    ],
)
def test_names_are_those_that_cuda_would_take_one_by_one(monkeypatch, value, names):
    if isinstance(names, str):
        names = tuple(names.split(","))
    assert named_slices({} if value is None else {VISIBLE: value}) == names
    monkeypatch.delenv(VISIBLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VISIBLE, value)
    assert named_slices() == names


def test_workers_of_whole_gpus_and_of_cpus_have_the_environment_of_their_engine(monkeypatch):
    monkeypatch.setenv(VISIBLE, "1,0")
    assert slice_for_worker(1, (0, 1)) == {}
    monkeypatch.setenv(VISIBLE, "MIG-a,MIG-b")
    assert slice_for_worker(1, None) == {}
    assert slice_for_worker(1, (1, 0)) == {VISIBLE: "MIG-a"}


def test_vllms_platform_is_left_alone_where_no_slice_is_named(monkeypatch):
    class Platform:
        device_control_id_to_physical_device_id = classmethod(lambda _, name: int(name))

    own = Platform.device_control_id_to_physical_device_id
    monkeypatch.setenv(VISIBLE, "0,1")
    find_gpus_of_slices(Platform(), lambda: pytest.fail("NVML"))
    assert Platform.device_control_id_to_physical_device_id == own


def test_other_names_are_still_vllms_and_it_is_done_once(monkeypatch):
    class Platform:
        device_control_id_to_physical_device_id = classmethod(lambda _, name: int(name))

    monkeypatch.setenv(VISIBLE, "MIG-a")
    find_gpus_of_slices(Platform(), SimpleNamespace)
    find_gpus_of_slices(Platform(), lambda: pytest.fail("a second time"))
    assert Platform.device_control_id_to_physical_device_id("3") == 3
    assert gpu_slices.named_slices() == ("MIG-a",)
