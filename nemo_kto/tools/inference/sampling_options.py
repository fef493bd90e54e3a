"""Options of the commands that draw answers."""

from __future__ import annotations

import argparse

from nemo_kto.cli import integer_from, number


def add_sampling(parser: argparse.ArgumentParser, *, length: str, temperature: str, seed: str) -> None:
    """Add the options of generation with their descriptions."""
    parser.add_argument("--max-new-tokens", type=integer_from(1), metavar="N", help=length)
    from_zero = number("of at least 0", lambda value: value >= 0)
    parser.add_argument("--temperature", type=from_zero, metavar="T", help=temperature)
    top_p = "draw from the most probable tokens whose probabilities sum to P"
    probability = number("above 0 and at most 1", lambda value: 0 < value <= 1)
    parser.add_argument("--top-p", type=probability, metavar="P", help=top_p)
    top_k = "draw from the K most probable tokens; 0: from all"
    parser.add_argument("--top-k", type=integer_from(0), metavar="K", help=top_k)
    parser.add_argument("--seed", type=integer_from(0), metavar="N", help=seed)
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto", help="auto: a GPU if there is one")
