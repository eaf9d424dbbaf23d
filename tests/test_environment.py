"""vLLM's environment variables are checked by vLLM's own table, without an import of vLLM."""

import subprocess
import sys

import pytest

from sipipe.environment import check_environment
from sipipe.errors import ConfigError

pytest.importorskip("vllm", reason="vLLM is not installed: see make setup")

PROGRAM = """
import sys
from sipipe.environment import check_environment
from sipipe.errors import ConfigError
try:
    check_environment()
except ConfigError as error:
    print(error)
assert "vllm" not in sys.modules, "else its import would have failed first"
"""


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("VLLM_LOG_BATCHSIZE_INTERVAL", "often", "could not convert string to float: 'often'"),
        ("VLLM_RINGBUFFER_WARNING_INTERVAL", "", "invalid literal for int() with base 10: ''"),
        ("VLLM_MAX_STOP_STRINGS", "4.5", "invalid literal for int() with base 10: '4.5'"),
        ("VLLM_CONFIGURE_LOGGING", "x", "invalid literal for int() with base 10: 'x'"),
        ("VLLM_LOGGING_LEVEL", "loud", "is no level: DEBUG, INFO, WARNING, ERROR"),
        ("VLLM_LOGGING_CONFIG_PATH", "/nonexistent", "cannot be read"),
        ("VLLM_LOGGING_CONFIG_PATH", __file__, "is no JSON object"),
        ("VLLM_LOGGING_STREAM", "ext://sys.nothing", "is no stream"),
        ("VLLM_LOGGING_STREAM", "stdout", "is no stream"),
        ("VLLM_LOGGING_PREFIX", "100% ", "is no format of logging"),
        ("VLLM_LOGGING_PREFIX", "%(host)s ", "is no format of logging"),
        ("VLLM_PORT", "65536", "must be from 0 to 65535"),
        ("VLLM_PORT", "-1", "must be from 0 to 65535"),
        ("VLLM_ENGINE_READY_TIMEOUT_S", "0", "must be from 1 to"),
        ("VLLM_MEDIA_LOADING_THREAD_COUNT", "0", "must be from 1 to"),
        ("VLLM_RPC_BASE_PATH", "/nonexistent", "is no directory that can be written to"),
        ("VLLM_RPC_BASE_PATH", "", "is no directory that can be written to"),
        ("PROMETHEUS_MULTIPROC_DIR", "/nonexistent", "is no directory that can be written to"),
    ],
)
def test_a_value_that_vllm_reads_as_it_is_imported_is_named_before(monkeypatch, name, value, says):
    monkeypatch.setenv(name, value)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith(f'{name}="{value}"')
    assert says in done.stdout


def test_a_directory_too_long_for_a_sockets_path_is_named(monkeypatch, tmp_path):
    place = tmp_path / ("x" * 80)
    place.mkdir()
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(place))
    with pytest.raises(ConfigError, match=r"VLLM_RPC_BASE_PATH is too long .* 70 bytes at most"):
        check_environment()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_LOGGING_LEVEL", "debug"),
        ("VLLM_LOGGING_LEVEL", "WARNING"),
        ("VLLM_LOGGING_STREAM", "ext://sys.stderr"),
        ("VLLM_LOGGING_PREFIX", "%(vllm_process_name)s %(fileinfo)s 5 %% "),
        ("VLLM_PORT", "8000"),
        ("VLLM_RPC_BASE_PATH", "/tmp"),
    ],
)
def test_what_vllm_can_use_is_taken(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == ""
