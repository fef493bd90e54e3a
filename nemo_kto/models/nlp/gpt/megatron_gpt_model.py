"""Forward and backward passes of a GPT policy over tensor- and pipeline-parallel ranks.

Everything the preference models share: rows are cut into micro-batches, sent through megatron-core's pipeline schedule,
and come back as one log-prob a row. What a row's log-prob is worth is left to the subclasses.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.utils import get_model_config, unwrap_model

from nemo_kto.losses.metrics import Derive, Metrics
from nemo_kto.losses.sequence import response_counts, response_positions, row_sums
from nemo_kto.models.reference import MovingReference, ReferencePolicy
from nemo_kto.models.rows import Batch, MicroBatch, Rows
from nemo_kto.parallel import device
from nemo_kto.parallel.logprobs import vocab_parallel_logprobs
from nemo_kto.parallel.reduce import from_last_stage, global_sums

Phase = Callable[[str], AbstractContextManager[Any]]


class MegatronGPTModel(ABC):
    """A policy in chunks over the pipeline, its schedule and its reference."""

    def __init__(
        self,
        *,
        chunks: Sequence[torch.nn.Module],
        reference: ReferencePolicy | None,
        vocab_size: int,
        micro_batch_size: int,
        forward_micro_batch_size: int,
        average_log_probs: bool,
        logprob_chunk_size: int,
        preference_loss_weight: float = 1.0,
        sft_loss_weight: float = 0.0,
        sft_average_log_probs: bool = False,
        moving_reference: MovingReference | None = None,
        phase: Phase = lambda name: contextlib.nullcontext(),
    ) -> None:
        """
        Args:
            chunks: this rank's model chunks, wrapped by ``models.optimizer.wrap_data_parallel``.
            reference: gives the reference policy; None for losses that need none.
            vocab_size: number of tokens of the tokenizer's vocabulary; columns past it are padding.
            micro_batch_size: prompts of one forward and backward pass.
            forward_micro_batch_size: rows of one pass without gradient.
            average_log_probs: a row's log-prob is the mean over its response tokens instead of the sum.
            logprob_chunk_size: tokens whose logits exist at the same time.
            preference_loss_weight: weight of the preference loss.
            sft_loss_weight: weight of the SFT loss, the mean negative log-prob of good answers.
            sft_average_log_probs: an answer's part in the SFT loss is the mean over its tokens instead of the sum.
            moving_reference: moves the reference now and then; None for one that stays.
            phase: names the phases of a step to a timer.
        """
        self.chunks: list[Any] = list(chunks)
        self.reference = reference
        self.vocab_size = vocab_size
        self.micro_batch_size = micro_batch_size
        self.forward_micro_batch_size = forward_micro_batch_size
        self.average_log_probs = average_log_probs
        self.logprob_chunk_size = logprob_chunk_size
        self.preference_loss_weight = preference_loss_weight
        self.sft_loss_weight = sft_loss_weight
        self.sft_average_log_probs = sft_average_log_probs
        self.moving_reference = moving_reference
        self.phase = phase
        self.config = get_model_config(self.chunks[0])
        self.config.finalize_model_grads_func = finalize_model_grads
        self._last_gpt: Any = unwrap_model(self.chunks[-1])  # on the last stage it has the output weight
        self._width_multiple = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1

    @abstractmethod
    def get_loss_and_metrics(self, batch: Batch, forward_only: bool) -> tuple[float, Metrics]:
        """Loss and metrics over the global batch; gradients too, unless ``forward_only``."""

    @abstractmethod
    def get_ref_policy_logprobs(self, batch: Batch) -> torch.Tensor:
        """Reference log-probs of the batch's rows, one number a row, on the CPU."""

    @property
    def uses_reference(self) -> bool:
        """Whether the loss needs reference log-probs."""
        return self.reference is not None

    def reference_logprobs(self, *parts: Rows) -> torch.Tensor:
        """Reference log-prob of each row's response, part after part: fp32, on the CPU.

        Raises:
            RuntimeError: the loss has no reference.
        """
        if self.reference is None:
            raise RuntimeError("the loss of this model needs no reference, so that there is none to ask")
        with self.phase("reference"):
            return self.reference.logprobs(parts, self.row_logprobs)

    def token_sums(self, rows: Rows) -> dict[str, torch.Tensor]:
        """``tokens`` of the rows, and the ``positions`` that their micro-batches carry, padding included."""
        positions = rows.positions(self.micro_batch_size, multiple=self._width_multiple)
        return {"tokens": rows.lengths_B.sum(), "positions": torch.tensor(positions)}

    def prepare_for_training_step(self) -> None:
        """Forget the gradients of the step before."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
            for parameter in chunk.parameters():
                parameter.grad = None  # where an optimizer steps in fp32 it lies here, and would be added once more

    def finish_training_step(self, step: int) -> None:
        """After optimizer step ``step`` (from 1): the reference moves, where it does that and it is time."""
        if self.moving_reference is not None:
            self.moving_reference.after_step(step)

    @torch.no_grad()
    def row_logprobs(self, rows: Rows) -> torch.Tensor:
        """Log-prob of each row's response under the present weights: [B], fp32, on the CPU, on every pipeline stage.

        Evaluation mode, no gradient.
        """
        logps_B = torch.zeros(len(rows), device=device.current_device())
        if not len(rows):
            return logps_B.cpu()
        prompts = max(1, self.forward_micro_batch_size // rows.answers)
        micro_batches = rows.micro_batches(prompts, multiple=self._width_multiple)

        def collect(micro_batch: MicroBatch, hidden: torch.Tensor, *, non_loss_data: bool) -> None:
            logps_B[micro_batch.rows_b.to(logps_B.device)] = self._micro_batch_logps(micro_batch, hidden)

        with self._evaluation_mode():
            self._run_schedule(micro_batches, collect, forward_only=True, collect_non_loss_data=True)
        return from_last_stage(logps_B).cpu()

    def forward_backward(
        self, rows: Rows, loss: Callable[[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]], *, forward_only: bool
    ) -> list[dict[str, torch.Tensor]]:
        """Send ``rows`` through the pipeline and, unless ``forward_only``, their loss back.

        Args:
            loss: (row log-probs [b], row numbers [b]) -> sums over these rows; ``loss_sum`` is differentiated and
                ``rows`` counts what it is the sum of. Gradients are those of the sum over the GLOBAL batch divided by its
                number of rows, whatever the layout and the micro-batch size.

        Returns:
            The sums of each micro-batch on the last pipeline stage, nothing on the others.
        """
        micro_batches = rows.micro_batches(self.micro_batch_size, multiple=self._width_multiple)

        def loss_of(micro_batch: MicroBatch, hidden: torch.Tensor) -> tuple[Any, ...]:
            sums = loss(self._micro_batch_logps(micro_batch, hidden), micro_batch.rows_b)
            detached = {name: value.detach() for name, value in sums.items()}
            return sums["loss_sum"], sums["rows"].detach().int(), detached

        if forward_only:
            if not micro_batches:
                return []
            with torch.no_grad(), self._evaluation_mode():
                return self._run_schedule(micro_batches, loss_of, forward_only=True)
        for chunk in self.chunks:
            chunk.train()
        return self._run_schedule(micro_batches, loss_of, forward_only=False)

    def sft_losses(self, logps_b: torch.Tensor, labels_bs: torch.Tensor) -> torch.Tensor:
        """Negative log-prob of each answer, as the SFT loss counts it: [b].

        Args:
            logps_b: row log-probs, as :meth:`row_logprobs` reduces them.
            labels_bs: labels of the same rows.
        """
        if self.sft_average_log_probs == self.average_log_probs:
            return -logps_b
        counts_b = response_counts(labels_bs).clamp(min=1).to(logps_b.device)
        return -logps_b / counts_b if self.sft_average_log_probs else -logps_b * counts_b

    def global_metrics(
        self,
        parts: Sequence[Mapping[str, torch.Tensor]],
        *,
        zeros: Mapping[str, torch.Tensor],
        batch_sums: Mapping[str, float],
        derive: Derive,
    ) -> tuple[float, Metrics]:
        """Loss and metrics of the global batch, the same on every rank.

        Args:
            parts: what :meth:`forward_backward` gave.
            zeros: the same sums over no rows: what a pipeline stage without a loss adds.
            batch_sums: sums over the global batch that are known already.
            derive: sums -> metrics, with ``loss`` among them.
        """
        sums = {name: sum((part[name].cpu() for part in parts), start=zero.cpu()) for name, zero in zeros.items()}
        metrics = Metrics(global_sums(sums) | dict(batch_sums), derive)
        return metrics["loss"], metrics

    def _run_schedule(
        self, micro_batches: Sequence[MicroBatch], loss_of: Callable[..., Any], *, forward_only: bool, **options: Any
    ) -> list[Any]:
        def forward_step(micro_batches_left: Iterator[MicroBatch], chunk: torch.nn.Module) -> tuple[Any, Any]:
            micro_batch = next(micro_batches_left)
            output = chunk(micro_batch.tokens_bs, micro_batch.positions_bs, micro_batch.mask_b1ss)
            return output, partial(loss_of, micro_batch)

        widest = max(micro_batch.tokens_bs.shape[1] for micro_batch in micro_batches)
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(micro_batches) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(micro_batches),
            seq_length=widest,  # the schedule exchanges the true shapes: variable_seq_lengths
            micro_batch_size=len(micro_batches[0].rows_b),
            forward_only=forward_only,
            **options,
        )

    def _micro_batch_logps(self, micro_batch: MicroBatch, hidden_bsh: torch.Tensor) -> torch.Tensor:
        """Hidden states of the last stage to one log-prob a row: [b], fp32. Only response tokens meet the vocabulary."""
        hidden_sbh = hidden_bsh.transpose(0, 1)
        if self.config.sequence_parallel:
            hidden_sbh = gather_from_sequence_parallel_region(hidden_sbh)
        num_rows = hidden_sbh.shape[1]
        row_T, position_T, target_T = response_positions(micro_batch.labels_bs)
        logps_T = vocab_parallel_logprobs(
            hidden_sbh.flatten(0, 1)[position_T * num_rows + row_T],
            self._last_gpt.output_weight(),
            target_T,
            vocab_size=self.vocab_size,
            group=parallel_state.get_tensor_model_parallel_group(),
            chunk_size=self.logprob_chunk_size,
            reduce_hidden_grad=not self.config.sequence_parallel,  # else the gather's backward sums it
        )
        return row_sums(logps_T, row_T, num_rows, average=self.average_log_probs)

    @contextlib.contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        was_training = [chunk.training for chunk in self.chunks]
        for chunk in self.chunks:
            chunk.eval()
        try:
            yield
        finally:
            for chunk, training in zip(self.chunks, was_training, strict=True):
                chunk.train(training)
