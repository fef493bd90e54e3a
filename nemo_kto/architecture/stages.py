"""Assignment of layers to pipeline stages, and the order of micro-batches in a stage: megatron-core's rules as arithmetic.

A stage may hold several model chunks (a virtual pipeline: Narayanan et al. 2021, arXiv 2104.04473, section 2.2). A
micro-batch then passes through all stages once per chunk, and the time to fill and drain the pipeline shrinks accordingly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby


class SplitError(ValueError):
    """Layers cannot be partitioned across pipeline stages as requested.

    ``name`` is the invalid attribute of the split, and ``constraint`` the requirement on it, such as "must divide the 5
    layers", which ends with the word layers.
    """

    def __init__(self, name: str, constraint: str, value: object) -> None:
        super().__init__(f"{name} {constraint}, got {value}")
        self.name, self.constraint = name, constraint


@dataclass(frozen=True, kw_only=True)
class PipelineSplit:
    """Partition of layers across pipeline stages: even, except for the settings of the first and last stage."""

    stages: int = 1
    chunks: int = 1  # model chunks per stage; more than one make a virtual pipeline
    first: int | None = None  # number of layers of the first stage; None for the same number as the other stages
    last: int | None = None  # the same for the last stage
    counts_embedding: bool = False  # the embedding counts as a layer of the first stage
    counts_loss: bool = False  # the loss counts as a layer of the last stage

    def layers(self, num_layers: int) -> list[list[range]]:
        """Return the layers of each chunk of each stage, counted from 0; SplitError if there is no such partition."""
        sizes = [[count // self.chunks] * self.chunks for count in self._whole_stages(num_layers)]
        sizes[0][0] -= self.counts_embedding
        sizes[-1][-1] -= self.counts_loss
        held: list[list[range]] = [[] for _ in sizes]
        start = 0
        for chunk in range(self.chunks):
            for stage, of_stage in enumerate(sizes):
                held[stage].append(range(start, start + of_stage[chunk]))
                start += of_stage[chunk]
        return held

    def fits(self, num_layers: int) -> bool:
        """Return whether this number of layers can be partitioned in this way."""
        try:
            self._whole_stages(num_layers)
        except SplitError:
            return False
        return True

    def stage_sizes(self, num_layers: int) -> list[int]:
        """Return the number of layers of each stage. Raises like :meth:`layers`."""
        return [sum(map(len, chunks)) for chunks in self.layers(num_layers)]

    def text(self, num_layers: int) -> str:
        """Return text such as "stages of 7, 14 x 8 and 7 layers" or "2 chunks of each stage"; empty if neither applies."""
        runs = [(size, len(list(group))) for size, group in groupby(self.stage_sizes(num_layers))]
        sizes = [part for size, count in runs for part in ([f"{count} x {size}"] if count > 2 else [str(size)] * count)]
        uneven = len(runs) > 1
        chunks = f"{self.chunks} chunks of each stage" if self.chunks > 1 else ""
        stages = f"stages of {', '.join(sizes[:-1])} and {sizes[-1]} layers" if uneven else ""
        return ", ".join(part for part in (chunks, stages) if part)

    @property
    def group(self) -> int:
        """Divisor of the number of micro-batches: chunks alternate after as many micro-batches as there are stages."""
        return self.stages if self.chunks > 1 else 1

    def micro_batches(self, wanted: int) -> int:
        """Return ``wanted`` rounded up to the schedule's multiple; the additional micro-batches are empty."""
        return -(-wanted // self.group) * self.group

    def bubble(self, micro_batches: int) -> float:
        """Return the fraction of a step that a stage waits for the pipeline to fill and drain, if all are equally fast."""
        waits = self.stages - 1
        return waits / (self.chunks * self.micro_batches(micro_batches) + waits)

    def most_kept(self, stage: int, micro_batches: int, sizes: Sequence[float]) -> float:
        """Return the peak size that a stage keeps for backward passes, if its chunks keep ``sizes`` for each micro-batch."""
        now = most = 0.0
        for is_forward, chunk in self.passes(stage, min(self.micro_batches(micro_batches), 4 * self.stages)):
            now += sizes[chunk] if is_forward else -sizes[chunk]
            most = max(most, now)
        return most

    def passes(self, stage: int, micro_batches: int) -> Iterator[tuple[bool, int]]:
        """Yield the passes of a stage in order: whether each is a forward pass, and the number of its chunk.

        The schedule is 1F1B, or its interleaved form for several chunks: forward passes until the first gradient comes back,
        then forward and backward passes in turn.
        """
        turns = [
            chunk for _ in range(micro_batches // self.group) for chunk in range(self.chunks) for _ in range(self.group)
        ]
        before = self.stages - stage - 1
        if self.chunks > 1:
            before = 2 * before + (self.chunks - 1) * self.stages
        before = min(before, len(turns))
        yield from ((True, chunk) for chunk in turns[:before])
        for number, chunk in enumerate(turns):
            if before + number < len(turns):
                yield True, turns[before + number]
            yield False, self.chunks - 1 - chunk

    def _whole_stages(self, num_layers: int) -> list[int]:
        """Return the number of layers of each stage, with embedding and loss if these count; divisible by the chunks."""
        if self.stages == 1 and self != PipelineSplit():
            raise SplitError("stages", "must be at least 2 for several chunks or an uneven split of the layers", 1)
        counted = [name for name, is_one in (("embedding", self.counts_embedding), ("loss", self.counts_loss)) if is_one]
        parts = f"the {num_layers} layers"
        if counted:
            parts = f"{', '.join(counted)} and {parts}"
        if self.first is not None or self.last is not None:
            counts = self._uneven_stages(num_layers)
        elif (total := num_layers + len(counted)) % self.stages == 0:
            counts = [total // self.stages] * self.stages
        else:
            raise SplitError("stages", f"must divide {parts}", self.stages)
        if any(count % self.chunks for count in counts):
            shares = " and ".join(map(str, sorted(set(counts))))
            raise SplitError("chunks", f"must divide each stage's share ({shares}) of {parts}", self.chunks)
        return counts

    def _uneven_stages(self, num_layers: int) -> list[int]:
        if self.counts_embedding or self.counts_loss:
            name = "first" if self.last is None else "last"
            raise SplitError(name, "must be left out if embedding or loss count as layers", getattr(self, name))
        first, last = ([] if count is None else [count] for count in (self.first, self.last))
        others, rest = self.stages - len(first) - len(last), num_layers - sum(first) - sum(last)
        if others == 0 and rest:
            raise SplitError(
                "first", f"must add up, with the {self.last} of the last stage, to the {num_layers} layers", first[0]
            )
        if others and (rest < others or rest % others):
            name, value = ("first", first[0]) if first else ("last", last[0])
            raise SplitError(name, f"must leave equal shares to the other stages of the {num_layers} layers", value)
        return [*first, *([rest // others] * others if others else []), *last]


ONE_STAGE = PipelineSplit()
