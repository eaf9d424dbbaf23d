"""Runs wrong usages at one door: each in a process forked from this one, which has vLLM imported and
that door's parser made. Arguments: the door, a file with ``[[line, model, ...]]``, where to write
``{line: [status, output]}``. An engine that would start ends the process with :data:`STARTS`."""

import json
import os
import re
import socket
import sys
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from huggingface_hub import constants
from tests.cli.wrong_usages import USAGES, arguments

STARTS = 99
RAISED = 98
"""Statuses that none of the commands has."""
AT_ONCE = 2


def start(*_args, **_kwargs):
    print("an engine would start", flush=True)
    os._exit(STARTS)


def sipipe_serve():
    from sipipe.cli import main, serve
    from sipipe.engine.start import launch

    def served(given, restart, follows):
        return launch.serve(*given, started=start)

    serve.supervise = served
    return lambda model, words: main(["serve", model, *words])


def vllm_serve():
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    command, parser = ServeSubcommand(), FlexibleArgumentParser(prog="vllm")
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    AsyncLLM.from_vllm_config = start
    main = types.ModuleType("__main__")
    main.__file__ = "vllm"

    def run(model, words):
        sys.modules["__main__"] = main
        args = parser.parse_args(["serve", model, *words])
        command.validate(args)
        command.cmd(args)

    return run


def llm():
    from vllm import LLM
    from vllm.v1.engine.llm_engine import LLMEngine

    import sipipe
    from sipipe.errors import SiPipeError

    LLMEngine.__init__ = start

    def run(model, words):
        try:
            # The environment is looked at where the executor is named.
            given = {"distributed_executor_backend": sipipe.Executor, **arguments(words)}
            LLM(model, **given)
        except (SiPipeError, TypeError) as error:  # TypeError: Python's, of an unknown argument
            print(error, flush=True)
            return RAISED

    return run


def common(door, words):
    """What every row has, unless it says otherwise itself."""
    more = ["--max-model-len", "512"] if "--max-model-len" not in words else []
    if not {"-pp", "--pp", "--pipeline-parallel-size"} & {*words}:
        more += ["-pp", "2"]
    if door == "v" and "--distributed-executor-backend" not in words:
        more += ["--distributed-executor-backend", "sipipe.Executor"]
    if door in "sv" and not {"--port", "--uds"} & {*words}:
        more += ["--port", "0"]
    return [*words, *more]


def become(door, run, wrong, models, out):
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.update(wrong.environment)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        models |= {"taken": str(taken.getsockname()[1])}
        words = [
            re.sub(r"\{(\w+)\}", lambda name: models.get(name[1], name[0]), word)
            for word in wrong.words
        ]
        model = models.get(wrong.model.strip("{}"), wrong.model)
        try:
            status = run(model, common(door, words)) or 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        except BaseException:
            import traceback

            traceback.print_exc()
            status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main(door, given, result):
    # Imported before this process was forked, and told. Python has the hub's own exception then.
    constants.HF_HUB_OFFLINE = door in "sv"
    run = {"s": sipipe_serve, "v": vllm_serve, "l": llm}[door]()
    models, lines = json.loads(Path(given).read_text())
    found, running = {}, {}

    def finish():
        pid, status = os.wait()
        line, out = running.pop(pid)
        with os.fdopen(out, "rb") as file:
            file.seek(0)
            found[line] = os.waitstatus_to_exitcode(status), file.read().decode(errors="replace")

    for wrong in USAGES:
        if door not in wrong.doors or (lines and wrong.line not in lines):
            continue
        if len(running) == AT_ONCE:
            finish()
        out = os.memfd_create("said")
        if not (pid := os.fork()):
            become(door, run, wrong, models, out)
        running[pid] = wrong.line, out
    while running:
        finish()
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[-3:])
