"""Generation settings: the options of the commands that draw answers, their values and their check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click

from nemo_kto.cli.command import Decorator, WordChoice, integer_from, number, together
from nemo_kto.device import device
from nemo_kto.errors import UserError

_FROM_ZERO = number("of at least 0", lambda value: value >= 0)
_PROBABILITY = number("above 0 and at most 1", lambda value: 0 < value <= 1)
_TOP_P = "draw from the most probable tokens whose probabilities sum to P"
_TOP_K = "draw from the K most probable tokens; 0: from all"
_DEVICES = ("auto", "cpu", "gpu")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Generation settings of the command; None keeps the value of generation_config.json."""

    max_new_tokens: int | None = None
    temperature: float | None = None  # 0 takes the most probable token
    top_p: float | None = None
    top_k: int | None = None  # 0 draws from all tokens
    seed: int | None = None  # every answer is drawn with this seed


def check_sampling(sampling: Sampling, device_name: str) -> None:
    """Select the device that --device names; UserError if the options contradict each other or the machine."""
    for option, value, everything in (("--top-p", sampling.top_p, 1), ("--top-k", sampling.top_k, 0)):
        if sampling.temperature == 0 and value not in (None, everything):
            raise UserError(f"{option} must be used with a temperature above 0, got --temperature 0; leave one out")
    if device_name == "cpu":
        device.force_cpu()
    elif device_name == "gpu" and not device.device_count():
        raise UserError("--device must be cpu or auto on a machine without a GPU, got gpu; leave it out")


def sampling_options(
    *, length: str, temperature: str, seed: str, defaults: Mapping[str, float | None] | None = None
) -> Decorator[Any]:
    """Return the options of generation with their descriptions and, by their names, defaults."""
    default = dict.fromkeys(("max_new_tokens", "temperature", "top_p", "top_k", "seed")) | dict(defaults or {})

    def option(name: str, kind: click.ParamType, metavar: str, description: str) -> Decorator[Any]:
        words = f"--{name.replace('_', '-')}"
        return click.option(words, name, type=kind, metavar=metavar, help=description, default=default[name])

    return together(
        option("max_new_tokens", integer_from(1), "N", length),
        option("temperature", _FROM_ZERO, "T", temperature),
        option("top_p", _PROBABILITY, "P", _TOP_P),
        option("top_k", integer_from(0), "K", _TOP_K),
        option("seed", integer_from(0), "N", seed),
        click.option(
            "--device", type=WordChoice(_DEVICES), metavar="auto|cpu|gpu", default="auto", help="auto: a GPU if there is one"
        ),
    )
