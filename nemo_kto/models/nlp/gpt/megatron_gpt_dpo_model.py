"""GPT policy model for DPO and its variants: loss and metrics of a batch of pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nemo_kto.data.batches.collate import DPOBatch
from nemo_kto.distributed.collectives import gather_over_data_parallel, sum_over_data_parallel
from nemo_kto.losses.loss import Loss
from nemo_kto.losses.metrics import Metrics
from nemo_kto.losses.preference import preference_metric_sums, preference_metrics, rank_partners
from nemo_kto.models.engine.engine import LogProbs, LogRatios, MicroBatchLoss
from nemo_kto.models.engine.sequences import SequenceBatch
from nemo_kto.models.flops import Passes
from nemo_kto.models.preference_model import PreferenceModel, add_work, upload_values


@dataclass(kw_only=True, eq=False)
class MegatronGPTDPOModel(PreferenceModel):
    """Model for direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290) and other pairwise losses."""

    sft_token_mean: bool = False  # average the SFT loss over the tokens of the global batch instead of over its pairs
    sft_completion_only: bool = True  # restrict the SFT loss to the chosen answer; if False, it also covers the prompt
    # WPO (Zhou et al. 2024, arXiv 2406.11827, equation 2): multiply the loss of a pair by the weights of its two answers,
    # exponentials of the log-weights of the engine's forward_backward
    use_weighting: bool = False

    @staticmethod
    def sequences(batch: Mapping[str, Any]) -> tuple[SequenceBatch, ...]:
        """Return the chosen answers, followed by the rejected ones, as one batch."""
        keys = "{}", "{}_labels", "{}_lengths"
        answers = [SequenceBatch.of(*(batch[key.format(name)] for key in keys)) for name in ("chosen", "rejected")]
        pairs, alpha_P = SequenceBatch.answers_to_one_prompt(*answers), batch.get("ld_alpha")
        return (pairs if alpha_P is None else pairs.desensitized(alpha_P),)

    def get_loss_and_metrics(self, batch: DPOBatch, forward_only: bool) -> tuple[float, Metrics]:
        """Compute loss and :func:`preference_metrics` of one step over the global batch, identical on every rank.

        ``batch`` has this rank's P pairs; if the loss needs a reference, with ``ref_policy_log_probs_chosen`` and
        ``ref_policy_log_probs_rejected``, [P] each. With ``forward_only`` the gradients are unchanged,
        and the metrics have rewards.
        """
        (answers,) = self.kept_sequences(batch)
        pairs, trained = len(answers) // 2, answers
        if not self.sft_completion_only:
            trained = answers.with_prompts(torch.arange(len(answers)) < pairs)
        sft_counts_P = torch.ones(pairs, dtype=torch.long)  # contributions to the denominator of the SFT term
        if self.sft_token_mean:
            sft_counts_P = (trained.response_counts_B + trained.prompt_counts_B)[:pairs]
        own_passes = Passes(forward=1, backward=not forward_only)
        others = [self.reference_work(answers)]
        if self.objective.loss.looks_ahead:
            others.append(self.engine.flops_sums(answers, passes=Passes(forward=1)))
        work = add_work(self.engine.work_sums(trained, passes=own_passes), *others)
        per_prompt_token = self.engine.flops.of_passes(own_passes).per_response_token
        work["flops"] = work["flops"] + per_prompt_token * trained.prompt_counts_B.sum()
        valid_P = answers.valid_B.view(2, -1).all(dim=0)
        batch_sums = sum_over_data_parallel({**work, "valid": valid_P.sum(), "sft_count": (sft_counts_P * valid_P).sum()})
        sft_scale = batch_sums.pop("valid") / batch_sums.pop("sft_count").clamp(min=1)
        reference_logps_B = None
        if self.uses_reference:
            reference_logps_B = torch.cat([batch["ref_policy_log_probs_chosen"], batch["ref_policy_log_probs_rejected"]])
        values = upload_values(
            valid_B=answers.valid_B,
            response_counts_B=answers.response_counts_B,
            prompt_counts_B=trained.prompt_counts_B,
            sft_counts_P=sft_counts_P,
            reference_logps_B=reference_logps_B,
            reward_delta_P=batch["chosen_rewards"] - batch["rejected_rewards"],
            weights_P=batch.get("weights", torch.ones(pairs)),
        )
        values |= self._rank_partners(answers, values)
        micro_batch_loss = partial(self._micro_batch_loss, values, sft_scale, with_log_ratios=forward_only)
        with self.phase("forward_backward"):
            parts = self.engine.forward_backward(
                trained, micro_batch_loss, forward_only=forward_only, log_weights=self.use_weighting
            )
            evaluated = None
            if forward_only:
                is_valid_B = values["valid_B"].view(2, -1).all(dim=0).repeat(2)
                is_chosen_B = torch.arange(2 * pairs, device=is_valid_B.device) < pairs
                evaluated = self.global_rewards(parts, is_chosen_B, is_valid_B, paired=True)
            return self.global_metrics(
                parts, loss=micro_batch_loss, batch_sums=batch_sums, derive=preference_metrics, rewards=evaluated
            )

    def _rank_partners(self, answers: SequenceBatch, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the rank partners of each pair for a loss that sorts, [P] each on the device; {} for other losses.

        A partner is the value of equal rank to which the loss compares a value of the pair. To find them, the policy
        evaluates the pairs forward only, and all valid pairs of the global batch are sorted.
        """
        if self.objective.loss.sorts is None:
            return {}
        with self.phase("sort"):
            logps_B = self.engine.logprobs(answers)
        compared = self._compared(self.objective.loss, logps_B, values.get("reference_logps_B"))
        compared_P2 = torch.stack(compared, dim=1)
        chosen_valid_P, rejected_valid_P = values["valid_B"].tensor_split(2)
        valid_P1 = (chosen_valid_P & rejected_valid_P).float()[:, None]
        gathered_N3, own = gather_over_data_parallel(torch.cat([compared_P2, valid_P1], dim=1))
        valid_N, partners_2N = gathered_N3[:, 2] > 0, torch.zeros_like(gathered_N3[:, :2]).T
        first_V, second_V = gathered_N3[valid_N, :2].T
        partners_2N[:, valid_N] = torch.stack(rank_partners(first_V, second_V))
        first_P, second_P = partners_2N[:, own]
        return {"first_partners_P": first_P, "second_partners_P": second_P}

    @staticmethod
    def _compared(loss: Loss, logps_b: Tensor, reference_logps_b: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the two values of each pair that the loss compares, from log-probs of chosen, then rejected answers.

        These are the log-ratios (log-probs without a reference) of both answers; for a loss that sorts margins, the margin
        of the policy and that of the reference.
        """
        if loss.sorts == "margins":
            assert reference_logps_b is not None, "a loss that compares margins has a reference"
            (chosen_p, rejected_p), (ref_chosen_p, ref_rejected_p) = (
                each_b.tensor_split(2) for each_b in (logps_b, reference_logps_b)
            )
            return chosen_p - rejected_p, ref_chosen_p - ref_rejected_p
        first_p, second_p = (logps_b if reference_logps_b is None else logps_b - reference_logps_b).tensor_split(2)
        return first_p, second_p

    def _sft_losses(
        self, chosen_p: Tensor, prompt_p: Tensor | None, values: Mapping[str, Tensor], pair_index_p: Tensor
    ) -> Tensor:
        """Return the SFT loss of each pair, [p], from the log-probs of its chosen answer and (or None) of its prompt."""
        counts_p = values["response_counts_B"][pair_index_p]
        average = self.objective.sft_average_log_probs and not self.sft_token_mean
        if prompt_p is None:
            return self.sft_losses(chosen_p, counts_p, average=average)
        prompt_counts_p = values["prompt_counts_B"][pair_index_p]
        sums_p = self.sft_losses(chosen_p, counts_p, average=False)
        sums_p = sums_p + self.sft_losses(prompt_p, prompt_counts_p, average=False)
        return sums_p / (counts_p + prompt_counts_p).clamp(min=1) if average else sums_p

    def _micro_batch_loss(
        self,
        values: Mapping[str, Tensor],
        sft_scale: Tensor,
        sequence_index_b: Tensor,
        logprobs: LogProbs,
        *,
        with_log_ratios: bool,
    ) -> MicroBatchLoss:
        """Return the loss of a micro-batch, from the log-probs of chosen, then rejected answers.

        ``values`` are those of all pairs.
        """
        objective, logps_b = self.objective, logprobs.response_b
        prompt_p = None if self.sft_completion_only else logprobs.prompt_b.tensor_split(2)[0]
        pair_index_p = sequence_index_b.tensor_split(2)[0]  # the index of a pair is that of its chosen answer
        reference_b = values["reference_logps_B"][sequence_index_b] if self.uses_reference else None
        # log-probs in place of log-ratios for a loss without a reference
        log_ratios_b = logps_b if reference_b is None else logps_b - reference_b
        chosen_p, rejected_p = log_ratios_b.tensor_split(2)
        chosen_logps_p, rejected_logps_p = logprobs.unweighted_b.tensor_split(2)
        inputs = {name: values[name][pair_index_p] for name in objective.loss.inputs & values.keys()}
        arguments: dict[str, Any] = {"beta": objective.beta, **inputs, **objective.options}
        losses_p = {
            name: loss.function(*self._compared(loss, logps_b, reference_b), **loss.taken(arguments))
            for name, (loss, _) in objective.loss.terms.items()
        }
        means_p: dict[str, Tensor] = {}
        if self.use_weighting:
            pair_weights_p = logprobs.log_weight_b.view(2, -1).sum(dim=0).exp()
            losses_p = {name: pair_weights_p * each_p for name, each_p in losses_p.items()}
            means_p["wpo_weight_mean"] = pair_weights_p
        first_p, *others_p = (weight * losses_p[name] for name, (_, weight) in objective.loss.terms.items())
        preference_p = sum(others_p, start=first_p)
        means_p |= dict(zip(objective.loss.part_metrics, losses_p.values(), strict=False))
        sft_p = self._sft_losses(chosen_logps_p, prompt_p, values, pair_index_p)
        weights_p = values["weights_P"][pair_index_p]
        chosen_valid_p, rejected_valid_p = values["valid_B"][sequence_index_b].tensor_split(2)
        return MicroBatchLoss.of(
            preference_metric_sums(
                weighted_preference_losses_P=weights_p * (objective.preference_loss_weight * preference_p),
                weighted_sft_losses_P=weights_p * (objective.sft_loss_weight * sft_p),
                sft_scale=sft_scale,
                sft_counts_P=values["sft_counts_P"][pair_index_p],
                preference_losses_P=preference_p,
                sft_losses_P=sft_p,
                chosen_logratios_P=chosen_p,
                rejected_logratios_P=rejected_p,
                chosen_logps_P=chosen_logps_p,
                rejected_logps_P=rejected_logps_p,
                valid_P=chosen_valid_p & rejected_valid_p,
                beta=objective.beta,
                means_P=means_p,
            ),
            LogRatios(sequence_index_b, log_ratios_b) if with_log_ratios else None,
        )
