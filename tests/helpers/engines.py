"""The log-prob engine and the KTO model of a test, on a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class InOrder(list[Any]):
    """A loader that yields these batches and serves as its own sampler."""

    @property
    def batch_sampler(self) -> InOrder:
        return self

    def set_position(self, epoch: int, consumed_in_epoch: int) -> None:
        assert (epoch, consumed_in_epoch) == (0, 0), "one epoch"


def split_of(layout: Any, **ends: Any) -> Any:
    """How layers are shared out over the pipeline of a layout; ``ends``: attributes of PipelineSplit."""
    from nemo_kto.architecture.stages import PipelineSplit

    return PipelineSplit(stages=layout.pipeline, chunks=layout.virtual or 1, **ends)


def engine(
    chunks: Sequence[Any],
    architecture: Any,
    *,
    micro_batch_size: int = 2,
    logprob_chunk_size: int = 16,
    packed: bool = False,
) -> Any:
    """What runs the chunks."""
    from megatron.core.utils import get_model_config

    from nemo_kto.models.engine.engine import LogProbEngine
    from nemo_kto.models.engine.sequences import MicroBatchLimits, width_multiple
    from nemo_kto.models.flops import ModelFlops

    config = get_model_config(chunks[0])
    context = config.context_parallel_size
    multiple = width_multiple(
        tensor_parallel=config.tensor_model_parallel_size,
        sequence_parallel=config.sequence_parallel,
        context_parallel=context,
    )
    group = config.pipeline_model_parallel_size if len(chunks) > 1 else 1
    return LogProbEngine(
        chunks=list(chunks),
        vocab_size=architecture.vocab_size,
        limits=MicroBatchLimits(
            prompts=micro_batch_size,
            tokens=None,
            multiple=multiple,
            packed=packed,
            context_parallel=context,
            group=group,
        ),
        forward_micro_batch_size=5,
        average_log_probs=False,
        logprob_chunk_size=logprob_chunk_size,
        logprob_gradient_summands=1,
        flops=ModelFlops.of_model(architecture),
    )


def kto_model(
    runs: Any, active: Any, *, loss: str = "kto", beta: float, weights: tuple[float, float], **objective: Any
) -> Any:
    """A KTO model over an engine, with the model itself as the reference while ``active``.

    Args:
        weights: of desirable and of undesirable answers.
        **objective: further attributes of Objective.
    """
    from nemo_kto.losses.kto import LOSSES
    from nemo_kto.models.engine.reference import LiveReference
    from nemo_kto.models.flops import Passes
    from nemo_kto.models.nlp.gpt.megatron_gpt_kto_model import MegatronGPTKTOModel
    from nemo_kto.models.preference_model import Objective

    return MegatronGPTKTOModel(
        engine=runs,
        reference=LiveReference(engine=runs, active=active, passes=Passes(forward=1)),
        objective=Objective(loss=LOSSES[loss], beta=beta, **objective),
        desirable_loss_weight=weights[0],
        undesirable_loss_weight=weights[1],
    )
