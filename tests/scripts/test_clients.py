"""scripts/clients.py: an environment with .venv behind it, made once, or why there is none."""

import subprocess

import pytest
from tests.programs import load


@pytest.fixture
def script(tmp_path, monkeypatch):
    """The script as a module, which installs nothing, offline, and makes environments in tmp_path."""
    module = load("scripts", "clients.py")
    lock = tmp_path / "clients.lock"
    lock.write_text("# nothing\n")
    setup = module.setup_script()
    monkeypatch.setattr(module, "setup_script", lambda: setup)
    monkeypatch.setattr(module, "LOCK", lock)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setenv("UV_OFFLINE", "1")
    return module


def test_it_has_what_this_environment_has_but_not_sipipe(script):
    code = (
        "from importlib.util import find_spec as at; print(bool(at('torch')), bool(at('sipipe')))"
    )
    command = [script.make(), "-P", "-c", code]
    done = subprocess.run(command, env={}, capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n"


def test_it_is_made_once_and_anew_for_another_list(script):
    python = script.make()
    assert script.make() == python
    script.LOCK.write_text("# something\n")
    assert script.make() != python


def test_a_package_that_is_not_to_be_had_is_one_line(script):
    script.LOCK.write_text("no-such-client-of-sipipe==1\n")
    with pytest.raises(script.UnavailableError, match=r"^clients.lock cannot be installed: .+$"):
        script.make()
    assert not list((script.ROOT / "build").glob("clients-*"))
