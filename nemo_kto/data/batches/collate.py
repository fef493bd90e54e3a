"""Collate functions of KTO and DPO, and the tensors of a batch.

A batch is one rank's share of a global batch, with the names of NeMo-Aligner: B examples of this rank, S tokens of the
longest one, on the CPU. The label of a position is its token id, -100 on prompt and padding. Position ids, counted from 0,
and attention masks, True at tokens, are for callers: the model needs neither, because it attends causally within each
sequence. The reference log-probs are attached by ``augment_dataloader``, on the device of the rank.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, NotRequired, TypedDict, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from nemo_kto.data.batches.dataset import DPOExample, KTOExample
from nemo_kto.errors import UserError
from nemo_kto.losses.sequence import IGNORED


class KTOBatch(TypedDict):
    """Batch of answers with binary feedback, and of KL examples if the loss needs them."""

    samples: Tensor  # [B, S] int64
    sample_labels: Tensor  # [B, S] int64
    sample_lengths: Tensor  # [B] int64, without padding
    position_ids: NotRequired[Tensor]  # [B, S] int64
    attention_mask: NotRequired[Tensor]  # [B, S] bool
    preference: Tensor  # [B] int64: 1 desirable, 0 undesirable
    weights: NotRequired[Tensor]  # [B] float32, loss weight of each sample; 1 if absent
    kl_samples: NotRequired[Tensor]
    kl_sample_labels: NotRequired[Tensor]
    kl_sample_lengths: NotRequired[Tensor]
    kl_position_ids: NotRequired[Tensor]
    kl_attention_mask: NotRequired[Tensor]
    kl_same_prompt: NotRequired[Tensor]  # [B] int64: 1 if the KL response belongs to the same prompt
    ref_policy_log_probs_samples: NotRequired[Tensor]  # [B] fp32
    ref_policy_log_probs_kl_samples: NotRequired[Tensor]  # [B] fp32


class DPOBatch(TypedDict):
    """Batch of pairs: ``chosen`` is the prompt with the chosen answer, ``rejected`` the prompt with the rejected one."""

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
    weights: NotRequired[Tensor]  # [B] float32, loss weight of each pair; 1 if absent
    ld_alpha: NotRequired[Tensor]  # [B] float32, weight of the tokens beyond the length of the shorter answer; 1 if absent
    ref_policy_log_probs_chosen: NotRequired[Tensor]  # [B] fp32
    ref_policy_log_probs_rejected: NotRequired[Tensor]  # [B] fp32


Example = TypeVar("Example", KTOExample, DPOExample)
Ids = Sequence[int] | np.ndarray
Texts = Sequence[tuple[Ids, Ids]]  # prompt and response of each sequence, as token ids


def kl_partners(prompts: Sequence[Hashable]) -> list[int]:
    """Return for each example the index of the example whose response it is paired with to form a KL example.

    Examples are grouped by prompt, with groups in order of first appearance, and the responses are shifted by the size of
    the largest group. This is a permutation. No example gets a response to its own prompt, unless one prompt has more than
    half of the examples; in that case as few examples as possible do, and none gets its own response. If all prompts are
    distinct, each example gets the response of the next one.
    """
    if len(prompts) == 1:
        raise ValueError(
            "a global batch must have at least 2 examples to form KL examples, got 1; "
            "raise global_batch_size or the rows of the split"
        )
    groups: dict[Hashable, list[int]] = {}
    for number, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(number)
    order = [number for group in groups.values() for number in group]
    # With a single group, a shift by the size of the batch would give every example its own response.
    shift = 1 if len(groups) == 1 else max(map(len, groups.values()), default=0)
    partners = [0] * len(order)
    for place, number in enumerate(order):
        partners[number] = order[(place + shift) % len(order)]
    return partners


def kl_partners_of(batch: Sequence[KTOExample]) -> list[int]:
    """Return :func:`kl_partners` of a global batch; prompts are equal if their tokens are equal."""
    return kl_partners(prompt_keys(batch))


def prompt_keys(batch: Sequence[KTOExample | DPOExample]) -> list[bytes]:
    """Return a key of each example's prompt; the keys are equal if the tokens of the prompts are equal."""
    return [np.asarray(example.prompt_ids, dtype=np.int64).tobytes() for example in batch]


def kto_custom_collate(
    batch: Sequence[KTOExample],
    eos_id: int,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    eod_mask_loss: bool = False,
    *,
    seq_length: int | None = None,
    pad_to_multiple: int = 1,
    with_kl: bool = True,
    kept: Sequence[int] | None = None,
) -> KTOBatch:
    """Collate the examples ``kept`` of one global batch into tensors; ``kept`` are indices, None: all.

    Args:
        batch: ALL examples of the global batch, because KL examples are formed over all of them, not only over those kept.
        eos_id: token for padding on the right.
        reset_position_ids, reset_attention_mask, eod_mask_loss: must be False. They are arguments of NeMo-Aligner, which
            treats a sequence as several documents that end with EOS; here it is one prompt with one answer.
        seq_length: maximum sequence length, to which the responses of KL examples are truncated. None: no limit.
        pad_to_multiple: the common length S is a multiple of this number.

    Raises:
        ValueError: ``with_kl`` is set and the batch has a single example, a sample is longer than ``seq_length``, an
            option of NeMo-Aligner is True, or the batch has other items than examples.
    """
    _refuse_documents(reset_position_ids, reset_attention_mask, eod_mask_loss)
    kept = range(len(batch)) if kept is None else kept
    examples = _checked(batch, KTOExample)
    parts: list[Texts] = [[(examples[k].prompt_ids, examples[k].response_ids) for k in kept]]
    kl_same_prompt: list[bool] = []
    if with_kl:
        # The prompt of an example with the response of another one, truncated at its end.
        prompts, kl_texts = prompt_keys(examples), list[tuple[Ids, Ids]]()
        partners = kl_partners(prompts)
        for k in kept:
            prompt = examples[k].prompt_ids
            room = None if seq_length is None else seq_length - len(prompt)
            kl_texts.append((prompt, examples[partners[k]].response_ids[:room]))
            kl_same_prompt.append(prompts[k] == prompts[partners[k]])
        parts.append(kl_texts)
    padded = _pad(*parts, eos_id=eos_id, seq_length=seq_length, multiple=pad_to_multiple)
    tensors = padded[0].named("sample", tokens="samples", shared="")
    tensors["preference"] = torch.tensor([examples[k].desirable for k in kept], dtype=torch.int64)
    tensors["weights"] = torch.tensor([examples[k].weight for k in kept], dtype=torch.float32)
    if with_kl:
        tensors |= padded[1].named("kl_sample", tokens="kl_samples", shared="kl_")
        tensors["kl_same_prompt"] = torch.tensor(kl_same_prompt, dtype=torch.int64)
    return cast(KTOBatch, tensors)


def dpo_custom_collate(
    batch: Sequence[DPOExample],
    eos_id: int,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    eod_mask_loss: bool = False,
    *,
    seq_length: int | None = None,
    pad_to_multiple: int = 1,
    ld_alpha: float | None = None,
    kept: Sequence[int] | None = None,
) -> DPOBatch:
    """Collate pairs into tensors, with one length S for both answers; other options are those of :func:`kto_custom_collate`.

    ``ld_alpha`` is the weight of the response tokens beyond the length of the shorter answer; None for 1.

    Raises ValueError if a sequence is longer than ``seq_length``, an option of NeMo-Aligner is True, or the batch has other
    items than pairs.
    """
    _refuse_documents(reset_position_ids, reset_attention_mask, eod_mask_loss)
    pairs = _checked(batch if kept is None else [batch[number] for number in kept], DPOExample)
    texts = [(pair.prompt_ids, pair.chosen_ids) for pair in pairs], [(pair.prompt_ids, pair.rejected_ids) for pair in pairs]
    chosen, rejected = _pad(*texts, eos_id=eos_id, seq_length=seq_length, multiple=pad_to_multiple)
    tensors = chosen.named("chosen", tokens="chosen", shared="chosen_")
    tensors["chosen_rewards"] = torch.tensor([pair.chosen_reward for pair in pairs], dtype=torch.float32)
    tensors |= rejected.named("rejected", tokens="rejected", shared="rejected_")
    tensors["rejected_rewards"] = torch.tensor([pair.rejected_reward for pair in pairs], dtype=torch.float32)
    tensors["weights"] = torch.tensor([pair.weight for pair in pairs], dtype=torch.float32)
    if ld_alpha is not None:
        tensors["ld_alpha"] = torch.full((len(pairs),), ld_alpha)
    return cast(DPOBatch, tensors)


def _refuse_documents(reset_position_ids: bool, reset_attention_mask: bool, eod_mask_loss: bool) -> None:
    if reset_position_ids or reset_attention_mask or eod_mask_loss:
        raise UserError(
            "reset_position_ids, reset_attention_mask and eod_mask_loss must be False, got True; an example is one prompt "
            "with one answer, which attends causally to all its tokens and is trained on to its end"
        )


def _checked(batch: Sequence[Any], kind: type[Example]) -> list[Example]:
    """Return the examples of a batch; UserError if one is of another type, such as a mapping of NeMo-Aligner."""
    if wrong := [item for item in batch if not isinstance(item, kind)]:
        raise UserError(
            f"a batch must contain {kind.__name__} (nemo_kto.data.batches.dataset), got {type(wrong[0]).__name__}"
        )
    return [*batch]


class _Padded(NamedTuple):
    """Sequences padded to a common length: tensors [B, S], except lengths [B]."""

    tokens: Tensor
    labels: Tensor
    lengths: Tensor
    position_ids: Tensor
    attention_mask: Tensor

    def named(self, name: str, *, tokens: str, shared: str) -> dict[str, Tensor]:
        """Return the tensors with their names in a batch; ``shared`` is the prefix of position ids and attention mask."""
        return {
            tokens: self.tokens,
            f"{name}_labels": self.labels,
            f"{name}_lengths": self.lengths,
            f"{shared}position_ids": self.position_ids,
            f"{shared}attention_mask": self.attention_mask,
        }


def _pad(*parts: Texts, eos_id: int, seq_length: int | None, multiple: int) -> list[_Padded]:
    """Pad all parts to the length of the longest sequence, rounded up to a multiple."""
    width = max((len(prompt) + len(answer) for part in parts for prompt, answer in part), default=1)
    if seq_length is not None and width > seq_length:
        raise ValueError(
            f"sequences must have at most seq_length={seq_length} tokens, got {width}; "
            "build the dataset and the collate function with the same seq_length"
        )
    width = -(-width // multiple) * multiple
    return [_pad_part(part, width, eos_id) for part in parts]


def _pad_part(texts: Texts, width: int, eos_id: int) -> _Padded:
    tokens = np.full((len(texts), width), eos_id, dtype=np.int64)
    labels = np.full((len(texts), width), IGNORED, dtype=np.int64)
    for k, (prompt, response) in enumerate(texts):
        start, end = len(prompt), len(prompt) + len(response)
        tokens[k, :start] = prompt
        tokens[k, start:end] = response
        labels[k, start:end] = response
    lengths = np.array([len(prompt) + len(response) for prompt, response in texts], dtype=np.int64)
    positions = np.broadcast_to(np.arange(width), tokens.shape).copy()
    return _Padded(*map(torch.from_numpy, (tokens, labels, lengths, positions, positions < lengths[:, None])))
