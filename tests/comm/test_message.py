"""Headers: what is written is read, and what does not fit is refused."""

import pytest
import torch

from goose_strategy.comm.message import (
    HEADER_NUMEL,
    TensorMeta,
    check_header,
    decode,
    describe,
    encode,
    key_crc,
    metas_of,
)
from goose_strategy.errors import ScheduleError

TENSORS = [
    torch.zeros(2, 3, 4),
    torch.zeros((), dtype=torch.int64),
    torch.zeros(0, 5, dtype=torch.bfloat16),
    torch.zeros(1, dtype=torch.bool),
]


def test_a_header_is_read_as_it_was_written():
    metas = metas_of(TENSORS)
    values = encode(metas, ("hidden", 2))
    assert len(values) == HEADER_NUMEL
    assert decode(values) == (metas, key_crc(("hidden", 2)))
    assert [meta.nbytes for meta in metas] == [96, 8, 0, 1]
    assert describe(metas[:2]) == "[(2, 3, 4) float32, () int64]"


def test_what_does_not_fit_is_refused():
    with pytest.raises(ScheduleError, match="needs 67 header entries, but there are 64"):
        encode(metas_of([torch.zeros(1, 1)] * 16), "k")
    with pytest.raises(ScheduleError, match=r"dtype=torch\.complex64 cannot be sent"):
        encode((TensorMeta((1,), torch.complex64),), "k")
    with pytest.raises(ScheduleError, match="is no header"):
        decode([1, 2, 3])
    with pytest.raises(ScheduleError, match="is no header"):
        decode([0] * HEADER_NUMEL)


def test_the_receiver_compares_shapes_and_key():
    metas = metas_of(TENSORS[:1])
    sent = decode(encode(metas, "k"))
    assert check_header("k", sent, None, sender=0, receiver=1) == metas
    assert check_header("k", sent, metas, sender=0, receiver=1) == metas
    other = metas_of(TENSORS[1:2])
    with pytest.raises(ScheduleError) as caught:
        check_header("k", sent, other, sender=3, receiver=4)
    assert "'k' is [(2, 3, 4) float32] on rank 3, which sends it" in str(caught.value)
    assert "but [() int64] on rank 4" in str(caught.value)
    assert caught.value.rank == 4
    with pytest.raises(ScheduleError, match="rank 4 expects the message 'j' from rank 3"):
        check_header("j", sent, metas, sender=3, receiver=4)
