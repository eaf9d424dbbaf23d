"""Check of vLLM's directory of compiled models, before anything starts.

What is in that directory is executed. vLLM makes directories there at each start that compiles, also
where it then loads a model that is there. Its errors say neither whose the directories are nor which
variable names them.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from vllm import envs
from vllm.config import CompilationMode, VllmConfig

from sipipe.errors import ConfigError

REMEDY = "name a directory of this user with VLLM_CACHE_ROOT, or leave compiling out with --enforce-eager"


def check_compiled_models(config: VllmConfig) -> None:
    """Refuse a directory of compiled models that cannot be written or is another user's, where the
    model is to be compiled. The same holds for the directories above it, up to ``VLLM_CACHE_ROOT``.
    Raises ConfigError."""
    if config.compilation_config.mode == CompilationMode.NONE:
        return
    root = Path(envs.VLLM_CACHE_ROOT)
    shared = root / "torch_compile_cache"
    for directory in (root, shared, shared / "torch_aot_compile"):
        problem = _problem(directory)
        if problem:
            raise ConfigError(f"VLLM_CACHE_ROOT {root}: {directory} {problem}: {REMEDY}")


def _problem(directory: Path) -> str:
    """Reason for which compiled models cannot be kept in ``directory``, as a clause for messages; empty
    if they can."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        state = directory.stat()
    except OSError as error:
        return f"cannot be made ({error.strerror})"
    if state.st_uid not in (os.geteuid(), 0):
        return f"is another user's ({state.st_uid}), and what is in it is executed"
    # Not the group's bit: many systems give each user a group, and files that it can write.
    if state.st_mode & stat.S_IWOTH and not state.st_mode & stat.S_ISVTX:
        return "can be written by others, and what is in it is executed (chmod o-w)"
    if not os.access(directory, os.W_OK):
        return "cannot be written"
    return ""
