"""Learning rates: defaults, and the ranges that docs/guides/settings.md gives."""

from __future__ import annotations

# Default of model.optim.lr by model.peft.peft_scheme; adapters need larger steps.
DEFAULT_LR = {"none": 1e-6, "lora": 1e-5}
# Lowest and highest rate of published runs; for adapters up to ten times the highest one for all weights.
LR_RANGES = {"none": (3e-7, 7e-6), "lora": (5e-7, 7e-5)}
OUTLIER = 30  # a rate beyond a range by more than this factor is probably a mistake


def is_outlier(lr: float, scheme: str) -> bool:
    """Return whether a learning rate is far outside the range for adapters, or for all weights (``scheme`` none)."""
    low, high = LR_RANGES[scheme]
    return not low / OUTLIER <= lr <= high * OUTLIER


def lr_warning(lr: float, scheme: str) -> str | None:
    """Return a warning about a learning rate that is probably a mistake; None for others."""
    if not is_outlier(lr, scheme):
        return None
    (low, high), what = LR_RANGES[scheme], "all weights" if scheme == "none" else "adapters"
    danger = "destroy the model" if lr > high else "hardly change the model"
    return (
        f"model.optim.lr={lr:g} will probably {danger}: {low:g} to {high:g} is usual for {what}; the default is "
        f"{DEFAULT_LR[scheme]:g} (docs/guides/settings.md#learning-rate)"
    )
