"""What encryption between hosts costs: ``python -m benchmarks.encryption``.

Messages of 33.6 MB (two tensors of 1,024 tokens, 8,192 wide, in bfloat16) cross a ZeroMQ connection
over loopback, in the frames of :mod:`sipipe.ipc.frames`: plain; by CURVE, as SiPipe has it, which
ZeroMQ's own thread encrypts; and sealed by AES-256-GCM in the thread that sends. Of each end the CPU
seconds a GB: on a busy machine they say more than the time does. Then for how long one call of AES-GCM
keeps other Python threads from running, beside a hash that lets them run.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import zmq
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from sipipe.ipc.frames import FRAME

SIZE = 2 * 1024 * 8192 * 2
"""Bytes of a message."""
WARM = 2
MESSAGES = 12
WAYS = ("plain", "curve", "aes-gcm")
HELD = 256 << 20
"""Bytes of the call during which other threads are watched."""

Keys = tuple[bytes, bytes]


def main() -> None:
    print(f"{'way':8} {'sender, CPU s/GB':>18} {'receiver, CPU s/GB':>18} {'GB/s':>6}")
    context = multiprocessing.get_context("spawn")
    listener: Keys = zmq.curve_keypair()
    connector: Keys = zmq.curve_keypair()
    for way in WAYS:
        answers, theirs = context.Pipe()
        receiver = context.Process(target=receive, args=(way, listener, theirs))
        receiver.start()
        sent, seconds = send(way, listener[0], connector, answers.recv())
        received = answers.recv()
        receiver.join()
        moved = (MESSAGES - WARM) * SIZE / 1e9
        print(f"{way:8} {sent / moved:18.2f} {received / moved:18.2f} {moved / seconds:6.2f}")
    data = os.urandom(HELD)
    cipher = AESGCM(b"k" * 32)
    for name, call in (
        ("AES-GCM", lambda: cipher.encrypt(b"n" * 12, data, None)),
        ("SHA-256", lambda: hashlib.sha256(data).digest()),
    ):
        longest, took = longest_wait(call)
        print(f"{name}: other threads wait {longest * 1e3:.0f} of {took * 1e3:.0f} ms")


def receive(way: str, keys: Keys, answers: Any) -> None:
    """Be the receiving end; says its port, then its CPU seconds."""
    sock = zmq.Context().socket(zmq.PAIR)
    if way == "curve":
        sock.curve_server = 1
        sock.curve_secretkey = keys[1]
    answers.send(sock.bind_to_random_port("tcp://127.0.0.1"))
    target = memoryview(bytearray(SIZE))
    cipher = AESGCM(b"k" * 32)
    began = 0.0
    for message in range(MESSAGES):
        if message == WARM:
            began = time.process_time()
        filled = 0
        for nonce in nonces(message):
            frame = sock.recv(copy=False).buffer
            part = cipher.decrypt(nonce, frame, None) if way == "aes-gcm" else frame
            target[filled : filled + len(part)] = part
            filled += len(part)
        sock.send(b"")
    answers.send(time.process_time() - began)


def send(way: str, server: bytes, keys: Keys, port: int) -> tuple[float, float]:
    """Be the sending end; returns its CPU seconds and the time that passed."""
    sock = zmq.Context().socket(zmq.PAIR)
    if way == "curve":
        sock.curve_serverkey = server
        sock.curve_publickey, sock.curve_secretkey = keys
    sock.connect(f"tcp://127.0.0.1:{port}")
    source = memoryview(os.urandom(SIZE))
    cipher = AESGCM(b"k" * 32)
    used = began = 0.0
    for message in range(MESSAGES):
        if message == WARM:
            used = time.process_time()
            began = time.monotonic()
        for number, nonce in enumerate(nonces(message)):
            part = source[number * FRAME : (number + 1) * FRAME]
            if way == "aes-gcm":
                sock.send(cipher.encrypt(nonce, part, None), copy=False)
            else:
                sock.send(part)
        sock.recv()
    return time.process_time() - used, time.monotonic() - began


def nonces(message: int) -> Iterator[bytes]:
    """One for each frame of a message."""
    for frame in range(-(-SIZE // FRAME)):
        yield message.to_bytes(4, "big") + frame.to_bytes(8, "big")


def longest_wait(call: Callable[[], object]) -> tuple[float, float]:
    """For how long another thread did not run while ``call`` did, at most, and how long that took."""
    sys.setswitchinterval(1e-4)
    longest = [0.0]
    ended = threading.Event()

    def count() -> None:
        last = time.monotonic()
        while not ended.is_set():
            now = time.monotonic()
            longest[0] = max(longest[0], now - last)
            last = now

    other = threading.Thread(target=count)
    other.start()
    began = time.monotonic()
    call()
    took = time.monotonic() - began
    ended.set()
    other.join()
    return longest[0], took


if __name__ == "__main__":
    main()
