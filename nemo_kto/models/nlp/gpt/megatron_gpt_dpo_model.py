"""DPO and its kin: a batch of pairs becomes rows, and pairs of rows become a loss."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from nemo_kto.losses.loss import find_loss
from nemo_kto.losses.metrics import Metrics
from nemo_kto.losses.preference import LOSSES, preference_metric_sums, preference_metrics
from nemo_kto.losses.sequence import valid_rows
from nemo_kto.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_kto.models.rows import Batch, rows_of
from nemo_kto.parallel.reduce import sum_over_data_parallel

_SIDES = ("chosen", "rejected")


class MegatronGPTDPOModel(MegatronGPTModel):
    """Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290), and other losses of pairs.

    Both answers of a pair go through the same micro-batch.
    """

    def __init__(
        self,
        *,
        preference_loss: str,
        ref_policy_kl_penalty: float,
        loss_options: Mapping[str, float],
        **base: Any,
    ) -> None:
        """
        Args:
            preference_loss: a key of :data:`nemo_kto.losses.preference.LOSSES`.
            ref_policy_kl_penalty: beta.
            loss_options: options of the loss; those left out have the default of its function.
            **base: keyword arguments of :class:`MegatronGPTModel`; no reference where the loss has none.
        """
        loss = find_loss(preference_loss, LOSSES)
        base["average_log_probs"] |= loss.average_log_probs
        super().__init__(**base)
        self.beta = ref_policy_kl_penalty
        self._losses = partial(loss.function, beta=self.beta, **loss_options)
        self._uses_rewards = loss.needs_rewards

    def get_ref_policy_logprobs(self, batch: Batch) -> torch.Tensor:
        """Reference log-prob of each answer: [2B], fp32, CPU; the chosen ones first, then the rejected ones."""
        return self.reference_logprobs(rows_of(batch, *_SIDES))

    def get_loss_and_metrics(self, batch: Batch, forward_only: bool) -> tuple[float, Metrics]:
        """One step's loss over the global batch, the same on every rank.

        Args:
            batch: this rank's pairs, with ``ref_policy_log_probs_chosen`` [B] and ``ref_policy_log_probs_rejected`` [B]
                attached where the loss has a reference.
            forward_only: leave the gradients alone.

        Returns:
            The loss and the metrics of :func:`nemo_kto.losses.preference.preference_metrics`.
        """
        pairs = rows_of(batch, *_SIDES)
        sums_of = partial(self._pair_sums, batch)
        with self.phase("forward_backward"):
            parts = self.forward_backward(pairs, sums_of, forward_only=forward_only)
        zeros = sums_of(torch.zeros(0), torch.zeros(0, dtype=torch.int64))
        batch_sums = {name: float(value) for name, value in sum_over_data_parallel(self.token_sums(pairs)).items()}
        return self.global_metrics(parts, zeros=zeros, batch_sums=batch_sums, derive=preference_metrics)

    def _pair_sums(self, batch: Batch, logps_b: torch.Tensor, rows_b: torch.Tensor) -> dict[str, torch.Tensor]:
        """Sums of one micro-batch: log-probs [b] of its chosen and then its rejected answers, and the rows' numbers [b]."""
        chosen_logps_p, rejected_logps_p = logps_b.tensor_split(2)
        pairs_p = rows_b.tensor_split(2)[0]  # a pair has the number of its chosen row

        def pick(name: str) -> torch.Tensor:
            return batch[name][pairs_p].to(logps_b.device)

        chosen_p, rejected_p = chosen_logps_p, rejected_logps_p
        if self.uses_reference:
            chosen_p = chosen_logps_p - pick("ref_policy_log_probs_chosen")
            rejected_p = rejected_logps_p - pick("ref_policy_log_probs_rejected")
        rewards = {"reward_delta_P": pick("chosen_rewards") - pick("rejected_rewards")} if self._uses_rewards else {}
        preference_p = self._losses(chosen_p, rejected_p, **rewards)
        sft_p = self.sft_losses(chosen_logps_p, batch["chosen_labels"][pairs_p])
        return preference_metric_sums(
            self.preference_loss_weight * preference_p + self.sft_loss_weight * sft_p,
            preference_losses_P=preference_p,
            sft_losses_P=sft_p,
            chosen_logratios_P=chosen_p,
            rejected_logratios_P=rejected_p,
            chosen_logps_P=chosen_logps_p,
            rejected_logps_P=rejected_logps_p,
            valid_P=valid_rows(pick("chosen_labels")) & valid_rows(pick("rejected_labels")),
            beta=self.beta,
        )
