"""Numbers as text."""

from __future__ import annotations

MINUS = "\N{MINUS SIGN}"
_UNITS = ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"))  # from this size on, the number divided by this, with this unit


def number_text(value: float, digits: int = 4) -> str:
    """Format a number for an axis or a table.

    Examples:
        >>> [number_text(value) for value in (12_000, 0.25, 2_500_000, 0.0000031, 0)]
        ['12k', '0.25', '2.5M', '3.1e-06', '0']
    """
    size = abs(value)
    for limit, divisor, unit in _UNITS:
        if size >= limit:
            return f"{value / divisor:.{digits}g}{unit}".replace("-", MINUS, int(value < 0))
    return f"{value:.{digits}g}".replace("-", MINUS, int(value < 0))
