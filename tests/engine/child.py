"""``python -m tests.engine.child PIPE [END] WHAT``: what the tests of the supervisor start."""

import os
import signal
import struct
import sys
import time

from sipipe.errors import WorkerDiedError
from sipipe.ipc.parent import Parent
from sipipe.messages.replies import Ready, Warm


def main():
    parent = Parent(int(sys.argv[1]))
    match sys.argv[-1]:
        case "ready":
            parent.doing = lambda: "waits for its test"
            parent.say(Ready())
        case "warm":
            parent.say(Warm())
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            parent.say(ValueError("no such model"))
            return
        case "mourn":
            parent.say(Ready())
            parent.receive()
            parent.say(WorkerDiedError("my neighbour died"))
        case "mumble":
            os.write(int(sys.argv[1]), struct.pack("!i", 9) + b"no pickle")
        case "echo":
            parent.say(parent.receive())
        case "half":  # stops amid a message
            os.write(int(sys.argv[1]), b"\0\0\1\0begun")
            os.kill(os.getpid(), signal.SIGSTOP)
        case "deaf":
            parent.say(Ready())
            os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1000)  # as if it loaded a model


if __name__ == "__main__":
    main()
