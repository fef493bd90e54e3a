"""Warnings about learning rates, in the ranges that the documentation gives."""

from __future__ import annotations

import pytest

from docs.site.pages import DOCS
from nemo_kto.config.learning_rates import DEFAULT_LR, LR_RANGES, OUTLIER, lr_warning
from tests.helpers.messages import Message

PAGE = "docs/guides/settings.md#learning-rate"
USUAL = {"none": ("3e-07 to 7e-06", "1e-06", "all weights"), "lora": ("5e-07 to 7e-05", "1e-05", "adapters")}


@pytest.mark.parametrize("scheme", USUAL)
@pytest.mark.parametrize(
    ("lr", "danger"), [(1.0, "destroy the model"), (1e-2, "destroy the model"), (1e-9, "hardly change")]
)
def test_a_rate_far_from_usual(lr: float, danger: str, scheme: str) -> None:
    assert str(lr_warning(lr, scheme)) == Message(f"model.optim.lr={lr:g}", danger, *USUAL[scheme], PAGE)


# The lowest and highest rates that the documentation recommends, for any size of a model.
@pytest.mark.parametrize(("scheme", "lr"), [("none", 3e-7), ("none", 8e-5), ("lora", 5e-7), ("lora", 1e-3)])
def test_documented_rates_have_no_warning(scheme: str, lr: float) -> None:
    assert lr_warning(lr, scheme) is None
    assert lr_warning(DEFAULT_LR[scheme], scheme) is None


def test_the_page_gives_the_ranges() -> None:
    text = " ".join((DOCS / "guides/settings.md").read_text(encoding="utf-8").split())
    (full, adapters) = (" to ".join(f"{end:.0e}".replace("e-0", "e-") for end in LR_RANGES[each]) for each in LR_RANGES)
    assert f"{OUTLIER} times below or above {full} for all weights, {adapters} for adapters" in text
