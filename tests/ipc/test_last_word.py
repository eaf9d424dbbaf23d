"""An engine's last word reaches whoever started it, and nobody else."""

import multiprocessing
import os

import pytest

from sipipe.ipc import last_word as words
from sipipe.ipc.last_word import hold_last_word, last_word, leave_last_word, take_last_word


@pytest.fixture(autouse=True)
def _no_place(monkeypatch):
    monkeypatch.setattr(words, "_held", held := {})
    monkeypatch.setenv(words.VARIABLE, "")
    yield
    for place in held.values():
        os.close(int(place.name))


def _in_another(run):
    child = multiprocessing.get_context("spawn").Process(target=run)
    child.start()
    child.join()
    assert child.exitcode == 0


def _say_two():
    hold_last_word()  # that of who started this process
    leave_last_word("stage worker stage1.0\n  was killed")
    leave_last_word("an error that followed")


def test_the_first_word_of_another_process_is_heard_in_one_line():
    leave_last_word("nobody listens")
    assert last_word() == ""
    hold_last_word()
    _in_another(_say_two)
    assert last_word() == "stage worker stage1.0 was killed"
    assert take_last_word()
    assert last_word() == ""
    leave_last_word("the next engine's")
    assert last_word() == "the next engine's"
    hold_last_word()
    assert last_word() == "", "the next engine is about to start"


def test_a_place_whose_owner_is_gone_is_not_another_process_s_file(monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.write_text("of somebody else")
    with file.open("r+") as opened:
        monkeypatch.setenv(words.VARIABLE, f"/proc/{os.getpid()}/fd/{opened.fileno()}")
        leave_last_word("a word")
        assert last_word() == ""
    assert file.read_text() == "of somebody else"
    hold_last_word()
    leave_last_word("a word")
    assert last_word() == "a word"
