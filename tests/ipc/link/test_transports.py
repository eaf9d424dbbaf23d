"""One suite for every transport: what a link promises, whatever carries it."""

from __future__ import annotations

import concurrent.futures
import pickle
import queue
import threading
from collections.abc import Iterator

import pytest
import torch

from sipipe.errors import StallError
from sipipe.ipc.link.endpoint import LinkEndpoint, open_receiver, open_sender
from sipipe.ipc.link.errors import LinkClosedError, TransferMismatchError
from sipipe.ipc.link.receiver import Receiver
from sipipe.ipc.link.sender import Sender

BOUND = 30.0
H = 24


@pytest.fixture
def link(endpoint: LinkEndpoint) -> Iterator[tuple[Sender, Receiver]]:
    with (
        open_sender(pickle.loads(pickle.dumps(endpoint))) as sender,
        open_receiver(endpoint) as receiver,
    ):
        yield sender, receiver


def hidden(num_tokens: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict:
    generator = torch.Generator().manual_seed(seed)
    return {
        "hidden_states": torch.randn(num_tokens, H, generator=generator).to(dtype),
        "residual": torch.randn(num_tokens, H, generator=generator).to(dtype),
    }


def assert_equal(got: dict, sent: dict) -> None:
    assert list(got) == list(sent)
    for key, tensor in sent.items():
        assert got[key].dtype == tensor.dtype
        assert got[key].shape == tensor.shape
        assert torch.equal(got[key], tensor), key


def exchange(link: tuple[Sender, Receiver], iteration: int, num_tokens: int, sent: dict) -> None:
    sender, receiver = link
    receiver.post(iteration, num_tokens)
    sender.send(iteration, num_tokens, sent)
    assert_equal(receiver.take(iteration, BOUND), sent)
    receiver.release(iteration)


def test_sizes_that_change_every_iteration(link):
    for iteration, num_tokens in enumerate([1, 64, 7, 0, 33, 2, 64, 1]):
        exchange(link, iteration, num_tokens, hidden(num_tokens, iteration))


def test_one_description_then_data_alone(link):
    for iteration in range(10):
        exchange(link, iteration, iteration + 1, hidden(iteration + 1, iteration))
    link[0].wait_sent(BOUND)
    sender, receiver = (end.statistics() for end in link)
    assert (sender.metadata_messages, sender.data_messages) == (1, 10)
    assert (receiver.metadata_messages, receiver.data_messages) == (1, 10)


def test_a_new_structure_is_announced_once_and_remembered(link):
    for iteration in range(9):
        sent = hidden(5, iteration)
        if iteration % 3 == 1:
            sent = {"hidden_states": torch.full((5, 2 * H), iteration, dtype=torch.float32)}
        if iteration % 3 == 2:
            sent = {**sent, "deepstack": torch.arange(5 * 3 * 4).view(3, 5, 4)}
        exchange(link, iteration, 5, sent)
    assert link[0].statistics().metadata_messages == 3


def test_a_fixed_dimension_that_looked_like_tokens(link):
    """Captured at 8 tokens, [8, H] could be either; 9 tokens tell."""
    for iteration, num_tokens in enumerate([8, 9, 8, 3]):
        sent = {"states": hidden(num_tokens)["residual"], "fixed": torch.randn(8, H)}
        exchange(link, iteration, num_tokens, sent)


def test_tensors_that_are_not_contiguous(link):
    wide = torch.randn(6, 2 * H)
    exchange(link, 0, 6, {"a": wide[:, ::2], "b": wide.T[:H].T})


def test_posted_ahead_and_sent_ahead(link):
    sender, receiver = link
    sent = [hidden(i + 1, i) for i in range(3)]
    for i in range(3):
        receiver.post(i, i + 1)
    for i in range(3):
        sender.send(i, i + 1, sent[i])
    taken = [receiver.take(i, BOUND) for i in range(3)]
    for got, expected in zip(taken, sent, strict=True):
        assert_equal(got, expected)
    for i in (1, 0, 2):  # any order
        receiver.release(i)
    exchange(link, 3, 4, hidden(4, 9))


def test_views_stay_until_release(link):
    """Two more iterations arrive while the first is held; its data do not move."""
    sender, receiver = link
    first = hidden(4, 1)
    for i in range(3):
        receiver.post(i, 4)
    sender.send(0, 4, first)
    held = receiver.take(0, BOUND)
    for i in (1, 2):
        sender.send(i, 4, hidden(4, 10 + i))
        receiver.take(i, BOUND)
        receiver.release(i)
    assert_equal(held, first)
    held["residual"].zero_()  # the model may normalize in place
    receiver.release(0)


def test_the_sender_waits_when_depth_iterations_are_not_released(link):
    sender, receiver = link
    for i in range(4):
        receiver.post(i, 2)
    for i in range(3):
        sender.send(i, 2, hidden(2, i))
    with pytest.raises(StallError, match=r"stage0-1\.r0.*iteration 3.*3 iterations behind"):
        sender.send(3, 2, hidden(2, 3), timeout=0.05)
    unblocked = threading.Thread(target=lambda: sender.send(3, 2, hidden(2, 3)))
    unblocked.start()
    receiver.take(0, BOUND)
    receiver.release(0)
    unblocked.join(BOUND)
    assert not unblocked.is_alive()
    for i in (1, 2, 3):
        assert_equal(receiver.take(i, BOUND), hidden(2, i))
        receiver.release(i)


def test_a_large_frame_is_sent_by_a_thread_and_may_be_waited_for(link):
    sender, receiver = link
    receiver.post(0, 64)
    tensors = {"hidden_states": torch.randn(64, 1 << 14)}
    expected = tensors["hidden_states"].clone()
    sender.send(0, 64, tensors)
    got = receiver.take(0, BOUND)
    sender.wait_sent(BOUND)
    tensors["hidden_states"].zero_()
    assert torch.equal(got["hidden_states"], expected)
    assert sender.statistics().inline_messages == 0


def test_frames_that_were_posted_ahead(link):
    """By another thread, as the scheduling outputs come; some in vain, some not at all."""
    sender, receiver = link
    wide = 3000
    sizes = [1 + iteration * 7 % 64 for iteration in range(120)]
    asked: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def tensors(iteration: int) -> dict[str, torch.Tensor]:
        dtype = torch.float16 if iteration % 50 == 49 else torch.bfloat16
        return {
            "hidden_states": torch.full((sizes[iteration], wide), iteration, dtype=dtype),
            "residual": torch.full((sizes[iteration], wide), -iteration, dtype=dtype),
        }

    def post() -> None:
        while (iteration := asked.get()) is not None:
            wrong = iteration % 9 == 5
            sender.post(iteration, sizes[iteration] - wrong)

    def receive() -> None:
        for iteration, size in enumerate(sizes):
            receiver.post(iteration, size)
            got = receiver.take(iteration, BOUND)
            assert_equal(got, tensors(iteration))
            receiver.release(iteration)

    posting = threading.Thread(target=post)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        received = pool.submit(receive)
        posting.start()
        for iteration, size in enumerate(sizes):
            for ahead in (1, 2):
                if iteration % 11 and iteration + ahead < len(sizes):
                    asked.put(iteration + ahead)
            sender.send(iteration, size, tensors(iteration))
        asked.put(None)
        posting.join(BOUND)
        received.result(BOUND)
    sender.wait_sent(BOUND)
    assert sender.statistics().data_messages == len(sizes)


def test_a_posted_frame_has_all_but_its_tensors(link, endpoint):
    sender, _ = link
    large = {"hidden_states": torch.randn(64, 3000), "residual": torch.randn(64, 3000)}
    for iteration in range(5):
        sender.post(iteration, 64)
        sender.post(iteration, 64)  # once is enough
        exchange(link, iteration, 64, large)
        sender.wait_sent(BOUND)
    sender.post(5, 65)  # send() says what is wrong with it
    by_rows = endpoint.kind in ("shm", "socket")
    assert sender.statistics().prepared_messages == (4 if by_rows else 0)
    sender.post(6, 64)
    sender.post(7, 64)
    exchange(link, 7, 64, large)  # 6 has no tokens after all
    sender.close()
    sender.post(8, 64)
    with pytest.raises(LinkClosedError):
        sender.send(8, 64, large)


def test_a_number_of_tokens_that_was_not_posted_is_an_error(link):
    sender, receiver = link
    receiver.post(0, 5)
    sender.send(0, 6, hidden(6))
    with pytest.raises(TransferMismatchError, match="expected iteration 0 with 5 tokens"):
        receiver.take(0, BOUND)
    receiver.post(1, 6)
    with pytest.raises(TransferMismatchError):  # the link stays broken
        receiver.take(1, BOUND)


def test_another_iteration_than_posted_is_an_error(link):
    sender, receiver = link
    receiver.post(4, 5)
    sender.send(5, 5, hidden(5))
    with pytest.raises(TransferMismatchError, match="iteration 5"):
        receiver.take(4, BOUND)


def test_nothing_comes(link):
    _, receiver = link
    receiver.post(0, 1)
    with pytest.raises(StallError, match=r"stage0-1\.r0.*iteration 0.*previous stage"):
        receiver.take(0, 0.02)
    exchange_after = hidden(1)
    link[0].send(0, 1, exchange_after)
    assert_equal(receiver.take(0, BOUND), exchange_after)


def test_misuse_names_what_is_wrong(link):
    sender, receiver = link
    with pytest.raises(ValueError, match=r"65 tokens.*max_tokens=64"):
        sender.send(0, 65, hidden(65))
    with pytest.raises(ValueError, match=r"65 tokens.*max_tokens=64"):
        receiver.post(0, 65)
    with pytest.raises(ValueError, match="not posted"):
        receiver.take(0, 0)
    with pytest.raises(ValueError, match="not held"):
        receiver.release(0)
    with pytest.raises(TypeError, match="'x' is a int"):
        sender.send(0, 1, {"x": 1})
    receiver.post(3, 1)
    with pytest.raises(ValueError, match="3 posted after 3"):
        receiver.post(3, 1)


def test_a_sender_that_closes_ends_the_link_after_its_last_frame(link):
    sender, receiver = link
    exchange(link, 0, 3, hidden(3))
    receiver.post(1, 3)
    receiver.post(2, 3)
    sender.send(1, 3, hidden(3, 1))
    sender.close()
    assert_equal(receiver.take(1, BOUND), hidden(3, 1))
    with pytest.raises(LinkClosedError, match="previous stage"):
        receiver.take(2, BOUND)
    with pytest.raises(LinkClosedError):
        sender.send(2, 3, hidden(3))


def test_a_receiver_that_closes_ends_a_waiting_sender(link):
    sender, receiver = link
    for i in range(3):
        receiver.post(i, 1)
        sender.send(i, 1, hidden(1))
    receiver.take(0, BOUND)
    closing = threading.Timer(0.05, receiver.close)
    closing.start()
    with pytest.raises(LinkClosedError, match="next stage"):
        sender.send(3, 1, hidden(1))
    closing.join()


def test_closing_wakes_a_waiting_take(link):
    _, receiver = link
    receiver.post(0, 1)
    closing = threading.Timer(0.05, receiver.close)
    closing.start()
    with pytest.raises(LinkClosedError, match="this receiver"):
        receiver.take(0, BOUND)
    closing.join()


def test_closing_wakes_a_waiting_send(link):
    sender, receiver = link
    for i in range(3):
        receiver.post(i, 1)
        sender.send(i, 1, hidden(1))
    receiver.take(0, BOUND)
    closing = threading.Timer(0.05, sender.close)
    closing.start()
    with pytest.raises(LinkClosedError, match="this sender"):
        sender.send(3, 1, hidden(1))
    closing.join()


def test_closing_before_the_other_side_exists(endpoint):
    sender = open_sender(endpoint)
    sender.send(0, 1, hidden(1))
    sender.close(timeout=0.05)
    receiver = open_receiver(endpoint)
    receiver.close()
