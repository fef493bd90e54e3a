"""LoRA settings and reference passes from a configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_kto.architecture.lora import LoRASettings
from tests.helpers.messages import assert_names
from tests.helpers.tiny_models import write_stub_model
from tests.unit.config.test_rules_model import checkpoint_of_adapters
from tests.unit.run.test_build_rows import resolved

LORA, TUNING = "model.peft.peft_scheme=lora", "model.peft.lora_tuning"


def test_every_key_of_the_adapters_is_used() -> None:
    assert resolved().adapters is None
    plain = resolved(LORA).adapters
    assert plain == LoRASettings(rank=32, alpha=32, target_modules=("all-linear",))
    given = "adapter_dim=16 alpha=8 rslora=true dora=true adapter_dropout=0.1 target_modules=[mlp] layer_selection=[2]"
    found = resolved(LORA, *(f"{TUNING}.{key}" for key in given.split())).adapters
    assert found == LoRASettings(rank=16, alpha=8, rslora=True, dora=True, dropout=0.1, target_modules=("mlp",), layers=(2,))
    assert found.scale == 2.0


def test_a_cached_reference_is_evaluated_per_epoch_for_new_kl_examples() -> None:
    """The start table says so, and the plan counts the policy's weights that are in host memory meanwhile."""
    two, short = "trainer.kto.max_epochs=2", "KL examples"
    for overrides, by_epoch, swapped in (
        ([], False, None),
        ([two], True, "all"),
        ([two, "model.kto.preference_loss=bco"], False, None),
        ([two, LORA, "model.reference.mode=cached"], True, None),
        ([two, LORA, "model.reference.restore_from_path=OTHER"], True, "all"),
    ):
        run = resolved(*overrides)
        found = (run.reference.name, short in run.reference.reason, run.swapped_weights)
        assert found == ("cached", by_epoch, swapped), overrides


def test_given_adapters_are_those_of_the_reference(tmp_path: Path) -> None:
    """In PEFT's format or in a checkpoint: the start table names them, and the plan counts their copy."""
    write_stub_model(tmp_path / "model")
    trained = checkpoint_of_adapters(tmp_path / "step", tmp_path / "model")
    for overrides, words, passes, swapped in (
        ([], ("adapters disabled", "almost no memory"), (0, 1), None),
        (["model.peft.restore_from_path=ADAPTER"], ("the given adapters", "a copy"), (1, 0), "trained"),
        ([f"pretrained_checkpoint.restore_from_path={trained}"], ("the given adapters", "a copy"), (1, 0), "trained"),
    ):
        run = resolved(LORA, *overrides)
        assert run.reference.name == "adapter"
        assert_names(run.reference.reason, *words)
        assert (run.reference_passes, run.swapped_weights) == (passes, swapped)


@pytest.mark.parametrize(
    ("overrides", "lr", "min_lr"),
    [
        ([], 1e-6, 1e-7),
        ([LORA], 1e-5, 1e-6),
        (["model.optim.lr=5e-7"], 5e-7, 5e-8),
        ([LORA, "model.optim.lr=2e-4", "model.optim.sched.min_lr=0"], 2e-4, 0.0),
    ],
)
def test_default_learning_rates(overrides: list[str], lr: float, min_lr: float) -> None:
    optim = resolved(*overrides).cfg.model.optim
    assert (optim.lr, optim.sched.min_lr) == (lr, min_lr)


def test_one_name_of_target_modules_needs_no_list() -> None:
    adapters = resolved(LORA, f"{TUNING}.target_modules=all-linear").adapters
    assert adapters is not None
    assert adapters == resolved(LORA).adapters
    assert len(adapters.modules) == 7
