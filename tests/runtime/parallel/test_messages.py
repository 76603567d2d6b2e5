"""Messages come as they were sent, or not at all, and nobody waits for ever."""

import socket
import struct
import threading
import time
from array import array

import numpy as np
import pytest

from llmbuild.runtime.batch import StepBatch
from llmbuild.runtime.parallel.messages import Channel, Kind, StepMessage


@pytest.fixture
def ends():
    """Two connected channels."""
    one, other = socket.socketpair()
    with one, other:
        yield Channel(one), Channel(other)


@pytest.fixture
def raw_end():
    """A channel and the bare socket that it is connected to."""
    one, other = socket.socketpair()
    with one, other:
        yield Channel(one), other


@pytest.mark.parametrize("size", [0, 1, 7, 1 << 21])  # the last is more than a socket holds
def test_message_comes_as_it_was_sent(ends, size):
    payload = bytes(range(256)) * (size // 256 + 1)
    sender = threading.Thread(target=ends[0].send, args=(Kind.STEP, payload[:size]))
    sender.start()
    assert ends[1].receive(30) == (Kind.STEP, payload[:size])
    sender.join()


def test_messages_come_one_by_one_in_order(ends):
    for kind in Kind:
        ends[0].send(kind, bytes(kind))
    assert [ends[1].receive(5) for _ in Kind] == [(kind, bytes(kind)) for kind in Kind]


@pytest.mark.parametrize("sent", [b"", b"\x06", struct.pack("<iI", Kind.STEP, 5) + b"four"])
def test_end_of_the_other_is_told_wherever_it_comes(raw_end, sent):
    channel, other = raw_end
    other.sendall(sent)
    other.close()
    with pytest.raises(ConnectionError, match="gone"):
        channel.receive()


@pytest.mark.parametrize("sent", [b"", b"\x06", struct.pack("<iI", Kind.STEP, 5) + b"four"])
def test_silence_is_told_after_the_time_that_was_given(raw_end, sent):
    channel, other = raw_end
    other.sendall(sent)
    started_s = time.monotonic()
    with pytest.raises(TimeoutError):
        channel.receive(0.1)
    assert 0.09 < time.monotonic() - started_s < 5


def test_time_is_that_of_the_whole_message(raw_end):
    """One who sends a byte now and then doesn't keep the receiver for ever."""
    channel, other = raw_end
    other.sendall(struct.pack("<iI", Kind.STEP, 1000))
    stop = threading.Event()

    def trickle():
        while not stop.wait(0.02):
            other.sendall(b"x")

    sender = threading.Thread(target=trickle)
    sender.start()
    with pytest.raises(TimeoutError):
        channel.receive(0.2)
    stop.set()
    sender.join()


def test_one_who_takes_nothing_is_not_sent_to_for_ever():
    one, other = socket.socketpair()
    with one, other, pytest.raises(TimeoutError):
        Channel(one).send(Kind.STEP, bytes(1 << 24), timeout_s=0.1)


@pytest.mark.parametrize("header", [(0, 3), (99, 3), (int(Kind.STEP), 101)])
def test_what_is_no_message_is_refused_before_it_is_read(raw_end, header):
    channel, other = raw_end
    other.sendall(struct.pack("<iI", *header))
    with pytest.raises(ConnectionError, match="no message"):
        channel.receive(5, max_bytes=100)


@pytest.mark.parametrize("num_steps", [0, 1, 8])
def test_step_comes_with_the_arrays_and_sizes_of_its_parts(num_steps):
    parts = [
        StepBatch(
            token_ids=np.array([5, 6, 7], np.int32),
            positions=np.array([0, 1, 9], np.int32),
            query_start=np.array([0, 2, 3], np.int32),
            kv_lengths=np.array([2, 10], np.int32),
            block_tables=np.array([[1, 0, 0], [2, 3, 4]], np.int32),
            logit_rows=np.array([], np.int32),
        ),
        StepBatch(
            token_ids=np.array([8], np.int32),
            positions=np.array([2], np.int32),
            query_start=np.array([0, 1], np.int32),
            kv_lengths=np.array([3], np.int32),
            block_tables=np.array([[1]], np.int32),
            logit_rows=np.array([0], np.int32),
        ),
    ]
    message = StepMessage.of(parts, num_steps)
    assert message.sizes == array("i", [3, 2, 0, 3, 1, 1, 1, 1])
    first = [5, 6, 7, 0, 1, 9, 0, 2, 3, 2, 10, 1, 0, 0, 2, 3, 4]
    assert message.arrays == array("i", [*first, 8, 2, 0, 1, 3, 1, 0])
    assert StepMessage.decode(bytearray(message.encode())) == message
