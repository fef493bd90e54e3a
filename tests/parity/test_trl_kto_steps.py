"""numerics.md, point 4: optimizer steps of trainers of TRL from the same checkpoints and pairs: KTO of 1.16, BCO of 1.5.1.

The reference is another model than the policy, so that loss and KL are not trivial at the first step.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.engines import InOrder, engine, kto_model
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_models import make_rows, write_rows
from tests.helpers.trl_jobs import BETA, STEPS, assert_same_steps, trl_steps

pytestmark = pytest.mark.parity

BATCH, WEIGHTS = 5, (1.3, 0.8)  # an odd batch: TRL once paired the row in the middle with itself
LEARNING_RATE, MAX_GRAD_NORM = 1e-3, 0.02  # below the gradients' norm: clipping is compared too
COMPARED = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "rewards/chosen": "rewards_chosen_mean",
    "rewards/rejected": "rewards_rejected_mean",
    "rewards/margins": "rewards_margin",
    "logps/chosen": "logps_chosen_mean",
    "logps/rejected": "logps_rejected_mean",
}
# Steps of the BCOTrainer of TRL 1.5.1, which 1.16 no longer has: COMPARED and delta.
BCO_STEPS = (
    (1.012299, 7.32676, -0.3456691, 0.7360054, -1.081674, -203.1088, -162.6928, 0.08700074),
    (0.7362505, 3.89917, 0.2604614, 0.4289692, -0.1685078, -170.9726, -111.4388, 0.2074326),
    (0.610119, 3.582202, 0.9615406, 1.151765, -0.1902249, -151.0601, -241.253, 0.4714836),
)
ANCHORS = {"kto": {"kl": "kl"}, "apo_zero_unpaired": {}, "bco": {"delta": "delta"}}  # of APO-zero TRL logs a kl of 0


def weights_of(loss: str) -> tuple[float, float]:
    """Of desirable and of undesirable answers; TRL's BCO has none."""
    return (1.0, 1.0) if loss == "bco" else WEIGHTS


def our_model(policy: Path, reference: Path, loss: str, tensor_parallel: int) -> Any:
    """The policy on one rank, measured against another model than itself."""
    import torch

    from nemo_kto.architecture.architecture import read_architecture
    from nemo_kto.huggingface.hf_weights import load_weights
    from nemo_kto.models.engine.optimizer import wrap_data_parallel
    from nemo_kto.models.engine.reference import SwappedWeights
    from nemo_kto.models.gpt import build_gpt

    architecture = read_architecture(policy, tensor_parallel=tensor_parallel)
    chunks = wrap_data_parallel([build_gpt(architecture, params_dtype=torch.float32)], use_distributed_optimizer=False)
    load_weights(chunks, architecture, reference)
    frozen = SwappedWeights(parameters=chunks[0].parameters())
    load_weights(chunks, architecture, policy)
    return kto_model(engine(chunks, architecture), frozen.active, loss=loss, beta=BETA, weights=weights_of(loss))


def our_optimizer(chunks: Any) -> tuple[Any, Any]:
    """Optimizer and schedule with TRL's settings and defaults."""
    import torch

    from nemo_kto.models.engine.optimizer import build_optimizer, build_scheduler

    rates: dict[str, Any] = {"lr": LEARNING_RATE, "min_lr": LEARNING_RATE, "weight_decay": 0.0}
    optimizer = build_optimizer(
        chunks=chunks,
        betas=(0.9, 0.999),
        eps=1e-8,
        clip_grad=MAX_GRAD_NORM,
        params_dtype=torch.float32,
        use_distributed_optimizer=False,
        **rates,
    )
    return optimizer, build_scheduler(
        optimizer=optimizer, name="constant", warmup_steps=0, constant_steps=0, max_steps=STEPS, **rates
    )


def our_batches(policy: Path, rows: Path, *, with_kl: bool) -> list[Any]:
    """The rows through our own data path, in an order that gives TRL's pairs."""
    from transformers import AutoTokenizer

    from nemo_kto.data.batches.collate import kto_custom_collate
    from nemo_kto.data.batches.dataset import KTOExample
    from nemo_kto.data.rows.reader import Fields, FileColumns, FileReader, RowErrors
    from nemo_kto.data.tokens.chat_template import RecordEncoder

    tokenizer = AutoTokenizer.from_pretrained(policy)
    records = list(FileReader(fields=Fields(), broken=RowErrors()).kto_records(rows, FileColumns()))
    encoded: list[Any] = RecordEncoder(tokenizer=tokenizer).encode(records)
    tokenised = [
        KTOExample(prompt_ids=row.prompt_ids, response_ids=row.response_ids, desirable=record.desirable)
        for record, row in zip(records, encoded, strict=True)
    ]
    # TRL gives a row the response of the row before it, we that of the row after it
    return [
        kto_custom_collate(tokenised[start : start + BATCH][::-1], tokenizer.eos_token_id, with_kl=with_kl)
        for start in range(0, len(tokenised), BATCH)
    ]


def our_steps(policy: Path, reference: Path, rows: Path, loss: str, tensor_parallel: int) -> list[dict[str, float]]:
    """What our trainer reports at each step, on one rank."""
    from nemo_kto.algorithms.callbacks import Callback, Event
    from nemo_kto.algorithms.dpo import TrainerConfig
    from nemo_kto.algorithms.kto import KTOTrainer
    from nemo_kto.distributed import state
    from nemo_kto.telemetry.watch import RunTimer

    state.init_distributed(layout=state.Layout(tensor=tensor_parallel), seed=0)
    model = our_model(policy, reference, loss, tensor_parallel)
    optimizer, scheduler = our_optimizer(model.engine.chunks)
    batches = our_batches(policy, rows, with_kl=loss == "kto")
    trainer = KTOTrainer(
        cfg=TrainerConfig(
            max_epochs=1,
            max_steps=STEPS,
            val_check_interval=0,
            save_interval=0,
            limit_train_batches=1.0,
            limit_val_batches=0,
            global_batch_size=BATCH,
        ),
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        train_dataloader=InOrder(batches),
        val_dataloader=None,
        test_dataloader=None,
        logger=None,  # type: ignore[arg-type]
        ckpt_callback=None,  # type: ignore[arg-type]
        run_timer=RunTimer(max_time=None),
    )
    steps: list[dict[str, float]] = []

    class Collect(Callback):
        def on_train_step_end(self, trainer: Any, event: Event) -> None:
            steps.append(dict(event.report))

    trainer.callbacks = [Collect()]  # no logger and no checkpoints
    trainer.fit()
    return steps


@pytest.mark.parametrize(
    ("loss", "tensor_parallel"),
    [
        ("kto", 2),
        ("bco", 1),
        *(pytest.param("apo_zero_unpaired", tensor, marks=pytest.mark.full) for tensor in (1, 2)),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (("kto", 1), ("bco", 2))),
    ],
)
def test_optimizer_steps(
    ranks: RankPool, tiny_checkpoint: Callable[..., Path], tmp_path: Path, loss: str, tensor_parallel: int
) -> None:
    policy, reference = tiny_checkpoint("llama"), tiny_checkpoint("llama", seed=1)
    rows = [
        {"prompt": f"{number}: {row['prompt']}", "completion": f" {row['response']}", "label": number % 3 > 0}
        for number, row in enumerate(make_rows(STEPS * BATCH))
    ]
    theirs = [dict(zip((*COMPARED, "delta"), step, strict=True)) for step in BCO_STEPS]
    if loss != "bco":
        theirs = trl_steps(
            "trl",
            "KTO",
            policy=policy,
            reference=reference,
            rows=rows,
            batch=BATCH,
            lr=LEARNING_RATE,
            max_grad_norm=MAX_GRAD_NORM,
            out=tmp_path / "trl",
            loss_type=loss,
            desirable_weight=WEIGHTS[0],
            undesirable_weight=WEIGHTS[1],
        )
    rows_file = write_rows(tmp_path / "rows.jsonl", rows)
    ours = ranks.run(tensor_parallel, our_steps, policy, reference, rows_file, loss, tensor_parallel)

    assert min(step["grad_norm"] for step in theirs) > MAX_GRAD_NORM
    for steps in ours:
        assert_same_steps(steps, theirs, COMPARED | ANCHORS[loss], abs_tolerance=1e-7)
    if loss == "kto":
        assert max(step["kl"] for step in theirs) > 0, "z0 must not be clamped everywhere"
