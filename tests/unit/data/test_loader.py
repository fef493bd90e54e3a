"""The data loader: shards of the ranks, workers, and resuming in the middle of an epoch."""

from __future__ import annotations

import multiprocessing
import os
import signal
from functools import partial
from typing import Any

import pytest
import torch

from nemo_kto.data.batches.collate import kto_custom_collate
from nemo_kto.data.batches.dataset import KTODataset
from nemo_kto.data.batches.loader import GlobalBatchSampler, build_dataloader, every_example, gathered_examples
from nemo_kto.data.batches.splits import build_splits
from nemo_kto.data.tokens.tokeniser import KTO_EXAMPLES
from tests.unit.data.tiny_data import chatml_tokenizer, numbered_rows, write_rows

TOKENIZER = chatml_tokenizer()
EOS = TOKENIZER.eos_token_id


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> KTODataset:
    folder = tmp_path_factory.mktemp("data")
    path = write_rows(folder / "a.jsonl", numbered_rows(26))
    settings: dict[str, Any] = {"seq_length": 16, "truncation_mode": "keep_end", "cache_dir": folder / "cache", "seed": 0}
    settings |= {"kind": KTO_EXAMPLES, "make": KTODataset}
    splits = build_splits(data_prefix=path, splits_string=None, tokenizer=TOKENIZER, **settings)
    assert splits.train is not None
    return splits.train


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
