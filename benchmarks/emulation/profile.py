"""What an emulated engine's devices take for their work: data, made by ``python -m benchmarks.emulate``."""

import msgspec
import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int32]


class Curve(msgspec.Struct, frozen=True):
    """Seconds over a number of tokens or rows: straight between the points and beyond the last."""

    at: tuple[float, ...]
    """Ascending, two or more."""
    seconds: tuple[float, ...]

    def __call__(self, number: float) -> float:
        last = len(self.at) - 1
        place = next((i for i in range(1, last) if number < self.at[i]), last)
        (x0, x1), (y0, y1) = self.at[place - 1 : place + 1], self.seconds[place - 1 : place + 1]
        return max(0.0, y0 + (number - x0) * (y1 - y0) / (x1 - x0)) if number else 0.0

    def slowed(self, factor: float) -> "Curve":
        return Curve(at=self.at, seconds=tuple(factor * each for each in self.seconds))


class StageProfile(msgspec.Struct, frozen=True):
    """One stage's device."""

    layers: Curve
    """Over the tokens of the microbatch: everything but attention and the output projection."""
    projection: Curve
    """Over the rows that sample: the whole output projection; on the last stage."""
    hop: Curve
    """Over tokens: to the next stage."""
    decode_context: float
    """Seconds for each token of context of each decoding sequence."""
    prompt_context: float
    """Seconds for each earlier token that each prompt token attends to."""

    def seconds(self, computed: Counts, scheduled: Counts) -> float:
        """Of a forward pass, without the output projection. Of each request [B]: the tokens
        computed before, and those scheduled."""
        # A context is read once for a token and its drafts, or for a chunk, and computed for each.
        each = np.maximum(self.decode_context, self.prompt_context * scheduled)
        attention = (each * (computed + scheduled / 2)).sum()
        return self.layers(scheduled.sum()) + float(attention)

    def slowed(self, factor: float) -> "StageProfile":
        return StageProfile(
            layers=self.layers.slowed(factor),
            projection=self.projection.slowed(factor),
            hop=self.hop.slowed(factor),
            decode_context=factor * self.decode_context,
            prompt_context=factor * self.prompt_context,
        )


class StockCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage of vLLM's pays, where one of SiPipe's techniques is taken away."""

    last_stage: float = 0.0
    """By how much output projection and sampling make the last stage longer, as a share of its
    layers' time, where it samples."""
    preparation: float = 0.0
    """Of a microbatch, as a share of the layers' time: before its pass, or in a thread beside."""
    stall: float = 0.0
    """Seconds until a stage takes hidden states of which it was told nothing ahead."""


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """All devices of a pipeline, and what lies between them."""

    name: str
    stages: tuple[StageProfile, ...]
    copy: Curve
    """Over rows of all columns: logits to the host's memory."""
    kv_tokens: int
    """What the KV cache of the tightest stage holds."""
    acceptance: float = 0.0
    """How likely a draft is right. One of a head is as likely as that behind right ones. One of a prompt
    lookup, half or more, is rather less likely above 0.6, because the longest match favours the ends of
    runs. 0: logits are what they are."""
    head: StageProfile | None = None
    """A draft head on the last stage, as a stage of one layer; None: there is none."""
    jitter: float = 0.0
    """Standard deviation of a forward pass's time, as a share of it."""
    stock: StockCosts = StockCosts()

    def slowed(self, factor: float) -> "Profile":
        """The same devices in slow motion: everything takes ``factor`` times as long."""
        return msgspec.structs.replace(
            self,
            stages=tuple(stage.slowed(factor) for stage in self.stages),
            head=None if self.head is None else self.head.slowed(factor),
            copy=self.copy.slowed(factor),
            stock=msgspec.structs.replace(self.stock, stall=factor * self.stock.stall),
        )


def read_profile(path: str) -> Profile:
    """The profile in a JSON file."""
    with open(path, "rb") as file:
        return msgspec.json.decode(file.read(), type=Profile)
