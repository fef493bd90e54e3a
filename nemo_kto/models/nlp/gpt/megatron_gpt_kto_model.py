"""KTO: a batch of judged answers becomes rows, and rows become a loss."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from nemo_kto.losses.kto import (
    LOSSES,
    kl_reference_point,
    kl_sums,
    kto_metric_sums,
    kto_metrics,
)
from nemo_kto.losses.loss import find_loss
from nemo_kto.losses.metrics import Metrics
from nemo_kto.losses.sequence import valid_rows
from nemo_kto.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_kto.models.rows import Batch, rows_of
from nemo_kto.parallel import cpu
from nemo_kto.parallel.reduce import sum_over_data_parallel


class MegatronGPTKTOModel(MegatronGPTModel):
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv 2402.01306) of a GPT policy.

    The step, over one global batch: the reference point z0 comes from the KL rows, forward only; then the samples go
    forward and backward with that z0. KL rows never see a backward pass.
    """

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
        self.loss = find_loss(preference_loss, LOSSES)
        self.beta = ref_policy_kl_penalty
        self.weights = {"desirable_weight": desirable_loss_weight, "undesirable_weight": undesirable_loss_weight}

    @property
    def uses_kl_rows(self) -> bool:
        """Whether the loss needs z0, and so the KL rows."""
        return self.loss.needs_z0

    def get_ref_policy_logprobs(self, batch: Batch) -> torch.Tensor:
        """Reference log-prob of each row's response: [2B], fp32, CPU; the samples first, then the KL rows.

        [B] where the loss needs no KL rows.
        """
        names = ("samples", "kl_samples") if self.uses_kl_rows else ("samples",)
        return self.reference_logprobs(*(rows_of(batch, name) for name in names))

    def get_loss_and_metrics(self, batch: Batch, forward_only: bool) -> tuple[float, Metrics]:
        """One KTO step's loss over the global batch, the same on every rank.

        Args:
            batch: this rank's rows, with ``ref_policy_log_probs_samples`` [B] and, for KTO,
                ``ref_policy_log_probs_kl_samples`` [B] attached.
            forward_only: leave the gradients alone.

        Returns:
            The loss and the metrics of :func:`nemo_kto.losses.kto.kto_metrics`.
        """
        z0, batch_sums = self._reference_point(batch)
        # the SFT loss is a mean over desirable rows, the loss as a whole one over all rows
        sft_weight = self.sft_loss_weight * batch_sums["valid"] / max(batch_sums["valid_desirable"], 1)
        sums_of = partial(self._sample_sums, batch, sft_weight)
        with self.phase("forward_backward"):
            parts = self.forward_backward(rows_of(batch, "samples"), partial(sums_of, z0), forward_only=forward_only)
        zeros = sums_of(z0.cpu(), torch.zeros(0), torch.zeros(0, dtype=torch.int64))
        return self.global_metrics(parts, zeros=zeros, batch_sums=batch_sums, derive=kto_metrics)

    def _reference_point(self, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        """z0 over the global batch (0-d), and sums over the batch that every pipeline stage knows.

        The policy is asked forward only.
        """
        sums = self.token_sums(rows_of(batch, "samples"))
        valid_B = valid_rows(batch["sample_labels"])
        if self.uses_kl_rows:
            with self.phase("kl"):
                kl_rows = rows_of(batch, "kl_samples")
                log_ratios_B = self.row_logprobs(kl_rows) - batch["ref_policy_log_probs_kl_samples"]
            sums = {name: count + self.token_sums(kl_rows)[name] for name, count in sums.items()}
            sums |= kl_sums(log_ratios_B, valid_rows(kl_rows.labels_BS))
            if "kl_same_prompt" in batch:
                sums["same_prompt_pairs"] = batch["kl_same_prompt"].sum()
        sums |= {"valid": valid_B.sum(), "valid_desirable": (valid_B & batch["preference"].bool()).sum()}
        total = sum_over_data_parallel(sums)
        named = {name: float(value) for name, value in total.items()}
        if not self.uses_kl_rows:
            return torch.zeros((), device=cpu.device()), named
        return kl_reference_point(total["kl_sum"], total["kl_rows"]).float(), named

    def _sample_sums(
        self, batch: Batch, sft_weight: float, z0: torch.Tensor, logps_b: torch.Tensor, rows_b: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Sums of one micro-batch: its rows' log-probs [b] and their numbers in the batch [b]."""

        def pick(values_B: torch.Tensor) -> torch.Tensor:
            return values_B[rows_b].to(logps_b.device)

        log_ratios_b = logps_b - pick(batch["ref_policy_log_probs_samples"])
        desirable_b = pick(batch["preference"])
        anchor = {"z0": z0} if self.uses_kl_rows else {}
        kto_b = self.loss.function(log_ratios_b, desirable_b, beta=self.beta, **anchor, **self.weights)
        sft_b = self.sft_losses(logps_b, batch["sample_labels"][rows_b])
        return kto_metric_sums(
            self.preference_loss_weight * kto_b + sft_weight * torch.where(desirable_b.bool(), sft_b, 0),
            preference_losses_N=kto_b,
            sft_losses_N=sft_b,
            log_ratios_N=log_ratios_b,
            logps_N=logps_b,
            desirable_N=desirable_b,
            valid_N=pick(valid_rows(batch["sample_labels"])),
            beta=self.beta,
        )
