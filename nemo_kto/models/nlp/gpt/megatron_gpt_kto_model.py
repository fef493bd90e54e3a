"""KTO: a batch of answers with binary feedback in, a loss and metrics out."""

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
    """A batch of B answers with binary feedback, unpacked; None for what the batch does not have.

    Attributes:
        samples: the answers.
        desirable_B: 1 or True for a desirable answer.
        kl_samples: the prompts with the response to another prompt.
        same_prompt_B: 1 where that prompt is the same.
        weights_B: of the loss of each sample.
        reference_logps_B: of the samples.
        kl_reference_logps_B: of the KL examples.
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
        """From the batch of a loader, with or without the reference log-probs attached."""
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
    """What the loss knows of each sample besides its log-prob: [B], on the device."""

    desirable_B: Tensor
    valid_B: Tensor
    response_counts_B: Tensor
    weights_B: Tensor
    reference_logps_B: Tensor | None

    @classmethod
    def of(cls, unpaired: UnpairedTensors) -> SampleValues:
        """Moved once for a batch, so that no micro-batch waits for them."""
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
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv 2402.01306) of a GPT policy.

    The step, over one global batch: the reference point z0 comes from the KL examples, forward only; then the samples go
    forward and backward with that z0. KL examples never see a backward pass. For a loss with delta the samples themselves
    go forward first, and their rewards join the running mean.

    Attributes:
        desirable_loss_weight, undesirable_loss_weight: weights of the two kinds of answers.
    """

    desirable_loss_weight: float
    undesirable_loss_weight: float
    _rewards: RunningMean = field(init=False, default_factory=RunningMean)  # of the training examples, for delta

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`MegatronGPTModel.state_dict`: the sum and number of the rewards, for a loss with delta."""
        return {"rewards": asdict(self._rewards)} if self.objective.loss.needs_delta else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from :meth:`state_dict`."""
        if self.objective.loss.needs_delta:
            self._rewards = RunningMean(**state["rewards"])

    @staticmethod
    def sequences(batch: KTOBatch) -> tuple[SequenceBatch, ...]:
        """What the reference evaluates: the samples, then the KL examples if there are any."""
        unpaired = UnpairedTensors.unpack(batch)
        return (unpaired.samples,) if unpaired.kl_samples is None else (unpaired.samples, unpaired.kl_samples)

    def get_ref_policy_logprobs(self, batch: KTOBatch) -> Tensor:
        """Reference log-prob of each response: [2B], fp32, CPU; the samples first, then the KL examples.

        [B] where the batch has no KL examples.
        """
        return self.reference_logprobs(*self.sequences(batch))

    def get_loss_and_metrics(self, batch: KTOBatch, forward_only: bool) -> tuple[float, Metrics]:
        """One KTO step's loss over the global batch, the same on every rank.

        Args:
            batch: this rank's examples, with ``ref_policy_log_probs_samples`` [B] and, for a loss with z0,
                ``ref_policy_log_probs_kl_samples`` [B] attached.
            forward_only: leave the gradients as they are.

        Returns:
            The loss and the metrics of :func:`nemo_kto.losses.kto.kto_metrics`.
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
        """What the loss measures rewards against, as it takes it, and sums over the batch that every pipeline stage knows.

        All are 0-d tensors on the device; the host needs the rewards only, for delta.

        z0 is that of the global batch. delta is the mean of all rewards of the training, those of the batch included; it
        stays as it is where nothing is trained. The policy is evaluated forward only.
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
            # tokens are those that are trained on; what goes through the model includes the KL examples
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
        """Of this rank's samples under the present weights."""
        assert unpaired.reference_logps_B is not None, "augment_dataloader attaches the reference log-probs"
        with self.phase("delta"):
            log_ratios_B = self.engine.logprobs(unpaired.samples) - unpaired.reference_logps_B
        return reward_sums(log_ratios_B, unpaired.samples.valid_B, beta=self.objective.beta)

    def _kl_sums(self, unpaired: UnpairedTensors) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The work that this rank's KL examples are, and what z0 is made of."""
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
        """Loss of a micro-batch: the log-probs [b] of its sequences."""
        objective = self.objective
        log_ratios_b = logps_b  # of a loss without a reference: the log-probs themselves
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
