"""A browser for the pages' tests."""

import pytest
from tests.tools.report.browser import Browser, find_chromium


@pytest.fixture(scope="module")
def browser():
    if (path := find_chromium()) is None:
        pytest.skip("no Chromium found (Debian: apt-get install chromium)")
    with Browser(path) as running:
        yield running
