"""Shapes of the messages between pipeline stages, which every stage knows before it receives them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_kto.models.engine.sequences import MicroBatch

Shape = tuple[int, int, int]
"""Tokens of a rank, sequences (1 if they are packed), hidden size."""


@dataclass(frozen=True, kw_only=True)
class MessageShapes:
    """Shapes of the tensors that a rank will receive in one run of the pipeline schedule, in the order of their arrival.

    Micro-batches have different widths. All stages form them from the same sequences, so they need not send the shapes.
    ``device.patches`` makes megatron-core read them from here.
    """

    hidden_states: Iterator[Shape]  # from the previous stage
    gradients: Iterator[Shape]  # from the next stage

    @classmethod
    def of(cls, micro_batches: Sequence[MicroBatch], config: TransformerConfig) -> MessageShapes:
        """Return the shapes for the micro-batches of a run, in the order of megatron-core's schedule for ``config``."""
        shards = config.tensor_model_parallel_size if config.sequence_parallel else 1
        shapes = [(each.tokens_bs.shape[1] // shards, len(each.tokens_bs), config.hidden_size) for each in micro_batches]
        chunks = config.virtual_pipeline_model_parallel_size or 1
        # (micro-batch, chunk); backward passes have the same micro-batches in this order, and the chunks in reverse
        table: list[tuple[int, int]] = get_schedule_table(
            len(shapes), chunks, config.microbatch_group_size_per_vp_stage if chunks > 1 else 1
        )
        received = [shapes[number] for number, _ in table]
        # The first stage receives the hidden states of the last one, except those of its last chunk; the last stage receives
        # the gradients of the first one, except those of its first chunk.
        at_end = [shapes[number] for number, chunk in table if chunk < chunks - 1]
        return cls(
            hidden_states=iter(at_end if parallel_state.is_pipeline_first_stage() else received),
            gradients=iter(at_end if parallel_state.is_pipeline_last_stage() else received),
        )
