"""A stage at one end of a link, and how it ends: ``dying_stage.py [DESCRIPTOR] HOW ENDPOINT``."""

import base64
import ctypes
import itertools
import os
import pickle
import signal
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

import torch
from tests.ipc.link import stand_in

from sipipe.ipc.link.endpoint import open_receiver, open_sender
from sipipe.ipc.link.packets import PacketConnection
from sipipe.ipc.link.shm import QUICK_BYTES


def hidden(num_tokens, value, width=16):
    states = torch.full((num_tokens, width), float(value))
    return {"hidden_states": states, "residual": torch.ones(num_tokens, width)}


def say(what="ready"):
    print(what, flush=True)


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


class Stage:
    def __init__(self, endpoint, sock):
        self.endpoint, self.sock = endpoint, sock
        if endpoint.device == "cuda":
            stand_in.use()

    def send_one(self):
        sender = open_sender(self.endpoint, self.sock)
        sender.send(0, 4, hidden(4, 0))
        sender.flush(60)
        sender.wait_sent(60)  # on a GPU: it has been copied
        return sender

    def sends_one_then_waits(self):
        sender = self.send_one()
        say()
        signal.pause()
        sender.close()

    def dies_amid_the_copy(self):
        sender = self.send_one()
        say()
        move = ctypes.memmove

        def half(to, start, nbytes):
            move(to, start, nbytes // 2)
            die()

        ctypes.memmove = half
        stand_in.StandInDevice.copy = die
        sender.send(1, 4, hidden(4, 1, width=QUICK_BYTES // 16))  # too large to be quick
        sender.flush(60)

    def dies_after_the_copy(self):
        sender = self.send_one()
        say()
        PacketConnection.send = die
        sender.send(1, 4, hidden(4, 1))

    def dies_before_the_memory(self):
        send = PacketConnection.send

        def send_or_die(connection, packet, descriptor=None):
            if descriptor is not None:
                die()
            send(connection, packet)

        PacketConnection.send = send_or_die
        self.send_one()

    def leaves_a_child_behind(self):
        sender = self.send_one()
        child = os.fork()
        if child:
            say(child)
        signal.pause()
        sender.close()

    def sends_for_ever(self):
        sender = open_sender(self.endpoint, self.sock)
        for i in itertools.count():
            sender.send(i, 1024, {"h": torch.full((1024, 8192), i % 100, dtype=torch.int8)})

    def takes_one_then_waits(self):
        receiver = open_receiver(self.endpoint, self.sock)
        receiver.take(0, 4, 60)
        if self.endpoint.name != "forks" or os.fork():
            say()
        signal.pause()
        receiver.close()


if __name__ == "__main__":
    *given, how, endpoint = sys.argv[1:]
    end = socket.socket(fileno=int(given[0])) if given else None
    getattr(Stage(pickle.loads(base64.b64decode(endpoint)), end), how)()
