"""GPT policy model for KTO: loss and metrics of a batch of answers with unpaired (binary) feedback."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nemo_kto.data.batches.collate import KTOBatch
from nemo_kto.device import device
from nemo_kto.distributed.collectives import sum_over_data_parallel, to_host
from nemo_kto.losses.kto import kl_reference_point, kl_sums, kto_metric_sums, kto_metrics, reward_sums
from nemo_kto.losses.metrics import Metrics, RunningMean
from nemo_kto.models.engine.engine import MicroBatchLoss
from nemo_kto.models.engine.sequences import SequenceBatch
from nemo_kto.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel


@dataclass(frozen=True, kw_only=True)
class UnpairedTensors:
    """A batch of B answers with binary feedback, unpacked; optional parts that the batch lacks are None.

    Attributes:
        samples: prompts with their answers.
        desirable_B: 1 or True for a desirable answer.
        kl_samples: KL examples: each prompt with the response to another prompt.
        same_prompt_B: 1 if the response of a KL example belongs to an identical prompt.
        weights_B: loss weight of each sample.
        reference_logps_B: reference log-probs of the samples.
        kl_reference_logps_B: reference log-probs of the KL examples.
    """

    samples: SequenceBatch
    desirable_B: Tensor
    kl_samples: SequenceBatch | None
    same_prompt_B: Tensor | None
    weights_B: Tensor
    reference_logps_B: Tensor | None
    kl_reference_logps_B: Tensor | None

    @classmethod
    def unpack(cls, batch: KTOBatch) -> UnpairedTensors:
        """Unpack a batch of the data loader, with or without reference log-probs."""
        samples = SequenceBatch.of(
            batch["samples"],
            batch["sample_labels"],
            batch["sample_lengths"],
            batch.get("position_ids"),
            batch.get("attention_mask"),
        )
        kl_samples = None
        if "kl_samples" in batch:
            kl_samples = SequenceBatch.of(
                batch["kl_samples"],
                batch["kl_sample_labels"],
                batch["kl_sample_lengths"],
                batch.get("kl_position_ids"),
                batch.get("kl_attention_mask"),
            )
        return cls(
            samples=samples,
            desirable_B=batch["preference"],
            kl_samples=kl_samples,
            same_prompt_B=batch.get("kl_same_prompt"),
            weights_B=batch.get("weights", torch.ones(len(samples))),
            reference_logps_B=batch.get("ref_policy_log_probs_samples"),
            kl_reference_logps_B=batch.get("ref_policy_log_probs_kl_samples"),
        )


@dataclass(frozen=True, kw_only=True)
class SampleValues:
    """Inputs of the loss for each sample besides its log-prob: [B], on the device."""

    desirable_B: Tensor
    valid_B: Tensor
    response_counts_B: Tensor
    weights_B: Tensor
    reference_logps_B: Tensor | None

    @classmethod
    def of(cls, unpaired: UnpairedTensors) -> SampleValues:
        """Copy the values to the device, once per batch, so that no micro-batch waits for a transfer."""
        values = {
            "desirable_B": unpaired.desirable_B,
            "valid_B": unpaired.samples.valid_B,
            "response_counts_B": unpaired.samples.response_counts_B,
            "weights_B": unpaired.weights_B,
            "reference_logps_B": unpaired.reference_logps_B,
        }
        return cls(**dict(zip(values, device.upload([*values.values()]), strict=True)))


@dataclass(kw_only=True, eq=False)
class MegatronGPTKTOModel(MegatronGPTModel):
    """Model for Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv 2402.01306) of a GPT policy.

    One step over a global batch: a forward-only pass over the KL examples gives the reference point z0; then the samples
    run forward and backward with that z0. KL examples have no backward pass. For a loss with delta, a forward-only pass
    over the samples themselves comes first, and adds their rewards to the running mean.

    Attributes:
        desirable_loss_weight, undesirable_loss_weight: loss weights of desirable and of undesirable answers.
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
        unpaired = UnpairedTensors.unpack(batch)
        return (unpaired.samples,) if unpaired.kl_samples is None else (unpaired.samples, unpaired.kl_samples)

    def get_ref_policy_logprobs(self, batch: KTOBatch) -> Tensor:
        """Return the reference log-prob of each response: [2B], fp32, on the CPU; first samples, then KL examples.

        The shape is [B] if the batch has no KL examples.
        """
        return self.reference_logprobs(*self.sequences(batch))

    def get_loss_and_metrics(self, batch: KTOBatch, forward_only: bool) -> tuple[float, Metrics]:
        """Compute loss and metrics of one step over the global batch, identical on every rank.

        Args:
            batch: this rank's examples, including ``ref_policy_log_probs_samples`` [B] and, for a loss with z0,
                ``ref_policy_log_probs_kl_samples`` [B].
            forward_only: skip the backward pass and leave the gradients unchanged.

        Returns:
            The loss, and the metrics of :func:`nemo_kto.losses.kto.kto_metrics`.
        """
        unpaired = UnpairedTensors.unpack(batch)
        anchor, batch_sums = self._anchor(unpaired, forward_only=forward_only)
        sft_scale = batch_sums["valid"] / batch_sums["valid_desirable"].clamp(min=1)
        loss = partial(self._micro_batch_loss, SampleValues.of(unpaired), anchor, sft_scale)
        with self.phase("forward_backward"):
            parts = self.engine.forward_backward(unpaired.samples, loss, forward_only=forward_only)
            nothing = torch.zeros(0, device=device.current_device())
            zeros = loss(nothing.long(), nothing).sums
            return self.global_metrics(parts, zeros=zeros, batch_sums=batch_sums, derive=kto_metrics)

    def _anchor(self, unpaired: UnpairedTensors, *, forward_only: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the anchor of the loss as keyword arguments (z0 or delta, or none), and sums over the global batch.

        All are 0-d tensors on the device, known to every pipeline stage; only the rewards are copied to the host, for delta.

        z0 is that of the global batch. delta is the mean of all rewards in this training run, including those of the batch;
        with ``forward_only`` it is not updated. Passes of the policy are forward only.
        """
        loss, valid_B = self.objective.loss, unpaired.samples.valid_B
        sums = {"valid": valid_B.sum(), "valid_desirable": (valid_B & unpaired.desirable_B.bool()).sum()}
        looks_ahead = loss.needs_delta and not forward_only
        if looks_ahead:
            sums |= self._reward_sums(unpaired)
        passes = self.passes(forward_only=forward_only, looks_ahead=looks_ahead)
        work = self.engine.work_sums(unpaired.samples, passes=passes)
        if loss.needs_z0:
            kl_work, of_kl_examples = self._kl_sums(unpaired)
            # "tokens" counts only the tokens trained on; padded_tokens and flops include the KL examples
            work |= {name: work[name] + kl_work[name] for name in ("padded_tokens", "flops")}
            work["kl_tokens"] = kl_work["tokens"]
            sums |= of_kl_examples
        total = sum_over_data_parallel(sums | work)
        if looks_ahead:
            seen = to_host({name: total.pop(name) for name in ("reward_sum", "reward_rows")})
            self._rewards = self._rewards.plus(seen["reward_sum"], int(seen["reward_rows"]))
        if loss.needs_delta:
            delta = torch.full_like(total["valid"], self._rewards.mean)
            return {"delta": delta.float()}, total | {"delta_sum": delta, "delta_batches": torch.ones_like(delta)}
        return {"z0": kl_reference_point(total["kl_sum"], total["kl_rows"]).float()} if loss.needs_z0 else {}, total

    def _reward_sums(self, unpaired: UnpairedTensors) -> dict[str, Tensor]:
        """Return the sums of the rewards of this rank's samples under the current weights."""
        assert unpaired.reference_logps_B is not None, "augment_dataloader attaches the reference log-probs"
        with self.phase("delta"):
            log_ratios_B = self.engine.logprobs(unpaired.samples) - unpaired.reference_logps_B
        return reward_sums(log_ratios_B, unpaired.samples.valid_B, beta=self.objective.beta)

    def _kl_sums(self, unpaired: UnpairedTensors) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the work of this rank's KL examples, and the sums from which z0 is computed."""
        kl_samples, reference_logps_B = unpaired.kl_samples, unpaired.kl_reference_logps_B
        assert kl_samples is not None, "the loader makes KL examples for a loss with z0"
        assert reference_logps_B is not None, "augment_dataloader attaches the reference log-probs"
        with self.phase("kl"):
            log_ratios_B = self.engine.logprobs(kl_samples) - reference_logps_B
        sums = kl_sums(log_ratios_B, kl_samples.valid_B)
        if unpaired.same_prompt_B is not None:
            sums["same_prompt_pairs"] = unpaired.same_prompt_B.sum()
        return self.engine.work_sums(kl_samples, passes=self.passes(forward_only=True)), sums

    def _micro_batch_loss(
        self,
        samples: SampleValues,
        anchor: Mapping[str, Tensor],
        sft_scale: Tensor,
        sequence_index_b: Tensor,
        logps_b: Tensor,
    ) -> MicroBatchLoss:
        """Return the loss of a micro-batch, from the log-probs [b] of its sequences."""
        objective = self.objective
        log_ratios_b = logps_b  # for a loss without a reference, the log-probs themselves
        if self.uses_reference:
            assert samples.reference_logps_B is not None, "augment_dataloader attaches the reference log-probs"
            log_ratios_b = logps_b - samples.reference_logps_B[sequence_index_b]
        desirable_b = samples.desirable_B[sequence_index_b]
        kto_b = objective.loss.function(
            log_ratios_b,
            desirable_b,
            beta=objective.beta,
            desirable_weight=self.desirable_loss_weight,
            undesirable_weight=self.undesirable_loss_weight,
            **anchor,
            **objective.options,
        )
        sft_b = self.sft_losses(logps_b, samples.response_counts_B[sequence_index_b])
        weights_b = samples.weights_B[sequence_index_b]
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
                valid_N=samples.valid_B[sequence_index_b],
                beta=objective.beta,
            )
        )
