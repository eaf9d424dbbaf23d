"""With what a figure was measured: the commit is of SiPipe, or of nothing."""

import subprocess

from sipipe.tools import provenance


def test_the_commit_is_not_that_of_a_users_checkout_around_sipipe(tmp_path, monkeypatch):
    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True)

    module = tmp_path / ".venv/provenance.py"
    module.parent.mkdir()
    module.touch()
    monkeypatch.setattr(provenance, "__file__", str(module))
    assert provenance.machine()["commit"] is None, "no checkout"
    git("init")
    git("commit", "--allow-empty", "-m", "the user's own")
    assert provenance.machine()["commit"] is None
    git("add", str(module))
    git("commit", "-m", "SiPipe's own")
    assert provenance.machine()["commit"]


def test_what_a_program_prints():
    assert provenance.output("echo", " a ") == "a"
    assert provenance.output("false") is provenance.output("no-such-program") is None
