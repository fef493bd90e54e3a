"""KTO: a batch of judged answers becomes rows, and rows become a loss."""

from __future__ import annotations

from typing import Any

import torch

from nemo_kto.losses.kto import apo_zero_unpaired_losses, kl_reference_point, kto_losses, kto_metric_sums, kto_metrics
from nemo_kto.losses.metrics import Metrics
from nemo_kto.models.nlp.gpt.megatron_gpt_model import Batch, MegatronGPTModel, Rows, rows_of
from nemo_kto.models.reference import SwappedReference
from nemo_kto.parallel import cpu
from nemo_kto.parallel.reduce import global_sums, sum_over_data_parallel


class MegatronGPTKTOModel(MegatronGPTModel):
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv 2402.01306) of a GPT policy.

    The step, over one global batch: the reference point z0 comes from the KL rows, forward only; then the samples go
    forward and backward with that z0. KL rows never see a backward pass.
    """

    reference: SwappedReference

    def __init__(
        self,
        *,
        preference_loss: str,
        ref_policy_kl_penalty: float,
        desirable_loss_weight: float,
        undesirable_loss_weight: float,
        **base: Any,
    ) -> None:
        """
        Args:
            preference_loss: 'kto' or 'apo_zero_unpaired' (which has no z0 and no KL rows).
            ref_policy_kl_penalty: beta, how strongly the policy is held to the reference.
            desirable_loss_weight: weight of desirable rows.
            undesirable_loss_weight: weight of undesirable rows.
            **base: keyword arguments of :class:`MegatronGPTModel`.
        """
        super().__init__(**base)
        self.preference_loss = preference_loss
        self.beta = ref_policy_kl_penalty
        self.weights = {"desirable_weight": desirable_loss_weight, "undesirable_weight": undesirable_loss_weight}

    @property
    def uses_kl_rows(self) -> bool:
        """Whether the loss needs z0, and so the KL rows."""
        return self.preference_loss == "kto"

    def get_ref_policy_logprobs(self, batch: Batch) -> torch.Tensor:
        """Reference log-prob of each row's response: [2B], fp32, CPU; the samples first, then the KL rows.

        [B] where the loss needs no KL rows.
        """
        with self.phase("reference"), self.reference.active():
            parts = [self.row_logprobs(rows_of(batch, "samples"))]
            if self.uses_kl_rows:
                parts.append(self.row_logprobs(rows_of(batch, "kl_samples")))
            return torch.cat(parts)

    def get_loss_and_metrics(self, batch: Batch, forward_only: bool) -> tuple[float, Metrics]:
        """One KTO step's loss over the global batch, the same on every rank.

        Args:
            batch: this rank's rows, with ``ref_policy_log_probs_samples`` [B] and, for KTO,
                ``ref_policy_log_probs_kl_samples`` [B] attached.
            forward_only: leave the gradients alone.

        Returns:
            The loss and the metrics of :func:`nemo_kto.losses.kto.kto_metrics`.
        """
        with self.phase("kl"):
            kl_sums = self._kl_sums(batch)
        samples = rows_of(batch, "samples")
        with self.phase("forward_backward"):
            micro_batch_sums = self.forward_backward(
                samples, self._loss_over(samples, batch, kl_sums), forward_only=forward_only
            )
        with self.phase("metrics"):
            nothing = self._nothing(kl_sums)
            sums = {name: sum((part[name] for part in micro_batch_sums), start=zero) for name, zero in nothing.items()}
            metrics = Metrics(global_sums(sums) | {name: float(v) for name, v in kl_sums.items()}, kto_metrics)
        return metrics["loss"], metrics
