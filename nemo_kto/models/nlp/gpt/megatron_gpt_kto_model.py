"""GPT policy model for KTO: loss and metrics of a batch of answers with unpaired (binary) feedback."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nemo_kto.data.batches.collate import KTOBatch
from nemo_kto.distributed.collectives import sum_over_data_parallel, to_host
from nemo_kto.losses.kto import kl_reference_point, kl_sums, kto_metric_sums, kto_metrics, reward_sums
from nemo_kto.losses.metrics import Metrics, RunningMean
from nemo_kto.models.engine.engine import MicroBatchLoss
from nemo_kto.models.engine.sequences import SequenceBatch
from nemo_kto.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel, upload_values


@dataclass(kw_only=True, eq=False)
class MegatronGPTKTOModel(MegatronGPTModel):
    """Model for Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv 2402.01306) of a GPT policy.

    One step over a global batch: a forward-only pass over the KL examples gives the reference point z0; then the samples run
    forward and backward with that z0. KL examples have no backward pass. For a loss with delta, a forward-only pass over the
    samples themselves comes first, and adds their rewards to the running mean.
    """

    desirable_loss_weight: float
    undesirable_loss_weight: float
    _rewards: RunningMean = field(init=False, default_factory=RunningMean)  # over all training examples so far, for delta

    def state_dict(self) -> dict[str, Any]:
        """Return the sum and number of the rewards for a loss with delta; see :meth:`MegatronGPTModel.state_dict`."""
        return {"rewards": asdict(self._rewards)} if self.objective.loss.needs_delta else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        if self.objective.loss.needs_delta:
            self._rewards = RunningMean(**state["rewards"])

    @staticmethod
    def sequences(batch: KTOBatch) -> tuple[SequenceBatch, ...]:
        """Return the sequences for which reference log-probs are needed: the samples, then the KL examples, if any."""
        samples = SequenceBatch.of(
            batch["samples"],
            batch["sample_labels"],
            batch["sample_lengths"],
            batch.get("position_ids"),
            batch.get("attention_mask"),
        )
        if "kl_samples" not in batch:
            return (samples,)
        kl_samples = SequenceBatch.of(
            batch["kl_samples"],
            batch["kl_sample_labels"],
            batch["kl_sample_lengths"],
            batch.get("kl_position_ids"),
            batch.get("kl_attention_mask"),
        )
        return samples, kl_samples

    def get_ref_policy_logprobs(self, batch: KTOBatch) -> Tensor:
        """Return the reference log-probs: [2B], samples then KL examples, or [B] without these; fp32, on the CPU."""
        return self.reference_logprobs(*self.sequences(batch))

    def get_loss_and_metrics(self, batch: KTOBatch, forward_only: bool) -> tuple[float, Metrics]:
        """Compute loss and :func:`kto_metrics` of one step over the global batch, identical on every rank.

        ``batch`` has this rank's examples, with ``ref_policy_log_probs_samples`` [B] and, for a loss with z0,
        ``ref_policy_log_probs_kl_samples`` [B]. With ``forward_only`` the gradients are unchanged.
        """
        samples, *kl_samples = self.sequences(batch)
        anchor, batch_sums = self._anchor(batch, samples, kl_samples, forward_only=forward_only)
        sft_scale = batch_sums["valid"] / batch_sums["valid_desirable"].clamp(min=1)
        values = upload_values(
            desirable_B=batch["preference"],
            valid_B=samples.valid_B,
            response_counts_B=samples.response_counts_B,
            weights_B=batch.get("weights", torch.ones(len(samples))),
            reference_logps_B=batch["ref_policy_log_probs_samples"] if self.uses_reference else None,
        )
        loss = partial(self._micro_batch_loss, values, anchor, sft_scale)
        with self.phase("forward_backward"):
            parts = self.engine.forward_backward(samples, loss, forward_only=forward_only)
            return self.global_metrics(parts, loss=loss, batch_sums=batch_sums, derive=kto_metrics)

    def _anchor(
        self, batch: KTOBatch, samples: SequenceBatch, kl_samples: list[SequenceBatch], *, forward_only: bool
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the anchor of the loss as keyword arguments (z0 or delta, or none), and sums over the global batch.

        z0 (section 4.1) is the mean log-ratio of the KL examples of the global batch, at least 0. delta is the mean of all
        rewards in this training run, including those of the batch; with ``forward_only`` it is not updated. Both need a
        forward-only pass of the policy. All values are 0-d tensors on the device, known to every pipeline stage; only the
        rewards are copied to the host.
        """
        loss, valid_B = self.objective.loss, samples.valid_B
        sums = {"valid": valid_B.sum(), "valid_desirable": (valid_B & batch["preference"].bool()).sum()}
        updates_delta = loss.needs_delta and not forward_only
        if updates_delta:
            with self.phase("delta"):
                log_ratios_B = self.engine.logprobs(samples) - batch["ref_policy_log_probs_samples"]
            sums |= reward_sums(log_ratios_B, valid_B, beta=self.objective.beta)
        work = self.engine.work_sums(samples, passes=self.passes(forward_only=forward_only, looks_ahead=updates_delta))
        if loss.needs_z0:
            (kl_batch,) = kl_samples
            with self.phase("kl"):
                log_ratios_B = self.engine.logprobs(kl_batch) - batch["ref_policy_log_probs_kl_samples"]
            kl_work = self.engine.work_sums(kl_batch, passes=self.passes(forward_only=True))
            # "tokens" counts only the tokens trained on; padded_tokens and flops include the KL examples
            work |= {name: work[name] + kl_work[name] for name in ("padded_tokens", "flops")}
            work["kl_tokens"] = kl_work["tokens"]
            sums |= kl_sums(log_ratios_B, kl_batch.valid_B)
            if "kl_same_prompt" in batch:
                sums["same_prompt_pairs"] = batch["kl_same_prompt"].sum()
        total = sum_over_data_parallel(sums | work)
        if loss.needs_z0:
            return {"z0": kl_reference_point(total["kl_sum"], total["kl_rows"]).float()}, total
        if updates_delta:
            rewards = to_host({name: total.pop(name) for name in ("reward_sum", "reward_rows")})
            self._rewards = self._rewards.plus(rewards["reward_sum"], int(rewards["reward_rows"]))
        if loss.needs_delta:
            delta = torch.full_like(total["valid"], self._rewards.mean)
            return {"delta": delta.float()}, total | {"delta_sum": delta, "delta_batches": torch.ones_like(delta)}
        return {}, total

    def _micro_batch_loss(
        self,
        values: Mapping[str, Tensor],
        anchor: Mapping[str, Tensor],
        sft_scale: Tensor,
        sequence_index_b: Tensor,
        logps_b: Tensor,
    ) -> MicroBatchLoss:
        """Return the loss of a micro-batch, from the log-probs [b] of its sequences; ``values`` are those of all samples."""
        objective = self.objective
        log_ratios_b = logps_b  # for a loss without a reference, the log-probs themselves
        if self.uses_reference:
            log_ratios_b = logps_b - values["reference_logps_B"][sequence_index_b]
        desirable_b = values["desirable_B"][sequence_index_b]
        kto_b = objective.loss.function(
            log_ratios_b,
            desirable_b,
            beta=objective.beta,
            desirable_weight=self.desirable_loss_weight,
            undesirable_weight=self.undesirable_loss_weight,
            **anchor,
            **objective.options,
        )
        sft_b = self.sft_losses(logps_b, values["response_counts_B"][sequence_index_b])
        weights_b = values["weights_B"][sequence_index_b]
        return MicroBatchLoss.of(
            kto_metric_sums(
                weighted_preference_losses_N=weights_b * (objective.preference_loss_weight * kto_b),
                weighted_sft_losses_N=weights_b * (objective.sft_loss_weight * sft_b),
                sft_scale=sft_scale,
                preference_losses_N=kto_b,
                sft_losses_N=sft_b,
                log_ratios_N=log_ratios_b,
                logps_N=logps_b,
                desirable_N=desirable_b,
                valid_N=values["valid_B"][sequence_index_b],
                beta=objective.beta,
            )
        )
