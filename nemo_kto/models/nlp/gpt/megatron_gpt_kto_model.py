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
from nemo_kto.losses.metrics import Metrics, RunningMean, without_rounding_errors
from nemo_kto.models.engine.engine import LogProbs, LogRatios, MicroBatchLoss
from nemo_kto.models.engine.sequences import SequenceBatch
from nemo_kto.models.flops import Passes
from nemo_kto.models.preference_model import PreferenceModel, add_work, upload_values


@dataclass(kw_only=True, eq=False)
class MegatronGPTKTOModel(PreferenceModel):
    """Model for Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv 2402.01306) of a GPT policy.

    One step over a global batch: a forward-only pass over the KL examples gives the reference point z0; then the samples run
    forward and backward with that z0. KL examples have no backward pass. For a loss with delta, a forward-only pass over the
    samples themselves comes first, and adds their rewards to the running mean.
    """

    desirable_loss_weight: float
    undesirable_loss_weight: float
    _rewards: RunningMean = field(init=False, default_factory=RunningMean)  # over all training examples so far, for delta

    def state_dict(self) -> dict[str, Any]:
        """Return the sum and number of the rewards for a loss with delta; see :meth:`PreferenceModel.state_dict`."""
        return {"rewards": asdict(self._rewards)} if self.objective.loss.needs_delta else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        if self.objective.loss.needs_delta:
            self._rewards = RunningMean(**state["rewards"])

    @staticmethod
    def sequences(batch: Mapping[str, Any]) -> tuple[SequenceBatch, ...]:
        """Return the samples, then the KL examples, if any."""
        samples = "samples", "sample_labels", "sample_lengths"
        kl_samples = "kl_samples", "kl_sample_labels", "kl_sample_lengths"
        return tuple(SequenceBatch.of(*(batch[key] for key in keys)) for keys in (samples, kl_samples) if keys[0] in batch)

    def get_loss_and_metrics(self, batch: KTOBatch, forward_only: bool) -> tuple[float, Metrics]:
        """Compute loss and :func:`kto_metrics` of one step over the global batch, identical on every rank.

        ``batch`` has this rank's examples, with ``ref_policy_log_probs_samples`` [B] and, for a loss with z0,
        ``ref_policy_log_probs_kl_samples`` [B]. With ``forward_only`` neither gradients nor delta are changed, and the
        metrics include those of :class:`~nemo_kto.losses.metrics.Rewards`.

        All sums over the global batch are 0-d tensors on the device, known to every pipeline stage; only the rewards are
        copied to the host.
        """
        samples, *kl_samples = self.kept_sequences(batch)
        loss, valid_B = self.objective.loss, samples.valid_B
        updates_delta = loss.needs_delta and not forward_only
        values = upload_values(
            desirable_B=batch["preference"],
            valid_B=valid_B,
            response_counts_B=samples.response_counts_B,
            weights_B=batch.get("weights", torch.ones(len(samples))),
            reference_logps_B=batch["ref_policy_log_probs_samples"] if self.uses_reference else None,
            kl_valid_B=kl_samples[0].valid_B if loss.needs_z0 else None,
            kl_reference_logps_B=batch["ref_policy_log_probs_kl_samples"] if loss.needs_z0 else None,
        )
        sums = {"valid": valid_B.sum(), "valid_desirable": (valid_B & batch["preference"].bool()).sum()}
        others = [self.reference_work(samples, *kl_samples)]
        if updates_delta:
            with self.phase("delta"):
                log_ratios_B = self.engine.logprobs(samples) - values["reference_logps_B"]
            sums |= reward_sums(log_ratios_B, values["valid_B"], beta=self.objective.beta)
            others.append(self.engine.flops_sums(samples, passes=Passes(forward=1)))
        work = self.engine.work_sums(samples, passes=Passes(forward=1, backward=not forward_only))
        if loss.needs_z0:
            (kl_batch,) = kl_samples
            with self.phase("kl"):
                log_ratios_B = self.engine.logprobs(kl_batch) - values["kl_reference_logps_B"]
            kl_work = self.engine.work_sums(kl_batch, passes=Passes(forward=1))
            # "tokens" counts only the tokens trained on; the other sums include the KL examples
            sums["kl_tokens"] = kl_work.pop("tokens")
            others.append(kl_work)
            sums |= kl_sums(log_ratios_B, values["kl_valid_B"])
            if "kl_same_prompt" in batch:
                sums["same_prompt_pairs"] = batch["kl_same_prompt"].sum()
        batch_sums = sum_over_data_parallel(sums | add_work(work, *others))
        anchor: dict[str, Tensor] = {}  # what log-ratios are compared with
        if loss.needs_z0:  # section 4.1: the mean log-ratio of the KL examples of the global batch, at least 0
            anchor["z0"] = kl_reference_point(batch_sums["kl_sum"], batch_sums["kl_rows"]).float()
        elif loss.needs_delta:  # the mean of all rewards in this training run, including those of the batch
            if updates_delta:
                rewards = to_host({name: batch_sums.pop(name) for name in ("reward_sum", "reward_rows")})
                self._rewards = self._rewards.plus(rewards["reward_sum"], int(rewards["reward_rows"]))
            delta = torch.full_like(batch_sums["valid"], self._rewards.mean)
            anchor["delta"] = delta.float()
            batch_sums |= {"delta_sum": delta, "delta_batches": torch.ones_like(delta)}
        sft_scale = batch_sums["valid"] / batch_sums["valid_desirable"].clamp(min=1)
        micro_batch_loss = partial(self._micro_batch_loss, values, anchor, sft_scale, with_log_ratios=forward_only)
        with self.phase("forward_backward"):
            parts = self.engine.forward_backward(samples, micro_batch_loss, forward_only=forward_only)
            evaluated = None
            if forward_only:
                is_desirable_B, is_valid_B = values["desirable_B"], values["valid_B"]
                evaluated = self.global_rewards(parts, is_desirable_B, is_valid_B, paired=False)
            return self.global_metrics(
                parts, loss=micro_batch_loss, batch_sums=batch_sums, derive=kto_metrics, rewards=evaluated
            )

    def _micro_batch_loss(
        self,
        values: Mapping[str, Tensor],
        anchor: Mapping[str, Tensor],
        sft_scale: Tensor,
        sequence_index_b: Tensor,
        logprobs: LogProbs,
        *,
        with_log_ratios: bool,
    ) -> MicroBatchLoss:
        """Return the loss of a micro-batch, from the log-probs of its sequences; ``values`` are those of all samples."""
        objective, logps_b = self.objective, logprobs.response_b
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
        sft_b = self.sft_losses(
            logps_b, values["response_counts_B"][sequence_index_b], average=objective.sft_average_log_probs
        )
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
            ),
            # only for rewards of single examples: a step does without these kernels
            LogRatios(sequence_index_b, without_rounding_errors(log_ratios_b, logps_b)) if with_log_ratios else None,
        )
