"""Anonymous shared memory: what is shared, what is private, and that nothing of it has a name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from manyhands.comm.segment import ALIGNMENT_BYTES, Segment, aligned
from manyhands.engine import local
from manyhands.engine.channel import Channel


def double(channel: Channel) -> None:
    """In a child: double the first four numbers and say what was there."""
    message = channel.receive(30)
    assert message is not None
    numbers = Segment(message.fds[0], 4096).tensor(64, (4,), torch.float32)
    found = numbers.tolist()
    numbers.mul_(2)
    channel.send("found", {"numbers": found})


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment.create(4096, "test")
    yield made
    made.close()


def test_sizes_are_rounded_up_to_the_alignment() -> None:
    assert [aligned(size) for size in (0, 1, 63, 64, 65)] == [0, 64, 64, 64, 128]
    assert ALIGNMENT_BYTES == 64


def test_views_start_on_the_alignment_and_show_the_same_bytes(segment: Segment) -> None:
    tensor = segment.tensor(128, (2, 3), torch.float32)
    assert not tensor.any()
    assert tensor.data_ptr() % ALIGNMENT_BYTES == 0
    tensor[1, 2] = 7
    assert segment.array(128, (6,), np.float32).tolist() == [0, 0, 0, 0, 0, 7]
    assert segment.bytes(128, 24).view(torch.float32)[5] == 7
    assert segment.tensor(0, (0, 5), torch.int64).shape == (0, 5)
    assert segment.tensor(128, (), torch.float32).shape == ()


def test_another_process_sees_what_is_written_and_writes_what_is_seen(segment: Segment) -> None:
    numbers = segment.tensor(64, (4,), torch.float32)
    numbers.copy_(torch.arange(4))
    child = local.spawn("test_segment:double")
    child.channel.send("segment", {}, [segment.fd])
    answer = child.channel.receive(30)
    assert answer is not None and answer.body == {"numbers": [0.0, 1.0, 2.0, 3.0]}
    assert numbers.tolist() == [0.0, 2.0, 4.0, 6.0]
    assert child.wait(10)
    child.close()


def test_a_private_mapping_is_copied_when_it_is_written(segment: Segment) -> None:
    shared = segment.tensor(0, (4,), torch.float32)
    shared.fill_(1)
    private = Segment(segment.fd, 4096, private=True).tensor(0, (4,), torch.float32)
    assert private.tolist() == [1, 1, 1, 1]
    private[0] = 5
    assert shared.tolist() == [1, 1, 1, 1]


def test_views_outlive_the_descriptor_and_leave_nothing_behind() -> None:
    before = set(Path("/dev/shm").iterdir())
    made = Segment.create(1 << 20, "test")
    assert set(Path("/dev/shm").iterdir()) == before
    view, fd = made.tensor(0, (4,), torch.float32), made.fd
    made.close()
    made.close()
    view.fill_(3)
    assert view.sum() == 12
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_pages_cost_memory_only_when_they_are_written() -> None:
    made = Segment.create(1 << 40, "test")
    assert os.fstat(made.fd).st_blocks == 0
    made.close()
