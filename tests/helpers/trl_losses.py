"""Parts of the comparison with losses of TRL 1.16, which start from logits: a model of constant logits, random tokens."""

from __future__ import annotations

from itertools import cycle
from types import SimpleNamespace
from typing import Any

import torch

from nemo_kto.losses.sequence import IGNORED, response_positions, sequence_sums

ACCELERATOR = SimpleNamespace(device=torch.device("cpu"), gather=lambda value: value, gather_for_metrics=lambda value: value)
WIDTH, VOCABULARY = 12, 17


class KnownLogits(torch.nn.Module):
    """A language model with constant logits; of several, each call has the next ones."""

    is_gradient_checkpointing = False

    def __init__(self, *logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = cycle(logits)

    def forward(self, *, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **_: Any) -> SimpleNamespace:
        """Logits, and what TRL's fused head computes of them for the tokens with labels."""
        logits = next(self.logits)
        logps = logits[:, :-1].log_softmax(dim=-1)
        answers = torch.ones_like(input_ids[:, 1:]) if labels is None else (labels[:, 1:] != IGNORED).long()
        return SimpleNamespace(
            logits=logits,
            log_probs=logps.gather(2, input_ids[:, 1:, None])[..., 0] * answers,
            log_sum_sq_probs=torch.logsumexp(2 * logps, dim=-1),
            entropy=torch.zeros_like(logps[..., 0]),
            mean_logits=logps.mean(dim=-1),
            is_top1=logps[..., 0] > 0,
        )


def random_tokens(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [N, S], mask [N, S]) of answers of different lengths, padded."""
    starts, ends = torch.randint(1, 5, (rows, 1)), torch.randint(6, WIDTH + 1, (rows, 1))
    places = torch.arange(WIDTH)
    mask = ((places >= starts) & (places < ends)).long()
    return torch.randint(VOCABULARY, (rows, WIDTH)), mask


def answer_logps(logits: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor, *, average: bool = False) -> torch.Tensor:
    """[N], by the parts that a training step is made of."""
    sequence_T, position_T, target_T = response_positions(torch.where(mask.bool(), tokens, IGNORED))
    token_logps_T = logits.log_softmax(-1)[sequence_T, position_T, target_T]
    return sequence_sums(token_logps_T, sequence_T, len(tokens), average=average)
