"""Tokenised records: what a dataset gives and a collate function takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class KTOExample:
    """One tokenised record.

    Attributes:
        prompt_ids: [P] int, P >= 1.
        response_ids: [R] int, R >= 1, end-of-turn included where the answer was not cut.
        desirable: whether the answer is one to learn.
        weight: of its loss.
    """

    prompt_ids: Sequence[int] | np.ndarray
    response_ids: Sequence[int] | np.ndarray
    desirable: bool
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DPOExample:
    """One tokenised pair.

    Attributes:
        prompt_ids: [P] int, P >= 1.
        chosen_ids, rejected_ids: [C] and [R] int, at least 1, end-of-turn included where the answer was not cut.
        chosen_reward, rejected_reward: what the answers are worth, in any unit.
        weight: of its loss.
    """

    prompt_ids: Sequence[int] | np.ndarray
    chosen_ids: Sequence[int] | np.ndarray
    rejected_ids: Sequence[int] | np.ndarray
    chosen_reward: float
    rejected_reward: float
    weight: float = 1.0
