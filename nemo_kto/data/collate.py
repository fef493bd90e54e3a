"""From rows to tensors: of one rank's share of a global batch, with KL pairs formed over all of it, and of pairs."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import partial

import numpy as np
import torch

from nemo_kto.data.records import DPOExample, KTOExample

IGNORED = -100


def kl_partners(prompts: Sequence[Hashable]) -> list[int]:
    """For each row, the row whose response it gets as a KL row.

    Rows are grouped by prompt, groups in order of first appearance, and the responses shifted by the size of the
    largest group. That is a permutation; no row gets a response to its own prompt unless one prompt has more than half
    of the rows, and then as few as possible do, none of them its own. With all prompts distinct it is the next row.

    Args:
        prompts: what tells the prompts of the N rows apart.

    Raises:
        ValueError: a single row.
    """
    if len(prompts) == 1:
        raise ValueError(
            "a global batch must have at least 2 rows to form KL pairs, got 1; "
            "raise global_batch_size or the rows of the split"
        )
    groups: dict[Hashable, list[int]] = {}
    for row, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(row)
    order = [row for group in groups.values() for row in group]
    shift = max(map(len, groups.values()), default=0)
    if len(groups) == 1:
        shift = 1  # a shift by the whole batch would give every row its own response
    partners = [0] * len(order)
    for place, row in enumerate(order):
        partners[row] = order[(place + shift) % len(order)]
    return partners


def same_prompt_pairs(prompts: Sequence[Hashable], partners: Sequence[int]) -> list[bool]:
    """For each row, whether its KL response was given to its own prompt; their number is to be logged."""
    return [prompts[row] == prompts[partner] for row, partner in enumerate(partners)]


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
    rows: Sequence[int] | None = None,
) -> dict[str, torch.Tensor]:
    """Tensors of the rows ``rows`` of one global batch.

    Args:
        batch: ALL rows of the global batch: KL pairs are formed over it, whichever rows are kept.
        eos_id: fills up the rows on the right, and ends documents for the next three.
        reset_position_ids: positions start anew after each EOS.
        reset_attention_mask: tokens see only their own document, which ends with an EOS.
        eod_mask_loss: the token after an EOS is not trained on (the EOS itself still is).
        seq_length: longest row; KL rows are cut to it at the end of their response. None: no limit.
        pad_to_multiple: the common length is a multiple of it.
        with_kl: also make KL rows.
        rows: the rows to keep, B of them; None: all.

    Returns:
        samples, sample_labels [B, S] int64 (the label of place t is the token at t, -100 on prompt and padding);
        sample_lengths [B] int64, without padding; preference [B] int64, 1 desirable and 0 undesirable; position_ids
        [B, S] int64; attention_mask: bool [B, S], True at tokens, or with ``reset_attention_mask`` bool [B, 1, S, S],
        True where query (dim 2) must NOT see key (dim 3). With ``with_kl`` also kl_samples, kl_sample_labels,
        kl_sample_lengths, kl_position_ids, kl_attention_mask likewise, and kl_same_prompt [B] int64: 1 where the KL
        response was given to the row's own prompt. For B = 0, S is ``pad_to_multiple``.

    Raises:
        ValueError: a single row in the batch ``with_kl``, or a sample longer than ``seq_length``.
    """
    kept = range(len(batch)) if rows is None else rows
    halves = {"": [(batch[row].prompt_ids, batch[row].response_ids) for row in kept]}
    _check_lengths(halves[""], seq_length)
    tensors = {"preference": torch.tensor([int(batch[row].desirable) for row in kept], dtype=torch.int64)}
    if with_kl:
        prompts = [np.asarray(row.prompt_ids, dtype=np.int64).tobytes() for row in batch]
        partners = kl_partners(prompts)
        same = same_prompt_pairs(prompts, partners)
        halves["kl_"] = [_kl_row(batch[row], batch[partners[row]], seq_length) for row in kept]
        tensors["kl_same_prompt"] = torch.tensor([int(same[row]) for row in kept], dtype=torch.int64)
    make = partial(_arrays, eos_id=eos_id, reset_positions=reset_position_ids, reset_attention=reset_attention_mask)
    width = _common_width(halves.values(), pad_to_multiple)
    for prefix, half in halves.items():
        for name, array in make(half, width, mask_after_eos=eod_mask_loss).items():
            tensors[prefix + _KTO_NAMES[name]] = torch.from_numpy(array)
    return tensors


def dpo_custom_collate(
    batch: Sequence[DPOExample],
    eos_id: int,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    eod_mask_loss: bool = False,
    *,
    seq_length: int | None = None,
    pad_to_multiple: int = 1,
) -> dict[str, torch.Tensor]:
    """Tensors of pairs.

    Args:
        batch: the pairs, B of them.
        eos_id, reset_position_ids, reset_attention_mask, eod_mask_loss, pad_to_multiple: see :func:`kto_custom_collate`.
        seq_length: longest row. None: no limit.

    Returns:
        For side = chosen and rejected: side [B, S] int64, the prompt and that answer; side_labels [B, S] int64 (the label
        of place t is the token at t, -100 on prompt and padding); side_lengths [B] int64, without padding; side_rewards
        [B] float32; side_position_ids and side_attention_mask as the other function's. S is the same for both; for B = 0
        it is ``pad_to_multiple``.

    Raises:
        ValueError: a row longer than ``seq_length``.
    """
    sides = {
        "chosen": [(row.prompt_ids, row.chosen_ids) for row in batch],
        "rejected": [(row.prompt_ids, row.rejected_ids) for row in batch],
    }
    tensors = {
        f"{side}_rewards": torch.tensor([getattr(row, f"{side}_reward") for row in batch], dtype=torch.float32)
        for side in sides
    }
    make = partial(_arrays, eos_id=eos_id, reset_positions=reset_position_ids, reset_attention=reset_attention_mask)
    width = _common_width(sides.values(), pad_to_multiple)
    for side, rows in sides.items():
        _check_lengths(rows, seq_length)
        for name, array in make(rows, width, mask_after_eos=eod_mask_loss).items():
            tensors[side if name == "tokens" else f"{side}_{name}"] = torch.from_numpy(array)
    return tensors


# NeMo-Aligner's names of KTO's tensors
_KTO_NAMES = {
    "tokens": "samples",
    "labels": "sample_labels",
    "lengths": "sample_lengths",
    "position_ids": "position_ids",
    "attention_mask": "attention_mask",
}


def _common_width(halves: Iterable[list], multiple: int) -> int:
    width = max((len(prompt) + len(answer) for half in halves for prompt, answer in half), default=1)
    return -(-width // multiple) * multiple


def _arrays(
    rows: list, width: int, *, eos_id: int, reset_positions: bool, reset_attention: bool, mask_after_eos: bool
) -> dict[str, np.ndarray]:
    """The arrays of one kind of rows, all padded to ``width``."""
    tokens, labels, lengths = _padded(rows, width, eos_id)
    is_token = np.arange(width) < lengths[:, None]
    # [B, S]: the number of documents that ended before a token; padding ends none.
    ends = (tokens == eos_id) & is_token
    documents = np.cumsum(ends, axis=1) - ends
    if mask_after_eos:
        labels[:, 1:][ends[:, :-1]] = IGNORED
    return {
        "tokens": tokens,
        "labels": labels,
        "lengths": lengths,
        "position_ids": _positions(documents, reset=reset_positions),
        "attention_mask": _masked(documents) if reset_attention else is_token,
    }


def _check_lengths(rows: list, seq_length: int | None) -> None:
    longest = max((len(prompt) + len(response) for prompt, response in rows), default=0)
    if seq_length is not None and longest > seq_length:
        raise ValueError(
            f"rows must have at most seq_length={seq_length} tokens, got {longest}; "
            "build the dataset and the collate function with the same seq_length"
        )


def _kl_row(row: KTOExample, partner: KTOExample, seq_length: int | None) -> tuple:
    """The prompt of one row and the response of another, cut at its end."""
    room = None if seq_length is None else seq_length - len(row.prompt_ids)
    return row.prompt_ids, partner.response_ids[:room]


def _padded(rows: list, width: int, eos_id: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens and labels [B, width], and lengths [B]."""
    tokens = np.full((len(rows), width), eos_id, dtype=np.int64)
    labels = np.full((len(rows), width), IGNORED, dtype=np.int64)
    lengths = np.zeros(len(rows), dtype=np.int64)
    for k, (prompt, response) in enumerate(rows):
        start, end = len(prompt), len(prompt) + len(response)
        tokens[k, :start] = prompt
        tokens[k, start:end] = response
        labels[k, start:end] = response
        lengths[k] = end
    return tokens, labels, lengths


def _positions(documents: np.ndarray, *, reset: bool) -> np.ndarray:
    """[B, S] place of each token in its row, or with ``reset`` in its document."""
    places = np.broadcast_to(np.arange(documents.shape[1]), documents.shape)
    if not reset:
        return places.copy()
    is_first = np.diff(documents, axis=1, prepend=-1) > 0
    return places - np.maximum.accumulate(np.where(is_first, places, 0), axis=1)


def _masked(documents: np.ndarray) -> np.ndarray:
    """[B, 1, S, S] True where a query may not see a key: a later token, or one of another document."""
    width = documents.shape[1]
    later = np.triu(np.ones((width, width), dtype=bool), k=1)
    return (later | (documents[:, :, None] != documents[:, None, :]))[:, None]
