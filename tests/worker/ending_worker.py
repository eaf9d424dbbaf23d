"""A worker's process without vLLM's worker, which is told to end: see test_ending.py.

Arguments: the descriptor of its control pipe, what it does when that comes, and a file that says
that it does. It is the last of two stages; nothing comes on its link.
"""

import dataclasses
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.worker.arithmetic_stages import Requests, Stages
from tests.worker.test_main import LoadedMain, call, iteration

from sipipe.ipc.parent import Parent
from sipipe.worker import main as worker_main


class Reader:
    """BIC-I, which brings these messages and then nothing."""

    def __init__(self, messages):
        self.messages = messages

    @contextmanager
    def receive(self):
        if not self.messages:
            threading.Event().wait()
        yield SimpleNamespace(parts=self.messages.pop(0))

    def close(self):
        pass


def main():
    parent, doing, said = Parent(int(sys.argv[1])), sys.argv[2], Path(sys.argv[3])
    requests = Requests()
    requests.add("a", [3, 4, 5])
    messages = {
        "waits for hidden states of iteration 0": [iteration(0, requests.schedule({"a": 3})[0])],
        "runs a call": [call(1, "hang")],
        "waits for inputs": [],
    }[doing]
    stages = Stages(2, threads=False)
    loop = stages.loops[1]
    wrapper = SimpleNamespace(hang=lambda: time.sleep(600))

    def tell():
        while f"(device thread) {doing}" not in loop.doing():
            time.sleep(0.01)
        said.write_text(loop.doing())

    class Main(LoadedMain):
        def __init__(self, boot, parent, _):
            super().__init__(boot, parent, loop, wrapper)
            threading.Thread(target=tell, daemon=True).start()

        def close(self):
            super().close()
            said.write_text("closed")

    parent.receive = lambda: "BIC-I's endpoint"
    worker_main.Main = Main
    worker_main.DispatchReader = lambda *_: Reader(messages)
    # What it cleans up for a dead engine cannot be removed: that keeps no process.
    boot = dataclasses.replace(stages.boots[1], distributed_init_method="file:///")
    worker_main.worker_main(boot, parent, [])


if __name__ == "__main__":
    main()
