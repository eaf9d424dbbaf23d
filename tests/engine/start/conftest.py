"""Fixtures of what a start leaves in its process."""

import logging
import os

import pytest

from sipipe.ipc import last_word as words


@pytest.fixture
def own_last_word(monkeypatch):
    """Memory for last words of this test alone, which other tests of the process do not read."""
    held = {}
    monkeypatch.setattr(words, "_held", held)
    monkeypatch.setenv(words.VARIABLE, "")
    words.hold_last_word()
    yield
    for place in held.values():
        os.close(int(place.name))


@pytest.fixture(autouse=True)
def vllms_log():
    """Handlers of vLLM's log as they were. A start that a test looks at through ``capsys`` sets them to
    that test's stream, which is closed at its end."""
    log = logging.getLogger("vllm")
    handlers = log.handlers[:]
    yield
    log.handlers[:] = handlers
