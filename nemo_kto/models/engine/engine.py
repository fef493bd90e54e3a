"""Log-probs of sequences under a model-parallel GPT policy: forward passes, or forward and backward passes.

Sequences are split into micro-batches and sent through megatron-core's pipeline schedule, which yields one log-prob per
sequence. The caller passes the loss as a function; the engine does not depend on the training algorithm.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor

from nemo_kto.device import device
from nemo_kto.distributed.collectives import from_last_stage, leads_context_parallel, sum_over_context_parallel
from nemo_kto.distributed.gradients import bucket_groups, finish_gathers
from nemo_kto.distributed.logprobs import check_targets, vocab_parallel_logits, vocab_parallel_logprobs
from nemo_kto.distributed.state import max_over_ranks
from nemo_kto.layers.attention import GatedAttention, TorchAttention
from nemo_kto.layers.mlp import balance_sums, experts_span_copies, routers
from nemo_kto.losses.sequence import IGNORED, sequence_sums
from nemo_kto.models.engine.sequences import MicroBatch, MicroBatchLimits, SequenceBatch, joined
from nemo_kto.models.flops import ModelFlops, Passes
from nemo_kto.models.gpt import HiddenStateGPT
from nemo_kto.models.lora.adapters import constant_weights

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


class LogProbs(NamedTuple):
    """Log-probs of the sequences of a micro-batch: [b] fp32 each, on the device; [0] for a kind that is not computed."""

    response_b: Tensor  # with the weights of the tokens, if the sequences have any
    unweighted_b: Tensor  # the same without weights
    prompt_b: Tensor  # second log-prob of sequences that have one
    log_weight_b: Tensor  # with ``log_weights`` of :meth:`LogProbEngine.forward_backward`


class LogRatios(NamedTuple):
    """Log-ratios of the sequences of a micro-batch (log-probs for a loss without a reference)."""

    sequence_index_b: Tensor
    values_b: Tensor


class MicroBatchReport(NamedTuple):
    """Values of one micro-batch for the metrics, without gradient."""

    sums: Mapping[str, Tensor]  # the same names in every micro-batch
    log_ratios: LogRatios | None  # of a forward pass whose metrics include rewards


class MicroBatchLoss(NamedTuple):
    """Loss of one micro-batch, in the form that megatron-core's schedule expects."""

    loss_sum: Tensor  # sum over the examples, with gradient
    num_examples: Tensor  # 0-d int
    report: MicroBatchReport

    @classmethod
    def of(cls, sums: Mapping[str, Tensor], log_ratios: LogRatios | None = None) -> MicroBatchLoss:
        """Build the loss from sums that include ``loss_sum`` and ``rows`` (its number of examples)."""
        detached = {name: value.detach() for name, value in sums.items()}
        return cls(sums["loss_sum"], detached["rows"].int(), MicroBatchReport(detached, log_ratios))


SequenceLoss = Callable[[Tensor, LogProbs], MicroBatchLoss]
"""(indices of the sequences in the batch [b], their log-probs) -> loss, on the last pipeline stage.

All are on the device. Reading one of their values on the host, or copying host data to the device, would make the host wait
at each micro-batch.
"""

Head = Callable[[MicroBatch, Tensor], Tensor | LogProbs]
"""(micro-batch, hidden states of the last stage) -> values for each sequence, [b] or [b, V], on the device."""


@dataclass(kw_only=True, eq=False)
class LogProbEngine:
    """Runs the model chunks of this rank through the pipeline schedule. All methods are collective."""

    chunks: list[DistributedDataParallel]  # wrapped by ``wrap_data_parallel``
    vocab_size: int  # of the tokenizer; logit columns beyond it are padding
    limits: MicroBatchLimits  # of a forward and backward pass
    # Number of sequences in a micro-batch of a pass without gradient; None to use ``limits``, so that the same weights give
    # bitwise identical log-probs.
    forward_micro_batch_size: int | None
    average_log_probs: bool  # a sequence's log-prob is the mean over its response tokens, instead of the sum
    logprob_chunk_size: int  # number of tokens whose logits exist at the same time
    logprob_gradient_summands: int  # see ``vocab_parallel_logprobs``
    flops: ModelFlops
    moe_aux_loss_coeff: float = 0.0  # weight of the load-balancing loss of each layer with experts in the objective
    # Forward passes of this rank, in which only tensor- and context-parallel ranks wait for each other.
    forward_clock: device.Stopwatch = field(default_factory=device.Stopwatch)

    def __post_init__(self) -> None:
        self._config = get_model_config(self.chunks[0])
        self._config.finalize_model_grads_func = _finalize_gradients
        self._last_gpt: HiddenStateGPT = unwrap_model(self.chunks[-1])
        self._local_norms: list[Tensor] = []
        # replaces megatron-core's check of this rank's gradients, which runs just before they are reduced
        for chunk in self.chunks:
            chunk.ddp_config.check_for_nan_in_grad = True
            for group in bucket_groups(chunk):
                group.check_grads = partial(self._note_gradients, group)

    def logprobs(self, *parts: SequenceBatch) -> Tensor:
        """Return the log-prob of each response, part after part: [B], fp32, on the device, the same on every pipeline stage.

        The host does not wait for the device, so that it prepares the next pass while this one runs.
        """
        batches = self.joined(parts)
        if experts_span_copies(self._config):  # the ranks agree on the numbers of micro-batches before the first pass runs
            for sequences in batches:
                self._micro_batches(sequences, self._forward_limits(sequences))
        return from_last_stage(torch.cat([self._local_logprobs(sequences) for sequences in batches]))

    def joined(self, parts: Sequence[SequenceBatch]) -> Sequence[SequenceBatch]:
        """Return the batches in which the parts are evaluated, see :func:`joined`."""
        return joined(parts, self.limits, in_fp32=self._config.params_dtype == torch.float32)

    def _local_logprobs(self, sequences: SequenceBatch) -> Tensor:
        """Return the log-probs of one part on the device; only the last pipeline stage computes them, others return 0."""
        logps_B = torch.zeros(len(sequences), device=device.current_device())
        micro_batches = self._micro_batches(sequences, self._forward_limits(sequences))
        self._forward(micro_batches, self._sequence_logps, logps_B)
        return logps_B

    def next_token_logits(self, sequences: SequenceBatch) -> Tensor:
        """Return the logits from which the only response token of each sequence is predicted: [B, vocab_size], fp32.

        The response token itself does not affect them. The result is on the device; only the last pipeline stage computes
        it, others return 0.
        """
        return self.logits_of(self._micro_batches(sequences, self.limits), len(sequences))

    def logits_of(self, micro_batches: list[MicroBatch], size: int) -> Tensor:
        """Return the same for the micro-batches of ``size`` sequences."""
        logits_BV = torch.zeros(size, self.vocab_size, device=device.current_device())
        self._forward(micro_batches, self._response_logits, logits_BV)
        return logits_BV

    def keeps_tokens(self) -> bool:
        """Return whether all layers of the model can continue sequences without computing their tokens again; collective.

        They must have softmax attention of this package, and the tokens of a pass must not be divided among the ranks, or
        need several micro-batches, as with virtual pipeline stages.
        """
        config, modules = self._config, [module for chunk in self.chunks for module in chunk.modules()]
        layers = [module for module in modules if isinstance(module, TransformerLayer)]
        attentions = [
            layer.self_attention for layer in layers if type(layer.self_attention) in (SelfAttention, GatedAttention)
        ]
        can = len(attentions) == len(layers) and all(type(each.core_attention) is TorchAttention for each in attentions)
        can = can and self.limits.multiple == config.context_parallel_size == self.limits.group == 1
        can = can and not experts_span_copies(config)
        return max_over_ranks(int(not can)) == 0

    def _forward(self, micro_batches: list[MicroBatch], head: Head, values_B: Tensor) -> None:
        """Run forward passes without gradient, and write what ``head`` computes for each sequence to ``values_B``."""

        def collect(sequence_index_b: Tensor, values_b: Tensor, *, non_loss_data: bool) -> None:
            values_B[sequence_index_b] = values_b

        if micro_batches:
            schedule = self._schedule(micro_batches, collect, forward_only=True, head=head)
            with self._mode(forward_only=True):
                schedule(collect_non_loss_data=True)

    def _forward_limits(self, sequences: SequenceBatch) -> MicroBatchLimits:
        return self.limits.forward_only(self.forward_micro_batch_size, answers=sequences.answers)

    def forward_backward(
        self, sequences: SequenceBatch, loss: SequenceLoss, *, forward_only: bool, log_weights: bool = False
    ) -> list[MicroBatchReport]:
        """Run the forward passes and, unless ``forward_only``, the backward passes of ``sequences``.

        With ``log_weights`` the loss also gets the log of the weight of each response in WPO, without gradient: the mean
        over its tokens of log p(token) - log of the sum of p^2 over the vocabulary.

        Gradients are those of the sum of the loss over the GLOBAL batch divided by its number of examples, at every layout.
        Returns the report of each micro-batch on the last pipeline stage, an empty list on the others.
        """
        for router in routers(self.chunks):  # the objective is a mean over examples, which have ``answers`` sequences each
            router.loss_weight, router.balance = self.moe_aux_loss_coeff / sequences.answers, None
        micro_batches = self._micro_batches(sequences, self.limits)
        if forward_only and not micro_batches:
            return []
        if not forward_only:
            self._local_norms = []
        schedule = self._schedule(
            micro_batches, loss, forward_only=forward_only, head=partial(self._loss_values, log_weights)
        )
        with self._mode(forward_only=forward_only):
            return schedule()

    def balance_sums(self) -> dict[str, float]:
        """Return :func:`~nemo_kto.layers.mlp.balance_sums` of the last forward and backward passes; collective."""
        return balance_sums(self.chunks)

    def zero_grad(self) -> None:
        """Clear the gradients of the previous step."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
            for parameter in chunk.parameters():
                parameter.grad = None  # an optimizer in fp32 leaves the gradient here, and it would be added again

    def _note_gradients(self, group: Any, **_: bool) -> None:
        """Record the gradient norms of a group of buckets, before they are summed over the ranks."""
        self._local_norms += [bucket.grad_data.norm() for bucket in group.buckets]

    def local_gradients_are_finite(self) -> Tensor:
        """Return whether this rank's own gradients of the last backward pass are finite: 0-d bool, on the device."""
        return self._all_finite(self._local_norms)

    def local_weights_are_finite(self) -> Tensor:
        """Return whether the trainable weights of this rank are finite: 0-d bool, on the device; collective."""
        finish_gathers(self.chunks)
        trained = [weight.detach() for chunk in self.chunks for weight in chunk.parameters() if weight.requires_grad]
        # the largest values; isfinite of the weights themselves would need temporary copies
        return self._all_finite([torch.linalg.vector_norm(weight, ord=math.inf).float() for weight in trained])

    @staticmethod
    def _all_finite(values: Sequence[Tensor]) -> Tensor:
        return torch.stack([torch.zeros((), device=device.current_device()), *values]).isfinite().all()

    def work_sums(self, sequences: SequenceBatch, *, passes: Passes) -> dict[str, Tensor]:
        """Return the work of ``passes`` over ``sequences`` as 0-d tensors; collective with expert parallelism.

        ``tokens`` are without padding, ``padded_tokens`` with that of all micro-batches, including empty ones, and without
        the ``shared_tokens``, those of prompts that another sequence shares. See :meth:`flops_sums` for the others.
        """
        count = len(self._micro_batches(sequences, self.limits))
        padded = sequences.padded_tokens(self.limits, agree=lambda _: count)
        return {
            "tokens": sequences.lengths_B.sum(),
            "padded_tokens": torch.tensor(padded),
            "shared_tokens": torch.tensor(sum(sequences.shared_prompts(self.limits))),
            **self._flops_sums(sequences, self.limits, passes),
        }

    def flops_sums(self, *parts: SequenceBatch, passes: Passes) -> dict[str, Tensor]:
        """Return the work of calls of :meth:`logprobs`, each with ``passes``, as 0-d tensors.

        The ``saved_flops`` are those that shared prompts would have needed in addition to the ``flops``.
        """
        sums = [self._flops_sums(part, self._forward_limits(part), passes) for part in self.joined(parts)]
        return {name: torch.stack([each[name] for each in sums]).sum() for name in sums[0]}

    def _flops_sums(self, sequences: SequenceBatch, limits: MicroBatchLimits, passes: Passes) -> dict[str, Tensor]:
        flops = self.flops.of_passes(passes)
        saved = flops.of_prompts(sequences.shared_prompts(limits))
        return {"flops": flops.of(sequences) - saved, "saved_flops": saved}

    def _micro_batches(self, sequences: SequenceBatch, limits: MicroBatchLimits) -> list[MicroBatch]:
        """Return the micro-batches on the device, which the sequences keep for further passes; collective at first."""
        if (kept := sequences.kept.get(limits)) is not None:
            return kept
        for labels_BS in sequences.label_sets:
            check_targets(labels_BS[labels_BS != IGNORED], vocab_size=self.vocab_size)
        agree: Callable[[int], int] = int
        # Data-parallel ranks among which experts are partitioned exchange tokens in every pass, so they must run the same
        # number of passes: a rank with fewer micro-batches adds empty ones.
        if experts_span_copies(self._config):
            agree = partial(max_over_ranks, group=parallel_state.get_data_parallel_group())
        rank = parallel_state.get_context_parallel_rank()
        micro_batches = sequences.micro_batches(limits, context_rank=rank, agree=agree)
        sequences.kept[limits] = micro_batches
        return micro_batches

    @contextlib.contextmanager
    def _mode(self, *, forward_only: bool) -> Iterator[None]:
        """Context for passes: in evaluation and without gradient if ``forward_only``; weights do not change inside it."""
        was_training = self.chunks[0].training
        for chunk in self.chunks:
            chunk.train(not forward_only)
        try:
            with torch.set_grad_enabled(not forward_only), constant_weights(self.chunks):
                yield
        finally:
            for chunk in self.chunks:
                chunk.train(was_training or not forward_only)

    def _schedule(
        self, micro_batches: list[MicroBatch], loss: Callable[..., object], *, forward_only: bool, head: Head
    ) -> Callable[..., list[MicroBatchReport]]:
        """Return megatron-core's schedule, bound to run the micro-batches and to call ``loss`` for each of them.

        ``loss`` gets what ``head`` computes from the hidden states of the last stage.
        """

        def forward_step(left: Iterator[MicroBatch], chunk: torch.nn.Module) -> tuple[object, Callable[..., object]]:
            micro_batch = next(left)
            with self.forward_clock.running():
                output = chunk(
                    micro_batch.tokens_bs,
                    micro_batch.positions_bs,
                    None,  # no attention mask: attention is causal within each sequence
                    packed_seq_params=micro_batch.packed,
                    **self._token_owners(micro_batch, chunk),
                )
                if unwrap_model(chunk).post_process:
                    output = head(micro_batch, output)
            return output, partial(loss, micro_batch.sequence_index_b)

        self._config.message_shapes = MessageShapes.of(micro_batches, self._config)
        return partial(
            get_forward_backward_func(),
            forward_step_func=forward_step,
            data_iterator=[iter(micro_batches) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(micro_batches),
            # nominal: with variable_seq_lengths the schedule takes the shapes from ``message_shapes``
            seq_length=max(micro_batch.tokens_bs.shape[1] for micro_batch in micro_batches),
            micro_batch_size=micro_batches[0].tokens_bs.shape[0],
            forward_only=forward_only,
        )

    def _token_owners(self, micro_batch: MicroBatch, chunk: torch.nn.Module) -> dict[str, Tensor]:
        """Return the sequence of each token for the load-balancing loss, as the keyword argument ``padding_mask``.

        It is [b, s (a part if sequence parallel), n], True where token s belongs to sequence n; a token of a shared prompt
        belongs to several. megatron-core passes ``padding_mask`` to its routers unchanged, and the routers of this package
        interpret it in this way.
        """
        if self._config.num_moe_experts is None or not unwrap_model(chunk).training:
            return {}
        segment_bs = micro_batch.segment_bs
        if self._config.sequence_parallel:
            ranks, rank = self._config.tensor_model_parallel_size, parallel_state.get_tensor_model_parallel_rank()
            segment_bs = segment_bs.chunk(ranks, dim=1)[rank]
        return {"padding_mask": micro_batch.owners_nb[segment_bs]}

    def _sequence_logps(self, micro_batch: MicroBatch, hidden_bsh: Tensor) -> Tensor:
        """Return the log-probs of the sequences, [b] or [2b] fp32."""
        logps_T = self._token_logps(micro_batch, hidden_bsh)
        weighted_T = logps_T if micro_batch.weight_T is None else logps_T * micro_batch.weight_T
        return self._over_tokens(micro_batch, weighted_T, average=self.average_log_probs)

    def _loss_values(self, log_weights: bool, micro_batch: MicroBatch, hidden_bsh: Tensor) -> LogProbs:
        """Return the log-probs of the sequences for a :data:`SequenceLoss`."""
        tokens, size = self._token_logps(micro_batch, hidden_bsh, square_sums=log_weights), len(micro_batch.sequence_index_b)
        logps_T, square_sums_T = tokens if log_weights else (tokens, None)
        over_tokens = partial(self._over_tokens, micro_batch)
        unweighted_b, prompt_b = over_tokens(logps_T, average=self.average_log_probs).tensor_split([size])
        response_b, log_weight_b = unweighted_b, unweighted_b.new_zeros(0)
        if micro_batch.weight_T is not None:
            response_b = over_tokens(logps_T * micro_batch.weight_T, average=self.average_log_probs)[:size]
        if square_sums_T is not None:
            log_weight_b = over_tokens((logps_T - square_sums_T).detach(), average=True)[:size]
        return LogProbs(response_b, unweighted_b, prompt_b, log_weight_b)

    def _token_logps(self, micro_batch: MicroBatch, hidden_bsh: Tensor, *, square_sums: bool = False) -> Tensor:
        """Return the log-probs of counted tokens, [T] fp32; only hidden states that predict one get logits."""
        return vocab_parallel_logprobs(
            self._response_states(micro_batch, hidden_bsh),
            self._last_gpt.output_weight(),
            micro_batch.target_T,
            vocab_size=self.vocab_size,
            group=parallel_state.get_tensor_model_parallel_group(),
            chunk_size=self.logprob_chunk_size,
            softcap=self._last_gpt.logit_softcap,
            reduce_hidden_grad=not self._config.sequence_parallel,  # otherwise the backward pass of the gather sums it
            square_sums=square_sums,
            summands=self.logprob_gradient_summands,
        )

    def _over_tokens(self, micro_batch: MicroBatch, values_T: Tensor, *, average: bool) -> Tensor:
        """Return sum or mean of token values for each log-prob, [b] or [2b] fp32."""
        return sequence_sums(
            values_T, micro_batch.logprob_T, micro_batch.num_logprobs, average=average, over_ranks=sum_over_context_parallel
        )

    def _response_logits(self, micro_batch: MicroBatch, hidden_bsh: Tensor) -> Tensor:
        """Return the logits that predict the only response token of each sequence: [b, vocab_size], fp32."""
        logits_TV = vocab_parallel_logits(
            self._response_states(micro_batch, hidden_bsh),
            self._last_gpt.output_weight(),
            vocab_size=self.vocab_size,
            group=parallel_state.get_tensor_model_parallel_group(),
            softcap=self._last_gpt.logit_softcap,
        )
        # each token is on one context-parallel rank; the others add zeros
        logits_bV = logits_TV.new_zeros(micro_batch.num_logprobs, self.vocab_size)
        return sum_over_context_parallel(logits_bV.index_copy(0, micro_batch.logprob_T, logits_TV))

    def _response_states(self, micro_batch: MicroBatch, hidden_bsh: Tensor) -> Tensor:
        """Return the hidden states that predict response tokens: [T, H]."""
        hidden_sbh = hidden_bsh.transpose(0, 1)
        if self._config.sequence_parallel:
            hidden_sbh = gather_from_sequence_parallel_region(hidden_sbh)
        return hidden_sbh.flatten(0, 1)[micro_batch.hidden_index_T]


def _finalize_gradients(chunks: list[torch.nn.Module], num_examples: Tensor, **options: Any) -> None:
    """Sum gradients over data- and context-parallel ranks and divide them by the number of examples, with megatron-core."""
    # megatron-core sums this over the same ranks, but context-parallel ranks have the same examples
    counted = num_examples if leads_context_parallel() else torch.zeros_like(num_examples)
    finalize_model_grads(chunks, counted, **options)
