"""A process that is killed while torch compiles leaves nothing at which a later one would end."""

import os
import signal
import sys

import pytest
from tests.programs import ran

pytest.importorskip("torch")

COMPILER = """#!/bin/sh
PATH=${PATH#*:}
g++ "$@" || exit
while [ "$1" != -o ]; do shift; test $# -gt 0 || exit 0; done
case "$2" in
$KILLED_AT)
    truncate -s 100000 "$2"
    case "$2" in *.so*) truncate -s 0 "$2" ;; esac
    kill -9 $PPID
esac
"""
"""A compiler that kills the process that called it amid a file whose name is like ``KILLED_AT``. A linker
writes last of all what a library begins with."""

FILES = ("*.so*", "*.gch*", "*.main.so*")
"""Files that torch has compiled for a function, in order: one that tells whether the processor has the
instructions, the precompiled header, the function."""

COMPILES = """
import sys, torch
if "whole" in sys.argv:
    from sipipe.worker.hooks.whole_builds import build_whole_files
    build_whole_files()
    build_whole_files()  # vLLM may load a model twice
from torch._inductor import config
config.compile_threads = 1
config.fx_graph_cache = False
@torch.compile
def doubled(x):
    return torch.sin(x) * 2 + x
x = torch.arange(64.0)
torch.testing.assert_close(doubled(x), torch.sin(x) * 2 + x)
print("right")
"""


@pytest.fixture
def run(tmp_path):
    """Returns a function that compiles and calls a function in a process of its own, by torch with our
    extension or without. It is killed while it makes the file whose name is like ``killed_at``."""
    folder = tmp_path / "bin"
    folder.mkdir()
    compiler = folder / "g++"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)

    def run(killed_at: str = "", *, whole: bool = True, cache: str = "cache"):
        environment = os.environ | {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "KILLED_AT": killed_at or "nothing",
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / cache),
            "TMPDIR": str(tmp_path),  # precompiled headers are in a folder of the user's own there
        }
        words = [sys.executable, "-c", COMPILES, *(["whole"] if whole else [])]
        done = ran(words, env=environment, timeout=240)
        if killed_at:
            assert done.returncode == -signal.SIGKILL, (killed_at, done.stdout[-3000:])
        return done.stdout

    return run


@pytest.mark.ci
def test_a_process_that_is_killed_as_it_compiles_stands_in_no_ones_way(run):
    """Each finds what all before it have left."""
    for file in FILES:
        run(file)
    assert run().endswith("right\n")


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES[1:])
def test_what_torch_alone_has_left_half_built_is_built_again(run, file):
    run(file, whole=False)
    assert "right" not in run(whole=False), "torch mends it by itself: the extension can go"
    assert run().endswith("right\n")
