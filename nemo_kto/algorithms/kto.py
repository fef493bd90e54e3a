"""KTOTrainer: DPOTrainer for unpaired (binary) feedback."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from nemo_kto.algorithms.dpo import DPOTrainer, identity
from nemo_kto.data.batches.collate import KTOBatch, kto_custom_collate

__all__ = ["KTOTrainer", "kto_custom_collate"]


@dataclass(kw_only=True, eq=False)
class KTOTrainer(DPOTrainer):
    """Trainer for unpaired (binary) feedback.

    Its loaders yield collated batches, because KL examples are formed over the global batch, before it is divided among
    the ranks.
    """

    collate_fn: Callable[[Any], Any] = field(init=False, default_factory=lambda: identity)

    def augment_dataloader(self, dataloader: Iterable[KTOBatch]) -> Iterator[KTOBatch]:
        """Yield batches with the reference log-probs added if the loss uses a reference, one value per sequence."""
        with self.batches(dataloader) as batches:
            for batch in batches:
                if self.model.uses_reference:
                    reference = self.model.get_ref_policy_logprobs(batch)
                    examples = len(batch["preference"])
                    batch = {**batch, "ref_policy_log_probs_samples": reference[:examples]}
                    if "kl_samples" in batch:
                        batch["ref_policy_log_probs_kl_samples"] = reference[examples:]
                batches.begin_next()
                yield batch
