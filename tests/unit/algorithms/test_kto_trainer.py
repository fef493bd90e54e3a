"""KTOTrainer: reference log-probs of examples and KL examples."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nemo_kto.algorithms import kto
from nemo_kto.algorithms.kto import KTOTrainer
from nemo_kto.data.batches import collate
from tests.unit.algorithms.trainer_doubles import Run


class Reference:
    """Gives one number a sequence: samples first, then KL examples."""

    uses_reference = True

    def get_ref_policy_logprobs(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        rows = len(batch["preference"])
        return -torch.arange(1.0, (2 if "kl_samples" in batch else 1) * rows + 1)


def trainer(**changes: Any) -> KTOTrainer:
    run = Run()
    arguments = {
        name: getattr(run.trainer, name)
        for name in (
            "cfg", "model", "optimizer", "scheduler", "train_dataloader", "val_dataloader", "test_dataloader",
            "logger", "run_timer",
        )
    }  # fmt: skip
    return KTOTrainer(**{**arguments, "ckpt_callback": run.notes, "model": Reference(), **changes})


def test_reference_log_probs_of_examples_and_kl_examples() -> None:
    batch: Any = {"preference": torch.tensor([1, 0, 1]), "kl_samples": torch.zeros(3, 4, dtype=torch.int64)}
    (augmented,) = trainer().augment_dataloader([batch])
    assert augmented["ref_policy_log_probs_samples"].tolist() == [-1.0, -2.0, -3.0]
    assert augmented["ref_policy_log_probs_kl_samples"].tolist() == [-4.0, -5.0, -6.0]
    assert sorted(batch) == ["kl_samples", "preference"], "the loader's batch is unchanged"


def test_no_kl_examples() -> None:
    batch: Any = {"preference": torch.tensor([1, 0])}
    (augmented,) = trainer().augment_dataloader([batch])
    assert augmented["ref_policy_log_probs_samples"].tolist() == [-1.0, -2.0]
    assert "ref_policy_log_probs_kl_samples" not in augmented


def test_a_rank_without_examples_in_the_last_batch() -> None:
    batch: Any = {"preference": torch.zeros(0, dtype=torch.int64), "kl_samples": torch.zeros(0, 4, dtype=torch.int64)}
    (augmented,) = trainer().augment_dataloader([batch])
    assert augmented["ref_policy_log_probs_samples"].shape == augmented["ref_policy_log_probs_kl_samples"].shape == (0,)


def test_a_loss_without_a_reference_gets_no_log_probs() -> None:
    reference = Reference()
    reference.uses_reference = False
    batch: Any = {"preference": torch.tensor([1, 0])}
    assert list(trainer(model=reference).augment_dataloader([batch])) == [batch]


def test_rejects_collate_fn_and_positional_arguments() -> None:
    with pytest.raises(TypeError, match="collate_fn"):
        trainer(collate_fn=lambda raw: raw)
    with pytest.raises(TypeError, match="positional"):
        KTOTrainer(None)  # type: ignore[call-arg, misc, arg-type]


def test_aligners_import_path_of_the_collate_function() -> None:
    assert kto.__all__ == ["KTOTrainer", "kto_custom_collate"]
    assert kto.kto_custom_collate is collate.kto_custom_collate
