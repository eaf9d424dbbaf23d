"""Stages of SiPipe's path that raise at the first unsafe use of a set of input buffers."""

from tests.worker.token_safety import TokenSafety

from sipipe.worker import loaded_stage, sampled_stage


class WatchedStage(sampled_stage.SampledStage):
    """In the place of a stage of SiPipe's path (:func:`watch`)."""

    def __init__(self, *args) -> None:
        self._safety = TokenSafety(sampled_stage.SETS)
        super().__init__(*args)

    def prepare(self, header, buffer_set, output):
        self._safety.begin_write(buffer_set, header.number)
        inputs = super().prepare(header, buffer_set, output)
        self._safety.end_write(buffer_set, header.number)
        return inputs

    def run(self, inputs) -> None:
        self._safety.begin_read(inputs.buffer_set, inputs.iteration)
        super().run(inputs)
        self._safety.end_read(inputs.buffer_set, inputs.iteration)


def watch() -> None:
    """All stages that this process opens from now on are watched."""
    loaded_stage.SampledStage = WatchedStage
