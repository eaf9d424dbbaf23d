"""Where compiled kernels are kept: by sources, versions and CPU, and never where others can write."""

from __future__ import annotations

import ast
import errno
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

import sipipe
from sipipe import jit
from sipipe.errors import ConfigError
from sipipe.private import check_named_directory

KERNELS = "sipipe.sampler.kernels"
SOURCES = Path(sipipe.__file__).parent
PACKAGES = (KERNELS, "sipipe.worker.inputs")


def forget() -> None:
    for cached in (jit.cache_key, jit.cache_directory):
        cached.cache_clear()


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("SIPIPE_CACHE_DIR", str(tmp_path / "named"))
    monkeypatch.setattr(jit.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    forget()
    yield
    forget()


def copied(folder: Path) -> Path:
    """The kernels and what they need, as an installation of its own under ``folder``."""
    package = folder / "sipipe"
    for name in ("sampler/kernels", "worker/inputs"):
        shutil.copytree(
            SOURCES / name, package / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    modules = ("__init__", "jit", "private", "errors", "_version")
    for name in (*modules, "sampler/__init__", "worker/__init__"):
        shutil.copy(SOURCES / f"{name}.py", package / f"{name}.py")
    return package


def run(package: Path, code: str, **environment: str) -> tuple[str, str]:
    """What ``code`` prints, and what it says beside, with the copy of the package, and nothing of our environment."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    found = subprocess.run(
        [sys.executable, "-B", "-c", code],
        env={**kept, "PYTHONPATH": str(package.parent), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout, found.stderr


# Kernels of both packages, of which the second is compiled when the worker's inputs are prepared.
DRAW = """
import numpy as np
from sipipe.sampler.kernels.philox import uniform
from sipipe.worker.inputs.kernels import lay_out
one, long = np.ones(1, np.int32), np.zeros(1, np.int64)
out = np.zeros(2, np.int32), long, one.copy(), long.copy(), np.zeros(2, np.int32)
assert lay_out(one, one, 0 * one, *out) == (1, 1)
assert long.tolist() == [1]
print(uniform(np.uint64(7), np.int64(3)))
"""


def test_another_cpu_has_another_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = jit.cache_directory(KERNELS)
    assert here.parent == tmp_path / "named" / "kernels"
    for name in ("get_host_cpu_name", "get_host_cpu_features"):
        with monkeypatch.context() as other:
            answer = "znver9" if name == "get_host_cpu_name" else {"avx512f": False}
            features = type("Features", (dict,), {"flatten": lambda self: str(dict(self))})
            given = answer if isinstance(answer, str) else features(answer)
            other.setattr(jit.binding, name, lambda given=given: given)
            forget()
            assert jit.cache_directory(KERNELS) != here


def test_a_kernel_calls_only_what_its_key_covers() -> None:
    for name in PACKAGES:
        for source in (SOURCES.parent / name.replace(".", "/")).glob("*.py"):
            tree = ast.parse(source.read_text())
            imported = {
                node.module: {alias.name for alias in node.names}
                for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom) and node.module
            }
            if not imported.get("sipipe.jit", set()) & {"entry", "kernel"}:
                continue
            foreign = {m for m in imported if m.startswith("sipipe") and not m.startswith(name)}
            assert foreign == {"sipipe.jit"}, source


@pytest.mark.ci
def test_an_edited_helper_is_compiled_again(tmp_path: Path) -> None:
    package = copied(tmp_path / "site")
    # `uniform` inlines a constant of another file, which alone is edited last.
    helper = package / "sampler" / "kernels" / "_multipliers.py"
    source = package / "sampler" / "kernels" / "philox.py"
    text = source.read_text()
    assert "0xD2511F53" in text
    helper.write_text("FIRST = 0xD2511F53\n")
    source.write_text(
        text.replace("0xD2511F53", "FIRST").replace(
            "import numpy as np\n",
            "import numpy as np\nfrom sipipe.sampler.kernels._multipliers import FIRST\n",
            1,
        )
    )
    before, said = run(package, DRAW, SIPIPE_CACHE_DIR=str(tmp_path / "cache"))
    lines = {line.split(" for ")[0] for line in said.splitlines()}
    assert lines == {f"sipipe: compiling {package}" for package in PACKAGES}
    assert run(package, DRAW, SIPIPE_CACHE_DIR=str(tmp_path / "cache")) == (before, "")
    helper.write_text("FIRST = 0xD2511F55\n")
    assert run(package, DRAW, SIPIPE_CACHE_DIR=str(tmp_path / "cache"))[0] != before


@pytest.mark.ci
def test_a_read_only_installation_without_a_home(tmp_path: Path) -> None:
    package = copied(tmp_path / "site")
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o777)
    # Files in the way stop root too, whom no permission does.
    for folder in [package, *(path for path in package.rglob("*") if path.is_dir())]:
        (folder / "__pycache__").write_text("")
        folder.chmod(0o555)
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    for home in ({}, {"HOME": str(blocked)}):
        printed, said = run(package, DRAW, TMPDIR=str(shared), XDG_CACHE_HOME=str(blocked), **home)
        assert 0.0 <= float(printed) < 1.0
        assert f"sipipe: compiled kernels are in {shared}/sipipe-cache" in said
        assert "File exists" in said
    [ours] = shared.iterdir()
    assert ours.name == f"sipipe-cache-{os.getuid()}"
    for path in (ours, *ours.rglob("*")):
        if path.is_dir():
            assert path.stat().st_uid == os.getuid()
            assert path.stat().st_mode & 0o777 == 0o700
    assert len({code.parent for code in ours.rglob("*.nbc")}) == len(PACKAGES)


def trapped(monkeypatch: pytest.MonkeyPatch, target: Path, trap: str) -> None:
    """``target`` as another user could have made it, or can change it."""
    if trap == "open":
        target.chmod(0o777)
    elif trap == "group":
        target.chmod(0o770)
    elif trap == "symlink":
        elsewhere = target.with_name("elsewhere")
        target.rename(elsewhere)
        target.symlink_to(elsewhere)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4711)  # whose is nothing here

        look = Path.stat

        def foreign(path: Path, **how) -> os.stat_result:  # `lstat` asks it too
            found = list(look(path, **how))
            found[4] = 12 if path == target else 4711  # st_uid
            return os.stat_result(found)

        monkeypatch.setattr(Path, "stat", foreign)


@pytest.mark.parametrize("part", ["named", "kernels", "KEY", "code"])
@pytest.mark.parametrize("trap", ["foreign", "open", "group", "symlink"])
def test_a_named_directory_that_others_can_write_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, part: str, trap: str
) -> None:
    """From the named one down, files included: all of it is executed."""
    key = jit.cache_directory(KERNELS)
    code = key / "philox.uniform-7.py311.nbi"
    code.touch()
    named = tmp_path / "named"
    target = {"named": named, "kernels": named / "kernels", "KEY": key, "code": code}[part]
    trapped(monkeypatch, target, trap)
    forget()
    if (part, trap) == ("named", "symlink"):  # who could exchange it is above it
        assert jit.cache_directory(KERNELS) == key
        return
    with pytest.raises(
        ConfigError, match=f"^SIPIPE_CACHE_DIR {named} cannot keep .*{target}"
    ) as it:
        jit.cache_directory(KERNELS)
    assert "\n" not in str(it.value)
    if part in ("named", "kernels"):  # before anything starts
        with pytest.raises(ConfigError, match=f"^SIPIPE_CACHE_DIR {named} cannot keep .*{target}"):
            check_named_directory()


def test_a_named_directory_may_be_shared_as_tmp_is(tmp_path: Path) -> None:
    (tmp_path / "named").mkdir()
    (tmp_path / "named").chmod(0o1777)
    assert jit.cache_directory(KERNELS).parent == tmp_path / "named" / "kernels"
    (tmp_path / "named" / "kernels").chmod(0o1777)
    forget()
    with pytest.raises(ConfigError, match=r"others can write to .*kernels"):
        jit.cache_directory(KERNELS)


@pytest.mark.parametrize("blocked", ["a file in its place", "a loop of links"])
def test_a_named_directory_that_cannot_be_made_is_refused(tmp_path: Path, blocked: str) -> None:
    named = tmp_path / "named"
    if blocked == "a loop of links":
        named.symlink_to(named)
    else:
        named.touch()
    for look in (check_named_directory, lambda: jit.cache_directory(KERNELS)):
        with pytest.raises(ConfigError, match=f"^SIPIPE_CACHE_DIR {named} cannot keep compiled"):
            look()
    forget()


@pytest.mark.ci
def test_a_named_directory_below_no_home_is_refused(monkeypatch):
    """As of a container's user without a name, where no shell has put a directory in the place of ~."""
    monkeypatch.setenv("SIPIPE_CACHE_DIR", "~nobody-has-this-name/kernels")
    for check in (check_named_directory, lambda: jit.cache_directory(KERNELS)):
        with pytest.raises(ConfigError, match=r"SIPIPE_CACHE_DIR ~nobody.*home"):
            check()


def test_warm_refuses_it_in_one_line(tmp_path: Path) -> None:
    named = tmp_path / "named"
    named.touch()
    ended = subprocess.run(
        [sys.executable, "-m", "sipipe", "warm"],
        env={**os.environ, "SIPIPE_CACHE_DIR": str(named)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert ended.stderr.startswith(f"sipipe: SIPIPE_CACHE_DIR {named} cannot keep")


@pytest.mark.parametrize("depth", range(3))
@pytest.mark.parametrize("trap", ["foreign", "open", "symlink"])
def test_an_unnamed_directory_that_others_can_write_is_left_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, depth: int, trap: str, capsys
) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    monkeypatch.delenv("SIPIPE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    expected = jit.cache_directory(KERNELS)
    parts = (f"sipipe-cache-{os.getuid()}", "kernels", jit.cache_key(KERNELS))
    assert expected == (tmp_path / "tmp").joinpath(*parts)
    assert jit.cache_directory.__wrapped__(KERNELS) == expected  # ours is taken again
    trapped(monkeypatch, (tmp_path / "tmp").joinpath(*parts[: depth + 1]), trap)
    forget()
    capsys.readouterr()
    taken = jit.cache_directory(KERNELS)
    assert taken.parent == tmp_path / "tmp"  # a new one, made by mkdtemp
    assert taken.name.startswith("sipipe-kernels-")
    assert taken.stat().st_mode & 0o777 == 0o700
    said = capsys.readouterr().err
    assert said.startswith(f"sipipe: compiled kernels are in {taken}, because ")
    assert str(blocked) in said


def test_a_process_that_is_stopped_while_it_compiles_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(jit, "PATIENCE", 0.1)
    with jit.compiling(KERNELS), jit.compiling(KERNELS):
        pass


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks_stops_nobody(monkeypatch, error):
    def flock(*_):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(jit.fcntl, "flock", flock)
    with jit.compiling(KERNELS):
        pass


def test_kernels_of_an_image_that_can_only_be_read_are_taken(monkeypatch):
    directory = jit.cache_directory(KERNELS)
    monkeypatch.setattr(os, "access", lambda *_: False)
    forget()
    with pytest.raises(ConfigError, match="cannot be written, and has no kernels for this CPU"):
        jit.cache_directory(KERNELS)
    with pytest.raises(ConfigError, match="cannot be written, and has no kernels in it"):
        check_named_directory()
    (directory / "draw.nbi").touch()
    forget()
    assert jit.cache_directory(KERNELS) == directory
    check_named_directory()
    monkeypatch.setattr("builtins.open", Mock(side_effect=OSError(errno.EROFS, "read only")))
    with jit.compiling(KERNELS):
        pass


@pytest.mark.ci
def test_what_is_kept_is_written_by_this_user_alone(tmp_path):
    """Whatever the umask lets others do with other files."""
    package = copied(tmp_path / "site")
    run(package, "import os\nos.umask(0)\n" + DRAW, SIPIPE_CACHE_DIR=str(tmp_path / "cache"))
    files = list((tmp_path / "cache").rglob("*.nb?"))
    assert len(files) > 2
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}


def test_a_full_disk_costs_only_what_is_not_kept(tmp_path):
    code = "import os\nfrom numba.core.caching import IndexDataCacheFile as files\n"
    code += "def full(*_): raise OSError(28, 'No space left on device')\nfiles.save = full\n"
    package = copied(tmp_path / "site")
    printed, _ = run(package, code + DRAW, SIPIPE_CACHE_DIR=str(tmp_path / "cache"))
    assert 0.0 <= float(printed) < 1.0
    assert not [*(tmp_path / "cache").rglob("*.nbc")]


def test_a_damaged_index_that_cannot_be_removed_costs_only_what_is_not_kept(monkeypatch):
    """As in an image that can only be read."""
    damaged = pickle.UnpicklingError("pickle data was truncated")
    monkeypatch.setattr(jit.FunctionCache, "save_overload", Mock(side_effect=damaged))
    jit._Cache.__new__(jit._Cache).save_overload(None, None)  # noqa: SLF001


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str, str]:
    """An installation, its kernels' cache, what runs it, and what that prints."""
    folder = tmp_path_factory.mktemp("compiled")
    package, cache = copied(folder / "site"), folder / "cache"
    drawn, _ = run(package, DRAW, SIPIPE_CACHE_DIR=str(cache))
    return package, cache, DRAW, drawn


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        pytest.param("nbi", lambda data: b"", marks=pytest.mark.slow),
        pytest.param("nbc", lambda data: data[:40], marks=pytest.mark.slow),
        ("nbc", lambda data: data[:-9] + bytes(9)),
    ],
    ids=["an empty index", "code cut off", "zeros amid code"],
)
def test_a_damaged_file_is_named_and_compiled_anew(
    compiled, tmp_path: Path, kind: str, damage
) -> None:
    package, sound, one, drawn = compiled
    cache = shutil.copytree(sound, tmp_path / "cache")
    [file] = cache.rglob(f"philox.uniform-*.{kind}")
    file.write_bytes(damage(file.read_bytes()))
    again, said = run(package, one, SIPIPE_CACHE_DIR=str(cache))
    assert again == drawn
    first, *more = said.splitlines()
    assert f"{file.parent}/philox.uniform" in first
    assert "is damaged" in first
    assert "compiled anew" in first
    assert [line.split(" for ")[0] for line in more] == [f"sipipe: compiling {KERNELS}"]
    assert run(package, one, SIPIPE_CACHE_DIR=str(cache)) == (drawn, "")
