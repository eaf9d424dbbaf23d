"""vLLM's environment variables are checked by vLLM's own table, without an import of vLLM."""

import subprocess
import sys

import pytest

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


@pytest.mark.parametrize("value", ["debug", "WARNING"])
def test_a_level_of_any_case_is_taken(monkeypatch, value):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", value)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == ""
