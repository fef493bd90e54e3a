"""Flowcharts of arrows between names, drawn as SVG while the site is built.

A repository's web page draws blocks of Mermaid by itself; a site that loads nothing from a network cannot. This module draws
the part of Mermaid that the pages use: lines of the form ``a --> b``.
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from itertools import pairwise

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

_WIDTH, _HEIGHT, _GAP_X, _GAP_Y = 108, 28, 20, 34
Edge = tuple[str, str]


class Flowchart(SphinxDirective):
    """The directive of ``mermaid`` blocks."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        edges = [(left, right) for line in self.content if " --> " in line for left, right in [line.strip().split(" --> ")]]
        return [nodes.raw("", draw(edges), format="html")]


def draw(edges: Iterable[Edge]) -> str:
    """Return an SVG with names in layers: every arrow leads downwards, at least one layer."""
    edges = list(edges)
    layers, chains = _layers(edges)
    _untangle(layers, chains)
    widest = max(map(len, layers))
    width, height = widest * (_WIDTH + _GAP_X), len(layers) * (_HEIGHT + _GAP_Y) - _GAP_Y + 4
    centre = {}
    for depth, layer in enumerate(layers):
        left = (width - len(layer) * (_WIDTH + _GAP_X)) / 2
        for place, node in enumerate(layer):
            centre[node] = (left + (place + 0.5) * (_WIDTH + _GAP_X), 2 + depth * (_HEIGHT + _GAP_Y) + _HEIGHT / 2)
    parts = []
    for chain in chains:
        (x, y), *others = (centre[node] for node in chain)
        path = f"M{x:.0f},{y + _HEIGHT / 2:.0f}"
        for place, (to_x, to_y) in enumerate(others):
            last = place == len(others) - 1
            top = to_y - _HEIGHT / 2 - (5 if last else 0)
            middle = (y + _HEIGHT / 2 + top) / 2
            path += f" C{x:.0f},{middle:.0f} {to_x:.0f},{middle:.0f} {to_x:.0f},{top:.0f}"
            path += "" if last else f" L{to_x:.0f},{to_y + _HEIGHT / 2:.0f}"
            x, y = to_x, to_y
        parts.append(f'<path d="{path}" marker-end="url(#arrow)"/>')
    for name in {name: None for edge in edges for name in edge}:
        x, y = centre[name]
        parts.append(
            f'<rect x="{x - _WIDTH / 2:.0f}" y="{y - _HEIGHT / 2:.0f}" width="{_WIDTH}" height="{_HEIGHT}" rx="5"/>'
        )
        parts.append(f'<text x="{x:.0f}" y="{y + 4.5:.0f}">{html.escape(name)}</text>')
    label = html.escape("; ".join(f"{left} imports {right}" for left, right in edges), quote=True)
    marker = '<defs><marker id="arrow" viewBox="0 0 8 8" refX="3" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    marker += '<path class="tip" d="M0,0 L8,4 L0,8 z"/></marker></defs>'
    return (
        f'<svg class="flowchart" role="img" aria-label="{label}" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'style="max-width:{width:.0f}px">{marker}{"".join(parts)}</svg>'
    )


def _layers(edges: list[Edge]) -> tuple[list[list[str]], list[list[str]]]:
    """Return the nodes of each layer, and each edge as a chain that has one node in every layer it crosses."""
    depth = {name: 0 for edge in edges for name in edge}
    for _ in depth:  # the longest path to each name
        for upper, lower in edges:
            depth[lower] = max(depth[lower], depth[upper] + 1)
    layers: list[list[str]] = [[name for name in depth if depth[name] == each] for each in range(max(depth.values()) + 1)]
    chains = []
    for upper, lower in edges:
        crossed = [f"{upper}>{lower}>{each}" for each in range(depth[upper] + 1, depth[lower])]
        for each, node in enumerate(crossed, start=depth[upper] + 1):
            layers[each].append(node)
        chains.append([upper, *crossed, lower])
    return layers, chains


def _untangle(layers: list[list[str]], chains: list[list[str]]) -> None:
    """Order each layer by the mean place of the neighbours of its nodes, which removes most crossings."""
    links = [link for chain in chains for link in pairwise(chain)]
    for sweep in range(8):
        for here, other in pairwise(layers) if sweep % 2 == 0 else pairwise(reversed(layers)):
            place = {node: index / len(here) for index, node in enumerate(here)}
            means = {}
            for node in other:
                near = [place[end] for link in links if node in link for end in link if end in place]
                means[node] = sum(near) / len(near) if near else 0.5
            other.sort(key=means.__getitem__)
