"""What ``sipipe bench`` does not measure."""

import json

import pytest

vllm = pytest.importorskip("vllm")

from sipipe.errors import ConfigError  # noqa: E402
from sipipe.tools.measure import Job, measure  # noqa: E402


class Started(Exception):
    """The engine would start now."""


def job(devices, settings, **more):
    additional = json.dumps({"sipipe": {"devices": devices}})
    return Job(
        argv=["m", "-pp", "2", "--additional-config", additional],
        settings=settings,
        sampling=["greedy"],
        requests=1,
        prompt_tokens=1,
        tokens=1,
        **more,
    )


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch):
    def start(_):
        raise Started

    monkeypatch.setattr(vllm.EngineArgs, "from_cli_args", start)


@pytest.mark.parametrize("settings", [None, {}], ids=["stock", "sipipe"])
def test_stages_on_one_gpu_are_refused_unless_asked_for(settings):
    """On the first side already, before it has been measured for minutes."""
    with pytest.raises(ConfigError, match=r'"devices" \[0, 0\].*--shared-devices') as error:
        measure(job([0, 0], settings))
    assert "\n" not in str(error.value)
    for fine in (job([0, 1], settings), job(None, settings)):
        with pytest.raises(Started):
            measure(fine)
    with pytest.raises(Started):
        measure(job([0, 0], settings, shared_devices=True))
