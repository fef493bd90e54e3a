"""The order of rows: every row once per epoch, from any position, for every seed."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_kto.data.batches.loader import GlobalBatchSampler
from tests.helpers.messages import raises


def flat(batches: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


def training(num_examples: int = 10, size: int = 4, seed: int = 3) -> GlobalBatchSampler:
    return GlobalBatchSampler(num_examples=num_examples, global_batch_size=size, seed=seed, shuffle=True, drop_last=True)


def validation(num_examples: int, size: int = 4, needs_kl_examples: bool = True) -> GlobalBatchSampler:
    return GlobalBatchSampler(
        num_examples=num_examples,
        global_batch_size=size,
        seed=0,
        shuffle=False,
        drop_last=False,
        needs_kl_examples=needs_kl_examples,
    )


def test_training_batches_are_complete_and_without_repeated_rows() -> None:
    batches = list(training())
    assert [len(batch) for batch in batches] == [4, 4]
    rows = flat(batches)
    assert len(set(rows)) == 8
    assert set(rows) < set(range(10))
    assert len(training()) == 2


def test_the_order_depends_only_on_seed_and_epoch() -> None:
    first, again, other_seed = training(100), training(100), training(100, seed=4)
    epochs = []
    for epoch in (0, 1):
        first.set_position(epoch, 0)
        epochs.append(list(first))
    assert epochs[0] != epochs[1]
    assert sorted(flat(epochs[1])) == list(range(100))
    again.set_position(1, 0)
    assert list(again) == epochs[1]
    assert list(other_seed) != epochs[0]
    assert flat(training(100, size=10)) == flat(epochs[0])


@given(
    num_examples=st.integers(8, 60),
    size=st.integers(2, 8),
    seed=st.integers(0, 5),
    epoch=st.integers(0, 3),
    steps=st.integers(0, 9),
    drop_last=st.booleans(),
)
def test_resuming_at_any_position_gives_the_rest_of_the_epoch(
    num_examples: int, size: int, seed: int, epoch: int, steps: int, drop_last: bool
) -> None:
    sampler = GlobalBatchSampler(
        num_examples=num_examples, global_batch_size=size, seed=seed, shuffle=drop_last, drop_last=drop_last
    )
    sampler.set_position(epoch, 0)
    whole = list(sampler)
    assert len(whole) == len(sampler)
    steps = min(steps, len(whole))
    sampler.set_position(epoch, sum(map(len, whole[:steps])))
    assert list(sampler) == whole[steps:]
    assert list(sampler) == whole[steps:]  # iterating moves nothing
    assert len(sampler) == len(whole)


@pytest.mark.parametrize(
    ("num_examples", "sizes"), [(8, [4, 4]), (10, [4, 4, 2]), (9, [4, 5]), (5, [5]), (3, [3]), (2, [2])]
)
def test_validation_uses_every_row_in_order_without_batches_of_one(num_examples: int, sizes: list[int]) -> None:
    batches = list(validation(num_examples))
    assert [len(batch) for batch in batches] == sizes
    assert flat(batches) == list(range(num_examples))
    assert len(validation(num_examples)) == len(sizes)


def test_resuming_with_another_batch_size_skips_no_row() -> None:
    """Each row of the epoch is seen once, before or after the change."""
    before = training(24, size=4)
    consumed = flat(list(before)[:2])
    after = training(24, size=8)
    after.set_position(0, 8)
    assert sorted(consumed + flat(after)) == list(range(24))


def test_the_order_has_a_hash() -> None:
    """Seed, number of rows and shuffling change the hash; position and batch size do not."""
    samplers = [training(20), training(20, seed=4), training(21), validation(20)]
    hashes = [sampler.order_hash() for sampler in samplers]
    assert len(set(hashes)) == 4
    samplers[0].set_position(3, 4)
    assert samplers[0].order_hash() == hashes[0], "from any position"
    assert training(20, size=2).order_hash() == hashes[0], "independent of the batch size"


def test_impossible_sizes_and_positions_are_refused() -> None:
    with raises(ValueError, "4", "3", "global_batch_size"):
        training(3)
    with raises(ValueError, "global_batch_size", "2", "1"):
        training(size=1)
    with raises(ValueError, "2", "1", "add"):
        validation(1)
    with raises(ValueError, "0", "10", "epoch", "11"):
        training().set_position(0, 11)
    with pytest.raises(ValueError, match="got epoch -1"):
        training().set_position(-1, 0)
