"""Optimizer steps of TRL 1.16's trainers, and the comparison of a run's steps with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

STEPS, BETA = 3, 0.1

Steps = list[dict[str, Any]]


def trl_steps(
    module: str,
    algorithm: str,
    *,
    policy: Path,
    reference: Path | None,
    rows: Sequence[Mapping[str, Any]],
    batch: int,
    lr: float,
    max_grad_norm: float,
    out: Path,
    **settings: Any,
) -> Steps:
    """What a trainer of TRL logs at each of ``STEPS`` optimizer steps, in fp32 on the CPU.

    Args:
        module: module of the classes, such as ``trl``.
        algorithm: the classes are called ``algorithm``Trainer and ``algorithm``Config.
        reference: folder of the reference model; None for a loss without one.
        **settings: further fields of the configuration.
    """
    trl = pytest.importorskip(module, reason="TRL is the reference implementation")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(policy)
    tokenizer.bos_token = None  # the trainer of ORPO would put it before each prompt
    folders = {"model": policy} if reference is None else {"model": policy, "ref_model": reference}
    trainer = getattr(trl, f"{algorithm}Trainer")(
        **{name: AutoModelForCausalLM.from_pretrained(folder, dtype="float32") for name, folder in folders.items()},
        args=getattr(trl, f"{algorithm}Config")(
            output_dir=str(out),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            beta=BETA,
            per_device_train_batch_size=batch,
            max_steps=STEPS,
            learning_rate=lr,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=max_grad_norm,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **settings,
        ),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(list(rows)),
    )
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == STEPS
    return steps


def assert_same_steps(ours: Steps, theirs: Steps, names: Mapping[str, str], *, abs_tolerance: float = 1e-6) -> None:
    """Compare the metrics of all steps; ``names``: TRL's name of a metric -> our name without ``train/``."""
    for our_step, their_step in zip(ours, theirs, strict=True):
        for their_name, our_name in names.items():
            expected = pytest.approx(float(their_step[their_name]), rel=1e-4, abs=abs_tolerance)
            assert our_step[f"train/{our_name}"] == expected, their_name
