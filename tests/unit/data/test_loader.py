"""The data loader: order of the rows, shards of the ranks with equal work, workers, and resuming in an epoch."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterable
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_kto.data.batches.collate import kto_custom_collate
from nemo_kto.data.batches.dataset import DPOExample, KTODataset, KTOExample
from nemo_kto.data.batches.loader import (
    DPOCosts,
    GlobalBatchSampler,
    KTOCosts,
    balanced_shares,
    build_dataloader,
    by_prompt,
    every_example,
    every_nth,
    gathered_examples,
)
from tests.helpers.messages import raises
from tests.unit.data.tiny_data import TOKENIZER, numbered_rows, train_split, write_rows

EOS = TOKENIZER.eos_token_id


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> KTODataset:
    folder = tmp_path_factory.mktemp("data")
    path = write_rows(folder / "a.jsonl", numbered_rows(26))
    return train_split(path, folder, seq_length=16, seed=0)


def loader(
    dataset: KTODataset, *, rank: int = 0, size: int = 1, num_workers: int = 0, training: bool = True, batch: int = 8
) -> Any:
    order: dict[str, Any] = {"num_examples": len(dataset), "global_batch_size": batch, "seed": 1}
    sampler = GlobalBatchSampler(**order, shuffle=training, drop_last=training)
    return build_dataloader(
        dataset=dataset,
        sampler=sampler,
        rank=rank,
        size=size,
        collate=partial(kto_custom_collate, eos_id=EOS, seq_length=16, pad_to_multiple=16),
        num_workers=num_workers,
    )


def same(a: list[dict], b: list[dict]) -> bool:
    return len(a) == len(b) and all(
        x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x) for x, y in zip(a, b, strict=True)
    )


def test_all_examples_are_the_first_epoch_and_its_remainder(dataset: KTODataset) -> None:
    """A cached reference evaluates each example once, in the order of the first epoch."""
    training = loader(dataset)
    training.batch_sampler.set_position(3, 8)  # for any position of a run
    everything = every_example(training)
    batches = list(everything)
    assert (len(everything), [len(batch["samples"]) for batch in batches]) == (4, [8, 8, 8, 2])
    assert same(batches[:3], list(loader(dataset)))
    texts = {tuple(tokens) for batch in batches for tokens in batch["samples"].tolist()}
    assert len(texts) == len(dataset) == 26


def test_the_order_in_which_ranks_gather_their_examples(dataset: KTODataset) -> None:
    ranks = [loader(dataset, rank=rank, size=3, training=False) for rank in range(3)]
    gathered = [tokens for batch in zip(*ranks, strict=True) for share in batch for tokens in share["samples"].tolist()]
    (whole,) = list(loader(dataset, training=False, batch=26))
    examples = gathered_examples(ranks[0], 26)
    order = [*examples]
    assert order[:4] == [0, 3, 6, 1]
    assert [whole["samples"][number].tolist() for number in order] == gathered
    answers = [[*map(list, each.answers.values())] for each in examples.values()]
    assert answers == [[*map(list, dataset[number].answers.values())] for number in order]
    assert [*gathered_examples(ranks[0], 16)] == order[:16], "of two batches"


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("training", [True, False])
def test_the_ranks_share_each_global_batch(dataset: KTODataset, size: int, training: bool) -> None:
    whole = list(loader(dataset, training=training))
    assert [len(batch["samples"]) for batch in whole] == ([8, 8, 8] if training else [8, 8, 8, 2])
    for rank in range(size):
        share = list(loader(dataset, rank=rank, size=size, training=training))
        assert len(share) == len(whole)
        for mine, batch in zip(share, whole, strict=True):
            for name in batch:
                assert torch.equal(mine[name], batch[name][rank::size]), name
    if size > 2 and not training:
        assert share[-1]["samples"].shape == (0, 16)


def test_kl_examples_combine_a_prompt_with_the_next_answer(dataset: KTODataset) -> None:
    batch = next(iter(loader(dataset, training=False)))
    texts = [
        TOKENIZER.decode(row[:length]) for row, length in zip(batch["kl_samples"], batch["kl_sample_lengths"], strict=True)
    ]
    assert texts == [f"row {i}: answer {(i + 1) % 8}<|im_end|>" for i in range(8)]
    assert batch["preference"].tolist() == [1, 0] * 4


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resuming_in_the_middle_of_an_epoch(dataset: KTODataset, num_workers: int) -> None:
    reference = loader(dataset)
    expected = []
    for epoch in (0, 1, 2):
        reference.batch_sampler.set_position(epoch, 0)
        expected += list(reference)
    assert len(expected) == 9

    first = loader(dataset, num_workers=num_workers)
    got = []
    for batch in first:  # killed after two of three batches, while workers have read on
        got.append(batch)
        if len(got) == 2:
            break
    again = loader(dataset, num_workers=num_workers)
    for epoch, consumed in ((0, 16), (1, 0), (2, 0)):
        again.batch_sampler.set_position(epoch, consumed)
        got += list(again)
    assert same(got, expected)


def test_stopping_early_and_starting_over_with_the_same_workers(dataset: KTODataset) -> None:
    expected = list(loader(dataset, training=False))
    workers = loader(dataset, training=False, num_workers=2)
    for _ in range(3):
        for k, batch in enumerate(workers):
            assert same([batch], [expected[k]])
            if k == 1:
                break
    assert same(list(workers), expected)


def test_workers_survive_signals_to_the_rank(dataset: KTODataset) -> None:
    """Some clusters send a signal to every process of a job."""
    expected = list(loader(dataset, training=False))
    others = multiprocessing.active_children()  # such as the ranks of other tests
    batches = iter(loader(dataset, training=False, num_workers=1))
    got = [next(batches)]
    (worker,) = set(multiprocessing.active_children()) - set(others)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        assert worker.pid is not None
        os.kill(worker.pid, number)
    assert same([*got, *batches], expected)


def test_reading_draws_no_random_number_from_the_global_generator(dataset: KTODataset) -> None:
    before = torch.get_rng_state()
    list(loader(dataset))
    assert torch.equal(torch.get_rng_state(), before)


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


def cost(length: int) -> float:
    return 100.0 * length + length * (length + 1) / 2


def kto_example(prompt: list[int], answer: int) -> KTOExample:
    return KTOExample(prompt_ids=prompt, response_ids=[0] * answer, desirable=True)


def test_the_cost_of_a_kto_example_includes_its_kl_example() -> None:
    """Prompts of 1, 2 and 3 tokens; each KL example has the answer of the next, cut to 7 tokens in all."""
    batch = [kto_example([1], 2), kto_example([1, 2], 4), kto_example([1, 2, 3], 6)]
    samples = [4 * (300 + 6), 4 * (600 + 21), 4 * (900 + 45)]
    costs = KTOCosts(cost=lambda length: 4 * cost(length), kl_cost=lambda length: 2 * cost(length), seq_length=7)
    kl = [2 * (500 + 15), 2 * (700 + 28), 2 * (500 + 15)]
    assert costs(batch) == [a + b for a, b in zip(samples, kl, strict=True)]
    assert KTOCosts(cost=lambda length: 4 * cost(length), kl_cost=None, seq_length=7)(batch) == samples


def test_the_cost_of_a_pair_includes_both_answers() -> None:
    pair = DPOExample(prompt_ids=[1], chosen_ids=[2, 3], rejected_ids=[4], chosen_reward=1.0, rejected_reward=0.0)
    assert DPOCosts(cost=cost)([pair]) == [306 + 203]


@given(costs=st.lists(st.floats(0.1, 100.0), max_size=40), ranks=st.integers(1, 6))
def test_each_example_is_on_one_rank_and_costs_are_balanced(costs: list[float], ranks: int) -> None:
    shares = balanced_shares(costs, ranks=ranks)
    assert sorted(number for share in shares for number in share) == list(range(len(costs)))
    sums = [sum(costs[number] for number in share) for share in shares]
    assert max(sums) - min(sums) <= max(costs, default=0.0) + 1e-9, "always the rank with the least work"


def test_costs_with_shared_prompts() -> None:
    """Sample and KL example share their prompt in the passes of the reference, the answers of a pair in all passes."""
    batch = [kto_example([1], 2), kto_example([1, 2], 4)]
    settings: dict[str, Any] = {"cost": lambda length: 4 * cost(length), "kl_cost": lambda length: 2 * cost(length)}
    plain = KTOCosts(**settings, seq_length=9)(batch)
    costs = KTOCosts(**settings, shared_cost=cost, seq_length=9)
    assert costs(batch) == [plain[0] - cost(1), plain[1] - cost(2)]
    assert costs.saved(batch) == [5 * cost(1), 5 * cost(2)]
    assert KTOCosts(cost=cost, kl_cost=None, shared_cost=cost, seq_length=9).saved(batch) == [cost(1), cost(2)]
    pair = DPOExample(prompt_ids=[1], chosen_ids=[2, 3], rejected_ids=[4], chosen_reward=1.0, rejected_reward=0.0)
    assert DPOCosts(cost=cost, shared_cost=cost)([pair]) == [306 + 203 - 101]
    assert DPOCosts(cost=cost, shared_cost=cost).saved([pair]) == [101]


COSTS = KTOCosts(cost=cost, kl_cost=None, seq_length=99)


def test_equal_prompts_are_divided_if_one_rank_would_be_late() -> None:
    batch = [kto_example([1] * 2, 30)] * 6 + [kto_example([2] * 2, 30)] * 2
    shares = by_prompt(batch, ranks=4, costs=COSTS, otherwise=every_nth)
    assert [len(share) for share in shares] == [2, 2, 2, 2]
    assert sorted(number for share in shares for number in share) == list(range(8))
