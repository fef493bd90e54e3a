"""YAML of other programs, whose size in memory and time to read are limited."""

from __future__ import annotations

import itertools
import math
from typing import Any

import yaml

_MAX_BYTES = 2**20
_MAX_VALUES = 50_000  # a configuration has a hundredth of this number


def load_yaml(text: str | bytes) -> Any:
    """Return the content of a YAML document of plain values; raise ValueError if it is invalid or too large.

    A few nested aliases stand for billions of values, and an anchor that contains its own alias for an endless number.
    """
    if len(text) > _MAX_BYTES:
        raise ValueError(f"it must have at most {_MAX_BYTES:,} bytes, got {len(text):,}")
    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _expanded_size(node, {}) > _MAX_VALUES:
            raise ValueError(f"it must have at most {_MAX_VALUES:,} values, with those that aliases stand for")
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except (
        LookupError,
        AttributeError,
        TypeError,
        OverflowError,
    ) as error:  # PyYAML's, for a tag that its value does not fit
        raise ValueError(f"it has a value that its tag does not fit ({error!r})") from error


def _expanded_size(node: yaml.Node, known: dict[int, float]) -> float:
    """Return the number of values of a node with its aliases replaced; infinity if it contains itself."""
    if id(node) not in known:
        known[id(node)] = math.inf  # until its parts are counted
        parts = itertools.chain(*node.value) if isinstance(node, yaml.MappingNode) else node.value
        is_scalar = isinstance(node, yaml.ScalarNode)
        known[id(node)] = 1 + (0 if is_scalar else sum(_expanded_size(part, known) for part in parts))
    return known[id(node)]
