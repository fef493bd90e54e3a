"""KTOTrainer: the loop of DPOTrainer over unpaired answers with binary feedback."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from nemo_kto.algorithms.callbacks import Callback
from nemo_kto.algorithms.dpo import DPOTrainer, TrainerConfig
from nemo_kto.algorithms.protocols import CheckpointWriter, Loader, MetricsLogger, Optimizer, PolicyModel, Scheduler
from nemo_kto.data.batch import KTOBatch
from nemo_kto.data.collate import kto_custom_collate
from nemo_kto.telemetry.timers import PhaseTimers, RunTimer

__all__ = ["KTOTrainer", "kto_custom_collate"]


class KTOTrainer(DPOTrainer):
    """Fits a policy to answers with binary feedback.

    Its loaders yield collated batches (KL examples are formed over the global batch, before a rank takes its share).
    """

    def __init__(
        self,
        *,
        cfg: TrainerConfig,
        model: PolicyModel[KTOBatch],
        optimizer: Optimizer,
        scheduler: Scheduler,
        train_dataloader: Loader[KTOBatch],
        val_dataloader: Loader[KTOBatch] | None,
        test_dataloader: Loader[KTOBatch] | None,
        logger: MetricsLogger,
        ckpt_callback: CheckpointWriter,
        run_timer: RunTimer,
        timers: PhaseTimers | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """Args: those of :class:`DPOTrainer`, without ``collate_fn``."""
        super().__init__(
            cfg=cfg,
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            train_dataloader=train_dataloader,
            val_dataloader=val_dataloader,
            test_dataloader=test_dataloader,
            collate_fn=lambda batch: batch,
            logger=logger,
            ckpt_callback=ckpt_callback,
            run_timer=run_timer,
            timers=timers,
            callbacks=callbacks,
        )

    def augment_dataloader(self, dataloader: Iterable[KTOBatch]) -> Iterator[Any]:
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
