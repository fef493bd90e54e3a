"""KTOTrainer: the loop of DPOTrainer over judged answers instead of pairs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from nemo_kto.algorithms.dpo import Batch, DPOTrainer
from nemo_kto.data.collate import kto_custom_collate

__all__ = ["KTOTrainer", "kto_custom_collate"]


class KTOTrainer(DPOTrainer):
    """Fits a policy to answers that were judged one by one.

    Its loaders yield collated batches (KL pairs are formed over the global batch, before a rank takes its share).
    """

    def __init__(self, **arguments: Any) -> None:
        """Args: arguments: those of :class:`DPOTrainer`, without ``collate_fn``."""
        super().__init__(collate_fn=lambda batch: batch, **arguments)

    def augment_dataloader(self, dataloader: Iterable[Any]) -> Iterator[Batch]:
        """Batches with the reference log-probs attached, one number a row.

        ``ref_policy_log_probs_samples`` always, ``ref_policy_log_probs_kl_samples`` where the batch has KL rows.
        """
        for batch in self.timed(dataloader):
            reference = self.model.get_ref_policy_logprobs(batch).cpu()
            rows = len(batch["preference"])
            batch = {**batch, "ref_policy_log_probs_samples": reference[:rows]}
            if "kl_samples" in batch:
                batch["ref_policy_log_probs_kl_samples"] = reference[rows:]
            yield batch
