"""KTOTrainer: the loop of DPOTrainer over unpaired answers with binary feedback."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from nemo_kto.algorithms.dpo import DPOTrainer
from nemo_kto.data.batches.collate import KTOBatch, kto_custom_collate

__all__ = ["KTOTrainer", "kto_custom_collate"]


def identity(batch: KTOBatch) -> KTOBatch:
    """The collate function where a loader yields batches already."""
    return batch


@dataclass(kw_only=True, eq=False)
class KTOTrainer(DPOTrainer):
    """Fits a policy to answers with binary feedback.

    Its loaders yield collated batches (KL examples are formed over the global batch, before a rank takes its share).
    """

    collate_fn: Callable[[KTOBatch], KTOBatch] = field(init=False, default=identity)

    def augment_dataloader(self, dataloader: Iterable[KTOBatch]) -> Iterator[KTOBatch]:
        """Batches with the reference log-probs attached, one number a sequence.

        ``ref_policy_log_probs_samples`` where the loss has a reference, ``ref_policy_log_probs_kl_samples`` where the batch
        has KL examples too.
        """
        for batch in self.timed(dataloader):
            if self.model.uses_reference:
                reference = self.model.get_ref_policy_logprobs(batch).cpu()
                examples = len(batch["preference"])
                batch = {**batch, "ref_policy_log_probs_samples": reference[:examples]}
                if "kl_samples" in batch:
                    batch["ref_policy_log_probs_kl_samples"] = reference[examples:]
            yield batch
