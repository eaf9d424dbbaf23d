"""KV connectors whose methods raise, or answer what no prompt can have: as often as ``raises`` says.

``method``: which one. Waiting is for those that load while others are served, Early for those that
load before the forward pass.
"""

import itertools
import sys
from pathlib import Path

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

sys.path.insert(0, str(Path(__file__).parent))
from shelf import Shelf


class Raises:
    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        calls = itertools.count(1)
        method = getattr(self, extra["method"])

        def raising(*args, **kwargs):
            raises = next(calls) % extra["raises"] == 0 and not extra.get("answer")
            # Shelf counts its calls: it has to be called, or fails in the next one too.
            said = method(*args, **kwargs) if extra["late"] or not raises else None
            if raises:
                raise ZeroDivisionError("as asked")
            return (extra["answer"], said[1]) if extra.get("answer") else said

        setattr(self, extra["method"], raising)


class Waiting(Raises, Shelf):
    pass


class Early(Raises, ExampleConnector):
    pass
