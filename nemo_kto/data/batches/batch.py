"""What a collate function gives and a model takes: one rank's share of a global batch, under NeMo-Aligner's names.

B examples of this rank, S tokens of the longest, all tensors on the CPU. The label of a position is the token there, -100 on
prompt and padding. An attention mask is bool [B, S], True at tokens, or bool [B, 1, S, S], True where a query must NOT see a
key. The reference log-probs are attached by ``augment_dataloader``.
"""

from __future__ import annotations

from typing import NotRequired, TypedDict

from torch import Tensor


class KTOBatch(TypedDict):
    """Answers with binary feedback, and KL examples where the loss needs them."""

    samples: Tensor  # [B, S] int64
    sample_labels: Tensor  # [B, S] int64
    sample_lengths: Tensor  # [B] int64, without padding
    position_ids: NotRequired[Tensor]  # [B, S] int64; counted from 0 if absent
    attention_mask: NotRequired[Tensor]
    preference: Tensor  # [B] int64: 1 desirable, 0 undesirable
    weights: NotRequired[Tensor]  # [B] float32, of the loss of each sample; 1 if absent
    kl_samples: NotRequired[Tensor]
    kl_sample_labels: NotRequired[Tensor]
    kl_sample_lengths: NotRequired[Tensor]
    kl_position_ids: NotRequired[Tensor]
    kl_attention_mask: NotRequired[Tensor]
    kl_same_prompt: NotRequired[Tensor]  # [B] int64: 1 where the KL response was given to the example's own prompt
    ref_policy_log_probs_samples: NotRequired[Tensor]  # [B] fp32
    ref_policy_log_probs_kl_samples: NotRequired[Tensor]  # [B] fp32


class DPOBatch(TypedDict):
    """Pairs: ``chosen`` is the prompt with the chosen answer, ``rejected`` with the other."""

    chosen: Tensor  # [B, S] int64
    chosen_labels: Tensor  # [B, S] int64
    chosen_lengths: Tensor  # [B] int64, without padding
    chosen_position_ids: NotRequired[Tensor]
    chosen_attention_mask: NotRequired[Tensor]
    chosen_rewards: Tensor  # [B] float32
    rejected: Tensor
    rejected_labels: Tensor
    rejected_lengths: Tensor
    rejected_position_ids: NotRequired[Tensor]
    rejected_attention_mask: NotRequired[Tensor]
    rejected_rewards: Tensor
    weights: NotRequired[Tensor]  # [B] float32, of the loss of each pair; 1 if absent
    ref_policy_log_probs_chosen: NotRequired[Tensor]  # [B] fp32
    ref_policy_log_probs_rejected: NotRequired[Tensor]  # [B] fp32
