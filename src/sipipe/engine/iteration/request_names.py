"""The names of requests, from which the seeds of those come that bring none.

A request draws the same tokens in every run of an engine with the same seed. So its seed comes from
the id that its client gave; from its place in the order of arrival where the client gave none.
"""

from __future__ import annotations

import re

from vllm import envs

from sipipe.messages.params import derive_seed

MOST_IDS = 1 << 14
"""Client ids that are remembered, so that an id which comes again gives another name. They take a
megabyte."""

_RANDOM_ID = re.compile(r"(?<![0-9a-f])[0-9a-f]{16}(?![0-9a-f])")
_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}$")


class RequestNames:
    """Names of requests that have arrived and are not scheduled yet. Not safe between threads: the
    tracker calls it under its lock."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._anonymous = 0
        """Number of requests that came without an id of their client."""
        self._uses: dict[int, int] = {}
        """Number of times that clients gave each id, by the id's hash, for the last :data:`MOST_IDS`."""

    def arrive(self, request_id: str) -> None:
        """Name a request that has come; call it in the order of arrival. Later calls for the same
        request, as more of its prompt comes, change nothing."""
        if request_id not in self._names:
            self._names[request_id] = self._new_name(request_id)

    def arrive_again(self, request_id: str, prompt_length: int) -> None:
        """Name the next prompt of a streaming session, ``prompt_length`` tokens with all before."""
        self._names[request_id] = f"{self._new_name(request_id)} {prompt_length}"

    def take(self, request_id: str) -> str:
        """The name of a request that is scheduled for the first time, which is forgotten here."""
        return self._names.pop(request_id, None) or self._new_name(request_id)

    def forget(self, request_id: str) -> None:
        """Drop the name of a request that has ended, where it was never scheduled."""
        self._names.pop(request_id, None)

    def _new_name(self, request_id: str) -> str:
        name = client_id(request_id)
        if name is None:
            name = f"arrival {self._anonymous}"
            self._anonymous += 1
            return name
        # Proxies hand one id on with several requests, whose draws shall not be the same.
        key = derive_seed(0, name)
        uses = self._uses.pop(key, 0) + 1
        self._uses[key] = uses  # now the youngest: dictionaries keep the order of insertion
        if len(self._uses) > MOST_IDS:
            oldest = next(iter(self._uses))
            del self._uses[oldest]
        return name if uses == 1 else f"{name} use {uses}"


def client_id(request_id: str) -> str | None:
    """The client's own id within vLLM's request id; None where the client gave none.

    vLLM adds eight random characters to an id, and makes an id with 16 random hexadecimal digits for
    a client that gives none. Offline the id is the number of the request.
    """
    if not envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION:
        request_id = _RANDOM_SUFFIX.sub("", request_id)
    return None if _RANDOM_ID.search(request_id) else request_id
