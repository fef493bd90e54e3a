"""Rules of model.kto and model.dpo that only one of the algorithms has."""

from __future__ import annotations

import pytest

from nemo_kto.algorithms.recipes import DPO, KTO, Recipe
from nemo_kto.losses import kto as kto_losses
from nemo_kto.losses.loss import Loss
from nemo_kto.losses.preference import LOSSES
from tests.helpers.messages import Message
from tests.unit.conftest import FindErrors, Load

SORTING = LOSSES["aot"]


@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if not loss.needs_reference])
def test_a_loss_without_a_reference_rejects_reference_settings(find_errors: FindErrors, tmp_path: object, name: str) -> None:
    overrides = [
        f"model.dpo.preference_loss={name}",
        "model.reference.mode=swap",
        f"model.reference.restore_from_path={tmp_path}/model",
        "model.reference.sync_interval=3",
    ]
    assert find_errors(*overrides, recipe=DPO) == [
        Message("model.reference.mode", name, "reference", "swap"),
        Message("model.reference.restore_from_path", name, "reference", f"{tmp_path}/model"),
        Message("model.reference.sync_interval", name, "reference", "3"),
    ]


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_pairs_accept_only_their_options(find_errors: FindErrors, name: str) -> None:
    values = {
        "label_smoothing": 0.1,
        "exo_label_smoothing": 0.1,
        "discopop_tau": 0.1,
        "gt_reward_scale": 2.0,
        "simpo_gamma": 1.0,
        "orpo_sft_weight": 0.5,
        "f_divergence_type": "js_divergence",
        "cpo_alpha": 0.5,
        "alphapo_alpha": 0.5,
    }
    given = [f"model.dpo.preference_loss={name}", *(f"model.dpo.{option}={value}" for option, value in values.items())]
    wrong = {f"model.dpo.{option}" for option in values if option not in LOSSES[name].options}
    assert {line.split()[0] for line in find_errors(*given, recipe=DPO)} == wrong


def test_unset_options_have_the_defaults_of_the_loss(load: Load) -> None:
    cfg = load(recipe=DPO)
    assert (cfg.loss.definition, cfg.loss.loss_options()) == (LOSSES["dpo"], {})
    assert cfg.data_options() == {"default_chosen_reward": 1.0, "default_rejected_reward": 0.0}
    given = ["model.dpo.preference_loss=simpo", "model.dpo.simpo_gamma=2"]
    assert load(*given, recipe=DPO).loss.loss_options() == {"simpo_gamma": 2.0}
    given = ["model.dpo.preference_loss=rpo_sq", "model.data.default_rejected_reward=-1"]
    assert load(*given, recipe=DPO).data_options() == {"default_chosen_reward": 1.0, "default_rejected_reward": -1.0}


def test_the_record_of_a_mixture_and_without_a_reference(load: Load) -> None:
    given = ["model.dpo.preference_losses={dpo: 0.8, bco_pair: 0.2}", "model.dpo.label_smoothing=0.1"]
    loss = load(*given, recipe=DPO).loss
    assert (loss.loss_name, loss.loss_options()) == ("0.8 dpo + 0.2 bco_pair", {"label_smoothing": 0.1})
    assert loss.definition.parts == {"dpo": (LOSSES["dpo"], 0.8), "bco_pair": (LOSSES["bco_pair"], 0.2)}
    assert loss.definition.needs_reference
    for overrides in (given, []):
        assert not load(*overrides, "model.dpo.reference_free=true", recipe=DPO).loss.definition.needs_reference


def test_a_sweep_may_set_options_of_another_of_its_losses(find_errors: FindErrors) -> None:
    given = ["model.dpo.simpo_gamma=1.0", "model.data.default_chosen_reward=5"]
    assert find_errors(*given, recipe=DPO, sweep=True) == []
    assert len(find_errors(*given, recipe=DPO)) == 2


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        (KTO, ["model.global_batch_size=1", "model.kto.preference_loss=apo_zero_unpaired"]),
        (KTO, ["model.global_batch_size=2"]),
        (KTO, ["model.kto.auto_balance=true", "model.kto.desirable_loss_weight=1.3"]),
        (KTO, ["model.kto.desirable_loss_weight=0"]),
        (
            DPO,
            [
                "model.dpo.preference_losses={simpo: 1.0, sigmoid_norm: 2}",
                "model.dpo.reference_free=true",
                "exp_manager.checkpoint_callback_params.monitor=val_simpo_loss",
            ],
        ),
        (DPO, ["model.dpo.preference_losses={aot: 1.0, dpo: 0.5, exo_pair: 0.1}", "model.dpo.exo_label_smoothing=0.1"]),
        (DPO, ["model.dpo.preference_losses={ipo: 1, sigmoid_norm: 1}", "model.dpo.preference_average_log_probs=true"]),
        (DPO, ["model.global_batch_size=1"]),  # a pair has nothing to do with another pair
        (
            DPO,
            [
                "model.dpo.preference_loss=rpo_sq",
                "model.data.default_chosen_reward=-1",
                "model.data.default_rejected_reward=-2",
            ],
        ),
    ],
)
def test_valid_settings_pass(find_errors: FindErrors, recipe: Recipe, overrides: list[str]) -> None:
    assert find_errors(*overrides, recipe=recipe) == []


def test_rules_of_losses_with_delta(find_errors: FindErrors, monkeypatch: pytest.MonkeyPatch) -> None:
    """BCO's function by its path: pairs have no delta."""
    monkeypatch.setattr(kto_losses, "OWN", Loss(function=kto_losses.bco_losses), raising=False)
    own = "nemo_kto.losses.kto.OWN"
    assert find_errors(f"model.kto.preference_loss={own}") == []
    assert find_errors(f"model.dpo.preference_loss={own}", recipe=DPO) == [
        Message("model.dpo.preference_loss", "delta", "dpo", f"{own}")
    ]
