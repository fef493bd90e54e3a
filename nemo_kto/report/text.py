"""Numbers as text."""

from __future__ import annotations

import re

MINUS = "\N{MINUS SIGN}"
_UNITS = ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"))  # from this size on, the number divided by this, with this unit
_TRAILING_ZEROS = re.compile(r"\.?0*e-0*")


def number_text(value: float, digits: int = 4) -> str:
    """Format a number for an axis or a table, as short as its digits allow.

    Numbers from 1,000 to 10,000 have all their digits before the point; those below 0.001 have an exponent.

    Examples:
        >>> [number_text(value) for value in (12_000, 0.25, 2_500_000, 0.00025, 0)]
        ['12k', '0.25', '2.5M', '2.5e-4', '0']
        >>> number_text(1899.3, digits=3)
        '1899'
    """
    size = abs(value)
    divisor, unit = next(((divisor, unit) for limit, divisor, unit in _UNITS if size >= limit), (1.0, ""))
    text = f"{size / divisor:.{digits}g}"
    if 0 < size < 1e-3:
        text = _TRAILING_ZEROS.sub("e-", f"{size:.{digits - 1}e}")
    elif "e" in text:
        text = f"{size / divisor:.0f}"
    return f"{MINUS if value < 0 else ''}{text}{unit}"
