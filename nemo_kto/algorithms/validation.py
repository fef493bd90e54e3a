"""What a run validates on: one set of examples, or several with names, each by itself."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_kto.algorithms.duration import limit_batches
from nemo_kto.algorithms.protocols import Loader
from nemo_kto.data.rows.sources import UNNAMED
from nemo_kto.losses.metrics import Metrics, side_by_side

ValidationLoaders = Loader[Any] | Mapping[str, Loader[Any]] | None


@dataclass(frozen=True, kw_only=True, eq=False)
class ValidationSet:
    """Examples that are validated on by themselves.

    Attributes:
        name: stands before the names of its metrics; empty for a set without one.
        loader: yields its batches.
        batches: how many of them a validation takes.
    """

    name: str
    loader: Loader[Any]
    batches: int


def validation_sets(loaders: ValidationLoaders, *, limit: int | float) -> tuple[ValidationSet, ...]:
    """The sets that a validation goes through, in order; a set without a batch is left out.

    Args:
        loaders: that of one set without a name; name -> loader of several; None for no validation.
        limit: global batches of each set to use; a float is a fraction of them, see ``duration.limit_batches``.
    """
    named = loaders if isinstance(loaders, Mapping) else {} if loaders is None else {UNNAMED: loaders}
    sets = (
        ValidationSet(name=name, loader=loader, batches=limit_batches(len(loader.batch_sampler), limit))
        for name, loader in named.items()
    )
    return tuple(each for each in sets if each.batches)


def metrics_by_set(parts: Iterable[tuple[str, Metrics]]) -> Metrics:
    """The metrics of a validation, each set by itself.

    Args:
        parts: name of the set and metrics of every batch.
    """
    of_set: dict[str, list[Metrics]] = {}
    for name, metrics in parts:
        of_set.setdefault(name, []).append(metrics)
    return side_by_side({name: functools.reduce(operator.add, batches) for name, batches in of_set.items()})
