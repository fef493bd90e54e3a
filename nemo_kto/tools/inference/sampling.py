"""Generation settings of a command, and their check."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

from nemo_kto.device import device
from nemo_kto.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Generation settings of the command; None keeps the value of generation_config.json."""

    max_new_tokens: int | None = None
    temperature: float | None = None  # 0 takes the most probable token
    top_p: float | None = None
    top_k: int | None = None  # 0 draws from all tokens
    seed: int | None = None  # every answer is drawn with this seed


def check_sampling(flags: SimpleNamespace) -> None:
    """Select the device of the options; UserError if they contradict each other or the machine."""
    for option, value, everything in (("--top-p", flags.top_p, 1), ("--top-k", flags.top_k, 0)):
        if flags.temperature == 0 and value not in (None, everything):
            raise UserError(f"{option} must be used with a temperature above 0, got --temperature 0; leave one out")
    if flags.device == "cpu":
        device.force_cpu()
    elif flags.device == "gpu" and not device.device_count():
        raise UserError("--device must be cpu or auto on a machine without a GPU, got gpu; leave it out")
