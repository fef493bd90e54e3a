"""YAML of other programs, with a bound on its aliases."""

from __future__ import annotations

import itertools
import math
from typing import Any

import yaml

_MAX_GROWTH = 10_000  # characters


def load_yaml(text: str | bytes) -> Any:
    """Return the content of a YAML document; raise ValueError if it is invalid or its aliases expand without a bound.

    A few nested aliases stand for billions of values, and an anchor that contains its own alias for an endless one.
    """
    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _expanded_size(node, {}) > 2 * len(text) + _MAX_GROWTH:
            raise ValueError("its aliases contain themselves or expand to a multiple of the file; write the values instead")
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
    """Return the number of characters and values of a node with its aliases replaced; infinity if it contains itself."""
    if id(node) not in known:
        known[id(node)] = math.inf  # until its parts are counted
        parts = itertools.chain(*node.value) if isinstance(node, yaml.MappingNode) else node.value
        is_text = isinstance(node, yaml.ScalarNode)
        known[id(node)] = 1 + (len(node.value) if is_text else sum(_expanded_size(part, known) for part in parts))
    return known[id(node)]
