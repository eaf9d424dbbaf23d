"""scripts/release.py: what keeps a tree from being released."""

import subprocess

import pytest
from tests.programs import load


@pytest.fixture
def release(tmp_path, monkeypatch):
    """The script as a module, for a tree of nothing but a change log."""
    module = load("scripts", "release.py")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "CHANGELOG.md").write_text("# Changes\n\n## 1.2 (2026-11-26)\n")
    return module


@pytest.mark.parametrize(
    ("log", "changed", "status", "failed"),
    [
        ("1.2 (2026-11-26)", "", 0, []),
        ("1.2 (2026-11-26)", "", 1, ["every benchmark of the campaign measured its figures"]),
        ("1.2 (not released)", "", 0, ["CHANGELOG.md gives its date"]),
        ("1.1 (2026-11-25)", " M a", 0, ["CHANGELOG.md begins with this version", "the tree is committed"]),
    ],
)  # fmt: skip
def test_a_tree_that_is_not_ready_is_named(release, monkeypatch, tmp_path, log, changed, status, failed):  # fmt: skip
    (tmp_path / "CHANGELOG.md").write_text(f"# Changes\n\n## {log}\n")
    ran = []

    def run(command, **options):
        ran.append(command)
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr(release, "run", lambda *command, cwd: changed)
    monkeypatch.setattr(release.subprocess, "run", run)
    release.check_tree("1.2")
    assert failed == release.FAILED
    # Five hours of figures that belong to no commit: none are measured of a changed tree.
    expected = [] if changed else [("-m", "benchmarks.campaign", "--compare")]
    assert expected == [command[1:] for command in ran]
