"""benchmarks/packing.py with a tiny model: all packings compute the same, and its table of costs is correct."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.conftest import load_script
from tests.helpers.rank_pool import RankPool

WAYS = ("1 rows", "8 rows", "up to 512 tokens", "packed, 512 tokens")


def rows_of(count: int) -> list[dict[str, Any]]:
    """Of lengths like those of reviews: a few are many times as long as most."""
    draw = random.Random(0)
    words = ["time", "people", "water", "light", "house"]
    return [
        {
            "prompt": f"Review film {number}.\n",
            "completion": " ".join(draw.choices(words, k=max(1, int(draw.lognormvariate(3.0, 0.8))))),
            "label": number % 2 == 0,
        }
        for number in range(count)
    ]


def figures(model: Path, folder: Path) -> list[Any]:
    """On a rank: one round of each way."""
    packing: Any = load_script("benchmarks/packing.py")
    packing.SEQ_LENGTH = 128
    trainer, batch = packing.build(model, rows_of(12), hardware="cpu", folder=str(folder))
    found = []
    for name in WAYS:
        of_way = packing.Figures()
        packing.measure(trainer, batch, packing.WAYS[name], of_way)
        found.append((of_way.padding, of_way.loss, of_way.kl, len(of_way.seconds)))
    return found


def test_all_packings_compute_the_same(ranks: RankPool, tiny_llama: Path, tmp_path: Path) -> None:
    ((one, eight, filled, packed),) = ranks.run(1, figures, tiny_llama, tmp_path)
    assert one[0] == packed[0] == 0.0
    assert 0 < filled[0] < 1
    assert 0 < eight[0] < 1
    assert one[2] > 0.1, "KL must not be clamped, or equality proves nothing"
    for padding, loss, kl, rounds in (eight, filled, packed):
        assert abs(loss - one[1]) < 1e-5 * abs(one[1]), padding
        assert abs(kl - one[2]) <= 1e-5 * abs(one[2])
        assert rounds == 1


def test_ranks_have_equal_work_and_little_padding(tiny_llama: Path) -> None:
    packing: Any = load_script("benchmarks/packing.py")
    header, _, *lines = packing.work_table(rows_of(512), tiny_llama).splitlines()
    assert header.startswith("| ranks | work of the busiest over the mean | shared out by number |")
    figures_of = [[float(cell.strip().rstrip("%")) for cell in line.strip("|").split("|")] for line in lines]
    assert [int(line[0]) for line in figures_of] == [2, 4, 8, 16]
    for _, by_cost, by_number, padding in figures_of:
        assert by_cost < 5
        assert by_cost < by_number
        assert padding < 3
