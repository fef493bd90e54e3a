"""Generation settings of a command, and their check."""

from __future__ import annotations

from dataclasses import dataclass

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


def check_sampling(sampling: Sampling, device_name: str) -> None:
    """Select the device that --device names; UserError if the options contradict each other or the machine."""
    for option, value, everything in (("--top-p", sampling.top_p, 1), ("--top-k", sampling.top_k, 0)):
        if sampling.temperature == 0 and value not in (None, everything):
            raise UserError(f"{option} must be used with a temperature above 0, got --temperature 0; leave one out")
    if device_name == "cpu":
        device.force_cpu()
    elif device_name == "gpu" and not device.device_count():
        raise UserError("--device must be cpu or auto on a machine without a GPU, got gpu; leave it out")
