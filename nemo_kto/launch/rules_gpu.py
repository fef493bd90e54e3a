"""The rules of what only some GPUs can do: checked before anything starts, and again where the GPU itself can be asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from nemo_kto.errors import ConfigError, UserError
from nemo_kto.launch.packages import transformer_engine_version
from nemo_kto.launch.schema import RunConfig
from nemo_kto.parallel import device
from nemo_kto.parallel.precision import PRECISIONS

OLDEST_ENGINE = (2, 3)  # the first Transformer Engine whose fused Adam has moments in bf16
_SHARDED, _OFFLOAD = "model.optim.use_distributed_optimizer", "model.optim.offload_fraction"


@dataclass(frozen=True, kw_only=True)
class Computes:
    """What a run computes with.

    Attributes:
        on_gpu: on GPUs.
        engine: version of Transformer Engine; None where there is none.
    """

    on_gpu: bool
    engine: tuple[int, int] | None


class _Option(NamedTuple):
    """A key that was given, and the value that asks for nothing."""

    key: str
    value: object
    off: str

    def refused(self, where: str, remedy: str, *reads: str) -> ConfigError:
        return ConfigError(self.key, f"must be {self.off} {where}, got {self.value}; {remedy}", reads)


def gpu_rules(cfg: RunConfig, computes: Computes | None) -> Iterator[ConfigError]:
    """What is asked for and cannot be done.

    Args:
        cfg: trainer.precision=auto counts as bf16, which it is on GPUs that can do any of this.
        computes: None where that is not known.
    """
    yield from _together(cfg)
    for option in _given(cfg):
        if not cfg.model.optim.use_distributed_optimizer:
            yield option.refused(f"with {_SHARDED}=false", f"set {_SHARDED}=true", _SHARDED)
        if computes is not None and not computes.on_gpu:
            yield option.refused("on the CPU", "use a GPU, or leave it out", "trainer.accelerator")
            continue
        if PRECISIONS[cfg.trainer.precision] == "32":
            remedy = "use trainer.precision=bf16, on a GPU that has it"
            yield option.refused("with trainer.precision=32", remedy, "trainer.precision")
        if computes is not None and (computes.engine is None or computes.engine < OLDEST_ENGINE):
            found = "none" if computes.engine is None else ".".join(map(str, computes.engine))
            where = f"without Transformer Engine {OLDEST_ENGINE[0]}.{OLDEST_ENGINE[1]} or newer (here: {found})"
            yield option.refused(where, "install transformer-engine[pytorch] (docs/gpu/README.md)")


def computes_here(*, on_gpu: bool) -> Computes:
    """What this machine has; neither torch's CUDA nor Transformer Engine is started for it."""
    return Computes(on_gpu=on_gpu, engine=transformer_engine_version() if on_gpu else None)


def check_gpu(cfg: RunConfig) -> None:
    """The same rules on a rank, which knows its precision.

    Raises:
        UserError: what is asked for cannot be done; all of it.
    """
    if broken := list(gpu_rules(cfg, computes_here(on_gpu=device.on_gpu()))):
        raise UserError("\n  ".join(["nothing was started:", *map(str, broken)]))


def _given(cfg: RunConfig) -> Iterator[_Option]:
    optim = cfg.model.optim
    if optim.moments_dtype != "fp32":
        yield _Option("model.optim.moments_dtype", optim.moments_dtype, "fp32")
    if optim.offload_fraction:
        yield _Option(_OFFLOAD, optim.offload_fraction, "0")


def _together(cfg: RunConfig) -> Iterator[ConfigError]:
    """What is refused beside something else, wherever it computes."""
    optim = cfg.model.optim
    if optim.offload_fraction and optim.moments_dtype != "fp32":
        text = f"must be fp32 with {_OFFLOAD} above 0, got {optim.moments_dtype}; set one or the other"
        yield ConfigError("model.optim.moments_dtype", text, (_OFFLOAD,))
