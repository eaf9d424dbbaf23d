"""Kernels are compiled once, before the first test and outside its time limit."""

from __future__ import annotations

import pytest

from sipipe.sampler.warmup import warm_up


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    warm_up()
