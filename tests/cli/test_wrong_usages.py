"""Each mistake of the table (:mod:`.wrong_usages`) is one line that says what is wrong, by each way to
start an engine, before anything starts."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from benchmarks.make_model.checkpoint import make_model
from tests.cli.wrong_doors import RAISED, common
from tests.cli.wrong_usages import DOORS, USAGES, arguments
from tests.engine.forks import Forked
from tests.programs import ran

PROGRAM = Path(__file__).with_name("wrong_doors.py")
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """By their names in the table."""
    folder = tmp_path_factory.mktemp("models")
    sound = make_model("llama", folder / "sound")
    (folder / "empty").mkdir()
    (folder / "file").write_text("no model")
    made = {"sound": sound, "nothing": folder / "nothing-like-it", "near": folder / "soundd"}
    made |= {"empty": folder / "empty", "file": folder / "file"}

    def copy(name, *patterns, **fields):
        """Of the sound one: without files of these patterns, with these fields in config.json."""
        made[name] = shutil.copytree(sound, folder / name)
        for file in (file for pattern in patterns for file in made[name].glob(pattern)):
            file.unlink()
        if fields:
            config = json.loads((sound / "config.json").read_text()) | fields
            (made[name] / "config.json").write_text(json.dumps(config))

    copy("no_config", "config.json")
    copy("no_architecture", architectures=["NoSuch"])
    copy("unknown_type", model_type="no_such_type")
    copy("no_weights", "*.safetensors")
    copy("no_tokenizer", "*token*", "*vocab*", "merges*")
    copy("bad_config")
    (made["bad_config"] / "config.json").write_text("{")
    copy("half_weights")
    weights = made["half_weights"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    written = {
        "file_of_bad_template": "{% if %}",
        "file_of_bad_python": "raise ValueError('a bad plugin')",
        "empty_python": "",
    }
    for name, text in written.items():
        made[name] = folder / f"{name}.py"
        made[name].write_text(text)
    made["empty_adapter"] = folder / "empty_adapter"
    made["empty_adapter"].mkdir()
    made["large_adapter"] = folder / "large_adapter"
    made["large_adapter"].mkdir()
    (made["large_adapter"] / "adapter_config.json").write_text('{"r": 64}')
    return {name: str(path) for name, path in made.items()}


ALL = [pytest.param((name, True), id=DOORS[name], marks=pytest.mark.slow) for name in DOORS]
SOME = [pytest.param((name, False), id=f"{DOORS[name]}, some") for name in DOORS]


@pytest.fixture(scope="module", params=[*SOME, *ALL])
def door(request, models, tmp_path_factory):
    """A door, and what it said of mistakes, each or one of 24, others at each door: status and output."""
    name, every = request.param
    folder = tmp_path_factory.mktemp("said")
    given, result = folder / "given", folder / "result"
    begin = 8 * list(DOORS).index(name)
    few = [wrong.line for wrong in (USAGES if every else USAGES[begin::24])]
    given.write_text(json.dumps([models, few]))
    with (folder / "log").open("w+") as log:
        program = Forked(
            PROGRAM, [name, str(given), str(result)], env=os.environ | ENVIRONMENT, out=log
        )
        try:
            program.wait(900)
        finally:
            program.kill()
            program.close()
        assert result.exists(), log.seek(0) or log.read()[-3000:]
    said = json.loads(result.read_text())
    assert said.keys() == {
        wrong.line for wrong in USAGES if wrong.line in few and name in wrong.doors
    }
    return name, said


NOT_OURS = re.compile(
    r"(\(\w+ pid=\d+\) )?(INFO|WARNING|ERROR) |Found ulimit |W\d{4} "  # vLLM's and torch's
    r"|Retrying in |.* thrown while requesting "  # of the hub's client, in Python
    r"|other degrees may be quicker "  # with which ``sipipe serve`` begins
)


def fault(wrong, door, status, output) -> str:
    """What is wrong with what was said; empty: nothing."""
    lines = [line for line in output.splitlines() if line and "errors.pydantic.dev" not in line]
    lines = lines or [""]
    if door == "v" and (refused := re.search(r"^vllm( serve)?: error: (.*)", output, re.M | re.S)):
        lines = [" ".join(refused[2].split())]  # vLLM's parser, of options of its own
    if not re.search(wrong.said, lines[-1], re.IGNORECASE):
        return f"says: {lines[-1]}"
    if "Traceback" in output:
        return "has a traceback"
    if more := [line for line in lines[:-1] if not NOT_OURS.match(line)]:
        return f"also says: {more[0]}"
    wanted = RAISED if door == "l" else wrong.status
    if status != wanted:
        return f"status {status}"
    if door == "s" and not lines[-1].startswith("sipipe: "):
        return f"is not SiPipe's line: {lines[-1]}"
    return ""


def test_every_mistake_is_one_line_that_says_what_to_do(door):
    name, said = door
    asked = [wrong for wrong in USAGES if wrong.line in said]
    assert len([wrong for wrong in USAGES if name in wrong.doors]) >= 150
    wrong = {w.line: fault(w, name, *said[w.line]) for w in asked}
    found = [f"{line}\n    {what}" for line, what in wrong.items() if what]
    assert not found, f"{DOORS[name]}: {len(found)} of {len(asked)}\n" + "\n".join(found)


TRIED = {
    "-pp 9": "svl",
    '"sampler": 2': "svl",
    "{no_weights}": "svl",
    "--max-num-seqs 0": "svl",
    "VLLM_LOG_STATS_INTERVAL=often": "svl",
    "--middleware thing": "sv",
    "--ssl-certfile /no/such.pem": "sv",
    # Read while vLLM is imported, which the other doors do before SiPipe is there.
    "VLLM_LOG_BATCHSIZE_INTERVAL=often": "s",
    "VLLM_LOGGING_LEVEL=loud": "s",
}
"""Through the real commands: a line of the table, and the doors at which it is tried."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "name"), [(line, name) for line, doors in TRIED.items() for name in doors]
)
def test_the_real_commands_say_the_same(models, name, line):
    asked = (wrong for wrong in USAGES if name in wrong.doors)
    wrong = next(wrong for wrong in asked if line == wrong.line.split("] ")[-1].split(" =>")[0])
    model = models[wrong.model.strip("{}")]
    words = common(name, [*wrong.words])
    program = f"""
import sipipe, vllm
vllm.LLM({model!r}, distributed_executor_backend=sipipe.Executor, **{arguments((*words,))!r})
"""
    command = {
        "s": [sys.executable, "-m", "sipipe", "serve", model, *words],
        "v": [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, *words],
        "l": [sys.executable, "-c", program],
    }[name]
    environment = os.environ | ENVIRONMENT | wrong.environment
    done = ran(command, env=environment, stdin=subprocess.DEVNULL, timeout=180)
    if name != "l":
        assert not fault(wrong, name, done.returncode, done.stdout), done.stdout[-3000:]
        return
    last = done.stdout.rstrip().splitlines()[-1].removeprefix("sipipe.errors.ConfigError: ")
    assert re.search(wrong.said, last, re.IGNORECASE), done.stdout[-3000:]
    assert done.returncode == 1
