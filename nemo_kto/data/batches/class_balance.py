"""Balance of desirable and undesirable training examples, and the loss weights that restore it.

With n_D desirable and n_U undesirable rows, the authors of KTO keep w_D n_D / (w_U n_U) between 1 and 4/3 (Ethayarajh et
al. 2024, arXiv 2402.01306, section 4.2, equation 8). If rows have weights, n_D and n_U are the sums of these weights.
"""

from __future__ import annotations

MIN_BALANCE, MAX_BALANCE = 1.0, 4 / 3
_WARN_BELOW, _WARN_ABOVE = 0.8, 1.6  # a balance slightly out of that range makes no difference that one could measure
# Learning rates recommended for KTO by TRL's documentation, independent of the size of the data.
MIN_LR, MAX_LR = 5e-7, 5e-6


def loss_balance(desirable: float, undesirable: float, desirable_weight: float, undesirable_weight: float) -> float | None:
    """Return w_D n_D / (w_U n_U); None if one class is absent or has zero weight.

    Examples:
        >>> loss_balance(30, 60, 1.0, 1.0)
        0.5
    """
    good, bad = desirable * desirable_weight, undesirable * undesirable_weight
    return good / bad if good and bad else None


def balanced_weights(
    desirable: float, undesirable: float, desirable_weight: float, undesirable_weight: float
) -> tuple[float, float]:
    """Return w_D and w_U for which the balance is in its range, or unchanged if it is undefined.

    The weight of the class with too little weight is raised by the smallest sufficient factor.

    Examples:
        >>> balanced_weights(30, 60, 1.0, 1.0)
        (2.0, 1.0)
        >>> balanced_weights(80, 20, 1.0, 1.0)
        (1.0, 3.0)
    """
    balance = loss_balance(desirable, undesirable, desirable_weight, undesirable_weight)
    if balance is None or MIN_BALANCE <= balance <= MAX_BALANCE:
        return desirable_weight, undesirable_weight
    if balance < MIN_BALANCE:
        return desirable_weight / balance, undesirable_weight
    return desirable_weight, undesirable_weight * balance / MAX_BALANCE


def balance_warning(desirable: float, undesirable: float, desirable_weight: float, undesirable_weight: float) -> str | None:
    """Return a warning about weights that are far from balancing the classes; None if they are not."""
    balance = loss_balance(desirable, undesirable, desirable_weight, undesirable_weight)
    if balance is None or _WARN_BELOW <= balance <= _WARN_ABOVE:
        return None
    good, bad = balanced_weights(desirable, undesirable, desirable_weight, undesirable_weight)
    figure = f"{desirable_weight:.4g} * {desirable:.10g} / ({undesirable_weight:.4g} * {undesirable:.10g}) = {balance:.4g}"
    return (
        "desirable_loss_weight * desirable rows / (undesirable_loss_weight * undesirable rows) should be from 1 to 4/3, "
        f"got {figure}; set model.kto.desirable_loss_weight={good:.4g} and model.kto.undesirable_loss_weight={bad:.4g}, "
        "or model.kto.auto_balance=true"
    )


def balance_text(desirable: float, undesirable: float, desirable_weight: float, undesirable_weight: float) -> str:
    """Describe the balance of the classes, with the loss weights unless both are 1."""
    balance = loss_balance(desirable, undesirable, desirable_weight, undesirable_weight)
    if balance is None:
        return f"all examples are {'desirable' if desirable * desirable_weight else 'undesirable'}"
    weights = desirable_weight, undesirable_weight
    products = "" if weights == (1, 1) else " with loss weights {:.4g} and {:.4g}".format(*weights)
    return f"desirable / undesirable = {balance:.4g}{products} (recommended: 1 to 4/3)"


def one_class_warning(desirable: float, undesirable: float, lr: float) -> str | None:
    """Return a warning about training rows of a single class, unless the learning rate is in the recommended range."""
    if (desirable and undesirable) or MIN_LR <= lr <= MAX_LR:
        return None
    kind = "desirable" if desirable else "undesirable"
    return (
        f"all training rows are {kind}: without the other class the learning rate should be from {MIN_LR:.0e} to "
        f"{MAX_LR:.0e} (as TRL recommends for KTO), got {lr:.4g}; set model.optim.lr, and train for more epochs if necessary"
    )
