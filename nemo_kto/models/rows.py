"""Rows of token ids, and how they are cut into micro-batches. Shape suffixes: B rows, S tokens; b, s of a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from nemo_kto.parallel import device

Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of token ids, padded on the right.

    Attributes:
        tokens_BS: token ids.
        labels_BS: the token itself where it belongs to the response, -100 elsewhere.
        lengths_B: tokens before the padding.
        positions_BS: position ids.
        mask_B1SS: True where attention is forbidden; None for plain causal attention.
        answers: rows that belong together: k, k + B / answers, ... are answers to one prompt, and share a micro-batch.
    """

    tokens_BS: torch.Tensor
    labels_BS: torch.Tensor
    lengths_B: torch.Tensor
    positions_BS: torch.Tensor
    mask_B1SS: torch.Tensor | None = None
    answers: int = 1

    def __len__(self) -> int:
        return self.tokens_BS.shape[0]

    def take(self, rows_b: torch.Tensor) -> Rows:
        """The rows of these numbers, each by itself."""
        mask = self.mask_B1SS
        return Rows(
            tokens_BS=self.tokens_BS[rows_b],
            labels_BS=self.labels_BS[rows_b],
            lengths_B=self.lengths_B[rows_b],
            positions_BS=self.positions_BS[rows_b],
            mask_B1SS=None if mask is None else mask[rows_b],
        )

    def micro_batches(self, size: int, *, multiple: int) -> list[MicroBatch]:
        """Cut into micro-batches of at most ``size`` prompts of like length, each no wider than its longest row needs.

        The sum over rows does not care for their order, and padding is work for nothing. Widths are multiples of
        ``multiple`` (sequence parallelism shards them). A micro-batch has first the first answers to its prompts, then
        the second ones, if there are any.
        """
        return [self._micro_batch(rows_b, multiple) for rows_b in self._by_length(size)]

    def positions(self, size: int, *, multiple: int) -> int:
        """Tokens and padding that :meth:`micro_batches` of the same arguments carry."""
        return sum(len(rows_b) * self._width(rows_b, multiple) for rows_b in self._by_length(size))

    def _by_length(self, size: int) -> Sequence[torch.Tensor]:
        if not len(self):
            return []
        prompts = len(self) // self.answers
        longest_of_prompt = self.lengths_B.view(self.answers, prompts).amax(dim=0)
        order = torch.argsort(longest_of_prompt, descending=True, stable=True)
        return [torch.cat([part + prompts * k for k in range(self.answers)]) for part in order.split(size)]

    def _width(self, rows_b: torch.Tensor, multiple: int) -> int:
        return -(-int(self.lengths_B[rows_b].max()) // multiple) * multiple

    def _micro_batch(self, rows_b: torch.Tensor, multiple: int) -> MicroBatch:
        width = self._width(rows_b, multiple)
        there = device.current_device()

        def cut(values_BS: torch.Tensor) -> torch.Tensor:
            return values_BS[rows_b, :width].to(there, non_blocking=True)

        mask = self.mask_B1SS
        return MicroBatch(
            rows_b=rows_b,
            tokens_bs=cut(self.tokens_BS),
            labels_bs=cut(self.labels_BS),
            positions_bs=cut(self.positions_BS),
            mask_b1ss=None if mask is None else mask[rows_b, :, :width, :width].to(there),
        )


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """What one pass through the pipeline carries: ``rows_b`` says which of the rows these are."""

    rows_b: torch.Tensor
    tokens_bs: torch.Tensor
    labels_bs: torch.Tensor
    positions_bs: torch.Tensor
    mask_b1ss: torch.Tensor | None


def rows_of(batch: Batch, name: str, *further: str) -> Rows:
    """The rows of a collated batch under ``name`` ('samples', 'kl_samples', 'chosen', 'rejected').

    With ``further`` names, those rows after them, all of one width, as further answers to the same prompts.
    """
    parts = [_rows(batch, part) for part in (name, *further)]
    if not further:
        return parts[0]
    masks = [part.mask_B1SS for part in parts if part.mask_B1SS is not None]
    return Rows(
        tokens_BS=torch.cat([part.tokens_BS for part in parts]),
        labels_BS=torch.cat([part.labels_BS for part in parts]),
        lengths_B=torch.cat([part.lengths_B for part in parts]),
        positions_BS=torch.cat([part.positions_BS for part in parts]),
        mask_B1SS=torch.cat(masks) if masks else None,
        answers=len(parts),
    )


def _rows(batch: Batch, name: str) -> Rows:
    tokens_BS, row = batch[name], name.removesuffix("s")  # samples, but sample_labels
    prefix = name.removesuffix("samples") if name.endswith("samples") else f"{name}_"
    mask, positions = batch.get(f"{prefix}attention_mask"), batch.get(f"{prefix}position_ids")
    if positions is None:
        positions = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)
    return Rows(
        tokens_BS=tokens_BS,
        labels_BS=batch[f"{row}_labels"],
        lengths_B=batch[f"{row}_lengths"],
        positions_BS=positions,
        mask_B1SS=mask if mask is not None and mask.dim() == 4 else None,
    )
