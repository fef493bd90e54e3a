"""YAML of other programs, whose size in memory and time to read are limited."""

from __future__ import annotations

from typing import Any

import yaml

_MAX_BYTES = 2**17  # a configuration of a model has a tenth of this size
_MAX_NODES = 20_000


class _Loader(yaml.SafeLoader):
    """Loader that counts the nodes of the document with those that aliases stand for."""

    def __init__(self, content: str | bytes) -> None:
        super().__init__(content)
        self._nodes = 0
        self._sizes: dict[yaml.Node, int] = {}  # of each complete node

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        before, is_alias = self._nodes, self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        if node is not None:
            if is_alias and node not in self._sizes:
                raise yaml.YAMLError("an alias must not stand for a node that it is in")
            self._nodes += self._sizes[node] if is_alias else 1
            self._sizes[node] = self._nodes - before
        if self._nodes > _MAX_NODES:
            raise yaml.YAMLError(f"it must have at most {_MAX_NODES:,} values, with those that aliases stand for")
        return node


def load_yaml(content: str | bytes) -> Any:
    """Return the content of a YAML document of plain values.

    Raises YAMLError, ValueError or RecursionError if it is not valid, too large, or grows too large by its aliases.
    """
    if len(content) > _MAX_BYTES:
        raise yaml.YAMLError(f"it must have at most {_MAX_BYTES:,} bytes, got {len(content):,}")
    return yaml.load(content, Loader=_Loader)  # nosec B506  # a SafeLoader
