"""Recurrences over the tokens of packed sequences: division into chunks, scan over the chunks, causal convolution.

Chunks of tokens are evaluated together. The states between them follow one after the other, for the chunks of all sequences
at the same time.

Shape suffixes: t tokens of a pack, c chunks, n sequences of a wave, C tokens of a chunk, g groups of heads, r heads of a
group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_kto.device import device
from nemo_kto.layers.packing import Prompts
from nemo_kto.utils import lazy_import

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")

CHUNK = 64  # tokens of a chunk


@dataclass(frozen=True, kw_only=True)
class Wave:
    """Segments of a pack whose states are computed together; the segments that they continue are in an earlier wave."""

    segments: tuple[int, ...]  # from that with the most chunks to that with the fewest
    before: Tensor | None  # place of the prompt of each segment among the segments of the earlier wave; None: no prompts
    steps: tuple[int, ...]  # number of segments that have a first, a second, ... chunk


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """Division of a pack into chunks: first those of the first wave, step by step."""

    waves: tuple[Wave, ...]
    place_t: Tensor  # of each token among those of all chunks
    tokens: int  # number of tokens of all chunks, with padding

    def lay_out(self, values_tgx: Tensor, dtype: torch.dtype) -> Tensor:
        """Lay out [t, g, ...] as [c, g, C, ...], with zeros after the last token of a segment."""
        padded = values_tgx.new_zeros(self.tokens, *values_tgx.shape[1:], dtype=dtype)
        return padded.index_copy(0, self.place_t, values_tgx.to(dtype)).unflatten(0, (-1, CHUNK)).transpose(1, 2)

    def collect(self, values_cgCx: Tensor) -> Tensor:
        """Return [t, g, ...] from the layout of :meth:`lay_out`."""
        return values_cgCx.transpose(1, 2).flatten(0, 1).index_select(0, self.place_t)


@functools.lru_cache(maxsize=32)  # the layers of a model use the same
def divide(lengths: tuple[int, ...], prompts: Prompts) -> Chunks:
    """Divide a pack with segments of these lengths; a segment with a prompt continues that one."""
    roots = tuple(number for number in range(len(lengths)) if prompts is None or prompts[number] is None)
    waves: list[Wave] = []
    places: dict[int, Tensor] = {}
    first = 0
    for members in (roots, tuple(sorted({*range(len(lengths))} - {*roots}))):
        if not members:
            continue
        counts = {number: max(1, -(-lengths[number] // CHUNK)) for number in members}
        order = tuple(sorted(members, key=lambda number: -counts[number]))
        steps = tuple(sum(count > step for count in counts.values()) for step in range(max(counts.values())))
        begins = [first + CHUNK * sum(steps[:step]) for step in range(len(steps))]
        for rank, number in enumerate(order):
            starts = torch.tensor(begins[: counts[number]]) + CHUNK * rank
            places[number] = (starts[:, None] + torch.arange(CHUNK)).flatten()[: lengths[number]]
        before = None
        if waves and prompts is not None:
            before = device.upload([torch.tensor([waves[0].segments.index(prompts[number] or 0) for number in order])])[0]
        waves.append(Wave(segments=order, before=before, steps=steps))
        first += CHUNK * sum(steps)
    (place_t,) = device.upload([torch.cat([places[number] for number in range(len(lengths))])])
    return Chunks(waves=tuple(waves), place_t=place_t, tokens=first)


def decay_between(decay_cgrC: Tensor) -> Tensor:
    """Return exp(G_i - G_j) for tokens i and j of a chunk, 0 where j is later than i: [c, g, r, C, C] with i before j.

    ``decay_cgrC`` is G, the sums of the decays from the start of the chunk.
    """
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=decay_cgrC.device).triu(1)
    return (decay_cgrC.unsqueeze(-1) - decay_cgrC.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()


def scan(chunks: Chunks, start: Tensor, step: Callable[[slice, Tensor], tuple[Tensor, Tensor]]) -> Tensor:
    """Return the outputs of all chunks, [c, ...].

    ``start`` is the state at the start of a sequence. ``step`` is called with a slice of chunks that are evaluated together
    and the states before them, [n, ...], and returns their outputs and the states after them.
    """
    outputs: list[Tensor] = []
    first = 0
    finals: Tensor | None = None
    for wave in chunks.waves:
        if finals is not None and wave.before is not None:
            state = finals.index_select(0, wave.before)
        else:
            state = start.expand(len(wave.segments), *start.shape)
        finished: list[Tensor] = []  # states of segments without a further chunk, from the shortest on
        for count in wave.steps:
            if count < len(state):
                finished.append(state[count:])
                state = state[:count]
            output, state = step(slice(first, first + count), state)
            outputs.append(output)
            first += count
        finals = torch.cat((state, *reversed(finished)))
    return torch.cat(outputs)


def causal_convolution(
    values_tc: Tensor, weight_cw: Tensor, bias_c: Tensor | None = None, *, lengths: Sequence[int], prompts: Prompts = None
) -> Tensor:
    """Return sum_j weight[:, w - 1 - j] * values[t - j] + bias, [t, channels], rounded once.

    Each token sees its own sequence only. Shape suffixes of this function: c channels, w width of the kernel. The other
    arguments are as for :func:`divide`.
    """
    tail = weight_cw.size(1) - 1
    segments = values_tc.split([*lengths])
    parts: list[Tensor] = []
    before = values_tc.new_zeros(tail, values_tc.size(1))
    for number, segment in enumerate(segments):
        prompt = None if prompts is None else prompts[number]
        parts += [before if prompt is None else torch.cat((before, segments[prompt]))[-tail:], segment]
    joined, tokens = torch.cat(parts), values_tc.size(0) + tail * (len(segments) - 1)
    dtype = torch.promote_types(values_tc.dtype, torch.float32)
    mixed = sum(joined[shift : shift + tokens].to(dtype) * weight_cw[:, shift].to(dtype) for shift in range(tail + 1))
    assert isinstance(mixed, torch.Tensor)
    if bias_c is not None:
        mixed = mixed + bias_c.to(dtype)
    sizes = [size for length in lengths for size in (length, tail)][:-1]
    return torch.cat(mixed.to(values_tc.dtype).split(sizes)[::2])
