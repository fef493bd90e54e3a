"""Which layers each pipeline stage holds, and in which order it works on micro-batches: megatron-core's, in arithmetic.

A stage may hold several model chunks (a virtual pipeline: Narayanan et al. 2021, arXiv 2104.04473, section 2.2). A
micro-batch then goes around the stages once for each chunk, and the pipeline fills and drains in so much less time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby


class SplitError(ValueError):
    """Layers that cannot be shared out as they should be.

    Attributes:
        name: the attribute of the split that does not fit.
        constraint: what it must do, such as "must divide the 5 layers"; ends with the word layers.
    """

    def __init__(self, name: str, constraint: str, value: object) -> None:
        super().__init__(f"{name} {constraint}, got {value}")
        self.name, self.constraint = name, constraint


@dataclass(frozen=True, kw_only=True)
class PipelineSplit:
    """How layers are shared out over a pipeline: evenly, but for what is said of its ends.

    Attributes:
        stages: ranks of the pipeline.
        chunks: model chunks of each stage; more than one are a virtual pipeline.
        first, last: layers of the first and of the last stage; None for as many as the others.
        counts_embedding: the embedding takes the place of a layer in the first stage.
        counts_loss: the loss takes the place of a layer in the last stage.
    """

    stages: int = 1
    chunks: int = 1
    first: int | None = None
    last: int | None = None
    counts_embedding: bool = False
    counts_loss: bool = False

    def layers(self, num_layers: int) -> list[list[range]]:
        """For each stage the layers of each of its chunks, from 0.

        Raises:
            SplitError: they cannot be shared out like this.
        """
        sizes = self._sizes(num_layers)
        held: list[list[range]] = [[] for _ in sizes]
        start = 0
        for chunk in range(self.chunks):
            for stage, of_stage in enumerate(sizes):
                held[stage].append(range(start, start + of_stage[chunk]))
                start += of_stage[chunk]
        return held

    def fits(self, num_layers: int) -> bool:
        """Whether so many layers can be shared out like this."""
        try:
            self._sizes(num_layers)
        except SplitError:
            return False
        return True

    def stage_sizes(self, num_layers: int) -> list[int]:
        """The number of layers of each stage. Raises as :meth:`layers` does."""
        return [sum(map(len, chunks)) for chunks in self.layers(num_layers)]

    def text(self, num_layers: int) -> str:
        """Such as "stages of 7, 14 x 8 and 7 layers" or "2 chunks of each stage"; empty for one chunk and even stages."""
        runs = [(size, len(list(group))) for size, group in groupby(self.stage_sizes(num_layers))]
        sizes = [part for size, count in runs for part in ([f"{count} x {size}"] if count > 2 else [str(size)] * count)]
        uneven = len(runs) > 1
        chunks = f"{self.chunks} chunks of each stage" if self.chunks > 1 else ""
        stages = f"stages of {', '.join(sizes[:-1])} and {sizes[-1]} layers" if uneven else ""
        return ", ".join(part for part in (chunks, stages) if part)

    @property
    def group(self) -> int:
        """What the number of micro-batches must be a multiple of: chunks take turns for as many as there are stages."""
        return self.stages if self.chunks > 1 else 1

    def micro_batches(self, wanted: int) -> int:
        """How many the schedule gets where there are ``wanted``; the last ones are empty."""
        return -(-wanted // self.group) * self.group

    def bubble(self, micro_batches: int) -> float:
        """The part of a step in which a stage waits for the pipeline to fill and to drain, where all stages work alike."""
        waits = self.stages - 1
        return waits / (self.chunks * self.micro_batches(micro_batches) + waits)

    def most_kept(self, stage: int, micro_batches: int, sizes: Sequence[float]) -> float:
        """The most that a stage keeps for backward passes at one time.

        Args:
            stage: from 0.
            micro_batches: of a step.
            sizes: what each chunk keeps of one micro-batch.
        """
        now = most = 0.0
        for is_forward, chunk in self.passes(stage, min(self.micro_batches(micro_batches), 4 * self.stages)):
            now += sizes[chunk] if is_forward else -sizes[chunk]
            most = max(most, now)
        return most

    def passes(self, stage: int, micro_batches: int) -> Iterator[tuple[bool, int]]:
        """The order in which a stage works: whether a pass is forward, and of which chunk.

        That of 1F1B, and with several chunks of its interleaved form: a stage first goes forward as often as it takes until
        the first gradient comes back, then forward and backward in turn.
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

    def _sizes(self, num_layers: int) -> list[list[int]]:
        """Layers of each chunk of each stage."""
        sizes = [[count // self.chunks] * self.chunks for count in self._whole_stages(num_layers)]
        sizes[0][0] -= self.counts_embedding
        sizes[-1][-1] -= self.counts_loss
        return sizes

    def _whole_stages(self, num_layers: int) -> list[int]:
        """Layers of each stage, with what is counted as one; those of each are divisible by the chunks."""
        if self.stages == 1 and self != PipelineSplit():
            raise SplitError("stages", "must be at least 2 for chunks, or an uneven split, of the layers", 1)
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
        """Where the number of layers of the first or of the last stage is given."""
        if self.counts_embedding or self.counts_loss:
            name = "first" if self.last is None else "last"
            raise SplitError(
                name, "must be left out where embedding or loss are counted among the layers", getattr(self, name)
            )
        first, last = ([] if count is None else [count] for count in (self.first, self.last))
        others, rest = self.stages - len(first) - len(last), num_layers - sum(first) - sum(last)
        if others == 0 and rest:
            raise SplitError(
                "first", f"must make up, with the {self.last} of the last stage, the {num_layers} layers", first[0]
            )
        if others and (rest < others or rest % others):
            name, value = ("first", first[0]) if first else ("last", last[0])
            raise SplitError(name, f"must leave the other stages equal shares of the {num_layers} layers", value)
        return [*first, *([rest // others] * others if others else []), *last]


ONE_STAGE = PipelineSplit()
