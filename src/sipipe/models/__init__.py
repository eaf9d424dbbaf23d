"""Random but deterministic checkpoints in Hugging Face format, to test and measure on.

>>> from sipipe.models import make_model
>>> make_model("llama", "build/models/llama-tiny")  # doctest: +SKIP
"""

from sipipe.models.checkpoint import make_model
from sipipe.models.families import FAMILIES
from sipipe.models.shapes import SIZES

__all__ = ["FAMILIES", "SIZES", "make_model"]
