"""Validation sets: one without a name, or several named ones with separate metrics."""

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
    """A validation set with its own metrics.

    Attributes:
        name: prefix of the names of its metrics; empty for an unnamed set.
        loader: yields the batches of the set.
        batches: number of batches to use per validation.
    """

    name: str
    loader: Loader[Any]
    batches: int


def validation_sets(loaders: ValidationLoaders, *, limit: int | float) -> tuple[ValidationSet, ...]:
    """Return the validation sets in order, without empty ones.

    Args:
        loaders: the loader of one unnamed set, a mapping from the names of several sets to their loaders, or None for no
            validation.
        limit: global batches to use of each set; a float is a fraction of the set, see ``duration.limit_batches``.
    """
    named = loaders if isinstance(loaders, Mapping) else {} if loaders is None else {UNNAMED: loaders}
    sets = (
        ValidationSet(name=name, loader=loader, batches=limit_batches(len(loader.batch_sampler), limit))
        for name, loader in named.items()
    )
    return tuple(each for each in sets if each.batches)


def metrics_by_set(parts: Iterable[tuple[str, Metrics]]) -> Metrics:
    """Combine the metrics of the batches of a validation, separately for each set.

    Args:
        parts: name of the set and metrics of each batch.
    """
    of_set: dict[str, list[Metrics]] = {}
    for name, metrics in parts:
        of_set.setdefault(name, []).append(metrics)
    return side_by_side({name: functools.reduce(operator.add, batches) for name, batches in of_set.items()})
