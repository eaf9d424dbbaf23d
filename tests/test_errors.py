"""Messages in one line, with what to do."""

import errno
import subprocess
import sys

import pytest

from sipipe.errors import one_line, remedy


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("two\n  lines"), "two lines"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (OSError(errno.ENOENT, "No such file", "x"), "[Errno 2] No such file: 'x'"),
        (
            OSError(errno.EMFILE, "Too many open files"),
            "[Errno 24] Too many open files: let a process have more open files (ulimit -n)",
        ),
        (
            OSError(errno.ENOMEM, "Cannot allocate memory"),
            "[Errno 12] Cannot allocate memory: free memory, or let a process have more (ulimit -v)",
        ),
    ],
)
def test_a_line_says_what_to_do_where_a_limit_was_reached(error, line):
    assert one_line(error) == line
    assert line.endswith(remedy(error))


def test_shared_memory_that_is_larger_than_a_file_may_be_names_the_limit():
    program = (
        "import resource\n"
        "from sipipe.ipc.memory import SharedMemory\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "SharedMemory.create('bic-i', 1 << 20)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.stderr.splitlines()[-1].endswith(
        "(File too large): let a process write larger files (ulimit -f)"
    )
