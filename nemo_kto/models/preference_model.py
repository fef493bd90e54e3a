"""Base class of the preference models: the reference, the SFT term, and metrics over the global batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nemo_kto.device import device
from nemo_kto.distributed.collectives import from_last_stage, gather_over_data_parallel, global_sums, ranks_where, to_host
from nemo_kto.losses.loss import Loss
from nemo_kto.losses.metrics import Derive, Metrics, Rewards, balance_metrics
from nemo_kto.models.engine.engine import LogProbEngine, LogProbs, MicroBatchReport, SequenceLoss
from nemo_kto.models.engine.reference import Phase, ReferencePolicy
from nemo_kto.models.engine.sequences import SequenceBatch
from nemo_kto.models.flops import Passes


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Training objective: preference_loss_weight * loss + sft_loss_weight * SFT loss.

    The SFT loss is the mean negative log-prob of the chosen or desirable answers.
    """

    loss: Loss
    options: Mapping[str, object] = field(default_factory=dict)  # optional keyword arguments of the loss
    beta: float  # strength of the regularisation towards the reference
    preference_loss_weight: float = 1.0
    sft_loss_weight: float = 0.0
    sft_average_log_probs: bool = False  # each answer's SFT loss is the mean over its tokens instead of the sum


def upload_values(**values: Tensor | None) -> dict[str, Tensor]:
    """Copy values of a batch to the device, once, so that no micro-batch waits for a transfer; None is left out."""
    present = {name: value for name, value in values.items() if value is not None}
    return dict(zip(present, device.upload([*present.values()]), strict=True))


def add_work(work: Mapping[str, Tensor], *others: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``work`` of the engine with that of other passes added; sums that a pass lacks count as 0."""
    return {name: sum((other[name] for other in others if name in other), start=value) for name, value in work.items()}


@dataclass(kw_only=True, eq=False)
class PreferenceModel:
    """A policy with its objective and its reference; the engine runs the forward and backward passes."""

    engine: LogProbEngine
    reference: ReferencePolicy | None  # None for losses that need none
    objective: Objective
    phase: Phase = nullcontext  # reports a named phase of a step to a timer
    _kept: tuple[Mapping[str, Any], tuple[SequenceBatch, ...]] | None = field(init=False, default=None)
    _local_loss: Tensor = field(init=False, default_factory=lambda: torch.zeros(()))  # this rank's part of the last loss

    @property
    def uses_reference(self) -> bool:
        """Whether the loss needs reference log-probs."""
        return self.reference is not None

    def reference_work(self, *parts: SequenceBatch) -> dict[str, Tensor]:
        """Return the work of the reference in one step, as the engine's ``flops_sums``."""
        return self.engine.flops_sums(*parts, passes=Passes() if self.reference is None else self.reference.passes)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the objective, as plain numbers, that a checkpoint must keep; {} for most losses."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""

    def zero_grad(self) -> None:
        self.engine.zero_grad()

    @staticmethod
    def sequences(batch: Mapping[str, Any]) -> tuple[SequenceBatch, ...]:
        """Return the sequences for which reference log-probs are needed."""
        raise NotImplementedError

    def kept_sequences(self, batch: Mapping[str, Any]) -> tuple[SequenceBatch, ...]:
        """Return :meth:`sequences`; for the same tensors as in the last call the same, which keep their micro-batches."""
        tensors = {name: value for name, value in batch.items() if not name.startswith("ref_policy_log_probs")}
        if self._kept is None or [*map(id, self._kept[0].values())] != [*map(id, tensors.values())]:
            self._kept = tensors, self.sequences(batch)
        return self._kept[1]

    def get_ref_policy_logprobs(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the reference log-prob of each response of :meth:`sequences`, one after the other: fp32, on the device.

        Raises RuntimeError if the loss needs no reference.
        """
        if self.reference is None:
            raise RuntimeError("the model has no reference policy, because its loss does not need one")
        with self.phase("reference"):
            return self.reference.logprobs(*self.kept_sequences(batch))

    def ranks_not_finite(self) -> list[int]:
        """Return the ranks whose own contribution to the last loss or gradient is not finite; collective."""
        return ranks_where(~(self._local_loss.isfinite() & self.engine.local_gradients_are_finite()))

    def has_finite_weights(self) -> bool:
        """Return whether the weights of all ranks are finite; collective."""
        return not ranks_where(~self.engine.local_weights_are_finite())

    def sft_losses(self, logps_b: Tensor, response_counts_b: Tensor, *, average: bool) -> Tensor:
        """Return the negative log-prob of each answer, [b]: the sum over its response tokens, or the ``average``.

        ``logps_b`` are reduced as the engine does (sum or mean over tokens).
        """
        if average == self.engine.average_log_probs:
            return -logps_b
        counts_b = response_counts_b.clamp(min=1)
        return -logps_b / counts_b if average else -logps_b * counts_b

    def global_rewards(
        self, parts: Sequence[MicroBatchReport], chosen_B: Tensor, valid_B: Tensor, *, paired: bool
    ) -> Rewards:
        """Return the rewards of the valid examples of the global batch, on every rank; collective.

        ``parts`` are the reports of the engine's ``forward_backward``, which only the last pipeline stage has; the other
        arguments are those of this rank's sequences, on the device.
        """
        log_ratios_B = torch.zeros(len(chosen_B), device=chosen_B.device)
        for _, log_ratios in parts:
            assert log_ratios is not None, "a forward pass reports log-ratios"
            log_ratios_B[log_ratios.sequence_index_b] = log_ratios.values_b
        rows_B3 = torch.stack([from_last_stage(log_ratios_B), chosen_B.float(), valid_B.float()], dim=1)
        log_ratios_N, chosen_N, valid_N = gather_over_data_parallel(rows_B3)[0].cpu().unbind(dim=1)
        rewards_N = self.objective.beta * log_ratios_N.double()
        is_chosen_N, is_rejected_N = (valid_N > 0) & (chosen_N > 0), (valid_N > 0) & (chosen_N == 0)
        return Rewards(chosen_N=rewards_N[is_chosen_N], rejected_N=rewards_N[is_rejected_N], paired=paired)

    def global_metrics(
        self,
        parts: Sequence[MicroBatchReport],
        *,
        loss: SequenceLoss,
        batch_sums: dict[str, Tensor],
        derive: Derive,
        rewards: Rewards | None = None,
    ) -> tuple[float, Metrics]:
        """Return loss and metrics of the global batch, identical on every rank.

        ``parts`` are the reports of the engine's ``forward_backward``; ``loss`` over no examples gives the contribution of a
        stage without micro-batch losses. ``batch_sums`` are sums over the global batch that every stage already has, 0-d
        float64 on the device; ``derive`` maps sums to metrics, which must include ``loss``; ``rewards`` are those of the
        global batch, if its metrics include any of single examples.
        """
        nothing = torch.zeros(0, device=device.current_device())
        zeros = loss(nothing.long(), LogProbs(nothing, nothing, nothing, nothing)).report.sums
        sums = {name: sum((part.sums[name] for part in parts), start=zero) for name, zero in zeros.items()}
        self._local_loss = sums["loss_sum"]
        metrics = Metrics(
            to_host(global_sums(sums) | batch_sums) | self.engine.balance_sums(),
            lambda sums: {**derive(sums), **balance_metrics(sums)},
            None if rewards is None else {"": rewards},
        )
        return metrics["loss"], metrics
