"""Names of hosts come to be in any order: each is waited for, and what for is said."""

import threading

import pytest

from sipipe.errors import ConfigError, ResourceError
from sipipe.ipc import tcp
from sipipe.ipc.tcp import address_of, is_here

HERE = "127.0.0.1"
NOT_HERE = "192.0.2.7"


class Clock:
    """Time that passes only where somebody waits for it."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(tcp, "time", clock)
    return clock


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr(tcp, "tell", lines.append)
    return lines


def answers(monkeypatch, *said):
    """A resolver that gives these one after the other, the last one again and again."""
    left = list(said)

    def look_up(_host):
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(tcp, "_look_up", look_up)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("option", ["--master-addr", "VLLM_HOST_IP"])
def test_a_name_may_come_later_on_every_host(monkeypatch, clock, said, option, own):
    answers(monkeypatch, *[OSError(-2, "Name or service not known")] * 125, HERE)
    assert address_of("sipipe-0.sipipe", option, 600.0, own=own) == HERE
    assert 125 <= clock.now < 600
    assert len(said) == 12, "every 10 s"
    assert all(f"waits for {option} sipipe-0.sipipe" in line for line in said)
    assert "Name or service not known" in said[0]


def test_a_name_that_means_an_earlier_host_is_waited_for_where_it_is_ones_own(
    monkeypatch, clock, said
):
    answers(monkeypatch, *[NOT_HERE] * 20, HERE)
    assert address_of("sipipe-0.sipipe", "--master-addr", 600.0, own=True) == HERE
    assert "it is 192.0.2.7, which is not an address of this host" in said[0]
    answers(monkeypatch, NOT_HERE)
    assert address_of("sipipe-0.sipipe", "--master-addr", 600.0) == NOT_HERE, "another host's"


def test_one_that_never_comes_is_no_wrong_configuration(monkeypatch, clock, said):
    answers(monkeypatch, OSError(-2, "Name or service not known"))
    with pytest.raises(ResourceError, match=r"no such host .* after 600 s.*start_timeout") as error:
        address_of("nowhere.invalid", "--master-addr", 600.0)
    assert error.value.status == 1, "--restart goes on"
    assert 600 <= clock.now < 610


def test_a_name_that_no_resolver_is_asked_for_is_waited_for_in_vain(monkeypatch, clock, said):
    """Python's own encoding of names refuses some, and a thread that ends so answers nobody."""
    answers(monkeypatch, UnicodeError("label empty or too long"))
    with pytest.raises(ResourceError, match=r"no such host .label empty or too long., after 600 s"):
        address_of("odd.invalid", "--master-addr", 600.0)


def test_a_resolver_that_hangs_does_not_silence_it(monkeypatch, said):
    """Real time: a resolver is bounded by nothing of ours."""
    release = threading.Event()
    monkeypatch.setattr(tcp, "SAID_SECONDS", 0.05)
    monkeypatch.setattr(tcp, "_look_up", lambda _: release.wait(60) and HERE)

    def tell(line):
        said.append(line)
        if len(said) == 3:
            release.set()

    monkeypatch.setattr(tcp, "tell", tell)
    assert address_of("slow.invalid", "--master-addr", 60.0) == HERE
    assert "no answer from the resolver yet" in said[0]


@pytest.mark.parametrize(
    "text", ["", "10.0.0.256", "a b", "http://host", "host:29501", "a..b", ".a"]
)
def test_what_can_never_be_an_address_is_refused_at_once(monkeypatch, text):
    monkeypatch.setattr(tcp, "_look_up", None)
    with pytest.raises(ConfigError, match=r"--master-addr .* is neither a host's name nor"):
        address_of(text, "--master-addr", 600.0)


@pytest.mark.parametrize("text", ["0.0.0.0", "::", "224.0.0.1", "ff02::1", "255.255.255.255"])
@pytest.mark.parametrize("own", [False, True])
def test_an_address_of_no_host_is_refused_at_once(monkeypatch, text, own):
    """Another host would connect to itself, and wait until `start_timeout`."""
    monkeypatch.setattr(tcp, "_look_up", None)
    with pytest.raises(ConfigError, match=r"--master-addr .* no host's own address"):
        address_of(text, "--master-addr", 600.0, own=own)


def test_addresses_ask_nobody():
    assert address_of(NOT_HERE, "--master-addr", 0.0, own=True) == NOT_HERE
    assert address_of("::1", "--master-addr", 0.0) == "::1"
    assert is_here(HERE)
    assert not is_here(NOT_HERE)
