"""Messages of Python objects, whose buffers (arrays, bytes of others) are parts of their own."""

import pickle
from collections.abc import Callable, Sequence
from typing import Any


def out_of_band(value: object, dumps: Callable[..., bytes] = pickle.dumps) -> list[Any]:
    """Parts of a message: the pickle of ``value``, and the buffers that it refers to."""
    buffers: list[pickle.PickleBuffer] = []
    body = dumps(value, 5, buffer_callback=buffers.append)
    return [body, *(buffer.raw() for buffer in buffers)]


def whole(parts: Sequence[bytes]) -> Any:
    """The value of :func:`out_of_band`'s parts, whose buffers it refers to."""
    body, *buffers = parts
    return pickle.loads(body, buffers=buffers)
