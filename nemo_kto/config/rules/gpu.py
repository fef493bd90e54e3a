"""Rules for GPUs and the packages that use them."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from nemo_kto.artifacts.checkpoint_files import config_folder
from nemo_kto.config.schema import RunConfig
from nemo_kto.device import device
from nemo_kto.device.precision import FP8_MULTIPLE, PRECISIONS
from nemo_kto.errors import ConfigError, UserError


def check_transformer_engine() -> None:
    """Check that Transformer Engine, which is optional, can be imported; do nothing on the CPU.

    The check comes before the import by megatron-core, which would fail with a traceback. On an ImportError, megatron-core
    falls back to its own layers. Transformer Engine raises other errors if it is the empty shell that
    `pip install transformer-engine` installs, or if its parts have different versions.

    Raises:
        UserError: If Transformer Engine is installed and cannot be imported.
    """
    if not device.on_gpu():
        return
    try:
        importlib.import_module("transformer_engine")
    except ImportError:
        return
    except Exception as error:
        found = f"{type(error).__name__}: {str(error).strip().split('. ')[0]}"
        raise UserError(
            f"Transformer Engine must be complete or absent, got a package that cannot be imported ({found}); remove it "
            "with pip uninstall transformer-engine, or install what fits this torch: "
            "pip install --no-build-isolation 'nemo-kto[gpu]' (docs/gpu/README.md)"
        ) from error


def transformer_engine_version() -> tuple[int, int] | None:
    """Return the version of the installed Transformer Engine, such as (2, 9), without importing it; None if absent."""
    try:
        found = re.match(r"(\d+)\.(\d+)", importlib.metadata.version("transformer-engine"))
    except importlib.metadata.PackageNotFoundError:
        return None
    return (int(found[1]), int(found[2])) if found else None


OLDEST_ENGINE = (2, 3)  # first Transformer Engine whose fused Adam supports moments in bf16; fp8 works from 2.2 on
_FP8_CAPABILITY = (8, 9)  # NVIDIA Ada; Hopper is 9.0
_SHARDED, _OFFLOAD = "model.optim.use_distributed_optimizer", "model.optim.offload_fraction"


@dataclass(frozen=True, kw_only=True)
class Computes:
    """The hardware and software that a run computes with.

    Attributes:
        on_gpu: whether the run uses GPUs.
        engine: version of Transformer Engine; None if absent.
        capability: CUDA compute capability of the GPU; None if not known yet.
    """

    on_gpu: bool
    engine: tuple[int, int] | None
    capability: tuple[int, int] | None = None


class _Option(NamedTuple):
    """An option that was set to a value other than off.

    Attributes:
        key: the key of the option.
        value: the value given.
        off: the value that turns the option off.
        sharded: whether the option needs sharded optimizer state.
    """

    key: str
    value: object
    off: str
    sharded: bool = True

    def refused(self, where: str, remedy: str, *reads: str) -> ConfigError:
        return ConfigError(self.key, f"must be {self.off} {where}, got {self.value}; {remedy}", reads)


def gpu_rules(cfg: RunConfig, computes: Computes | None) -> Iterator[ConfigError]:
    """Find options that the hardware or software does not support.

    Args:
        cfg: trainer.precision=auto counts as bf16, which it is on every GPU that supports any of these options.
        computes: None if not known.
    """
    yield from _together(cfg)
    for option in _given(cfg):
        if option.sharded and not cfg.model.optim.use_distributed_optimizer:
            yield option.refused(f"with {_SHARDED}=false", f"set {_SHARDED}=true", _SHARDED)
        if computes is not None and not computes.on_gpu:
            yield option.refused("on the CPU", "use a GPU, or leave it out", "trainer.accelerator")
            continue
        if PRECISIONS[cfg.trainer.precision] == "32":
            remedy = "use trainer.precision=bf16, on a GPU that has it"
            yield option.refused("with trainer.precision=32", remedy, "trainer.precision")
        if computes is not None and (computes.engine is None or computes.engine < OLDEST_ENGINE):
            found = "none" if computes.engine is None else _version(computes.engine)
            where = f"without Transformer Engine {_version(OLDEST_ENGINE)} or newer (here: {found})"
            yield option.refused(where, "install transformer-engine[pytorch] (docs/gpu/README.md)")
        if option.key == "model.fp8" and computes is not None and (computes.capability or _FP8_CAPABILITY) < _FP8_CAPABILITY:
            assert computes.capability is not None
            where = f"on a GPU of compute capability {_version(computes.capability)}"
            yield option.refused(where, f"use one of {_version(_FP8_CAPABILITY)} or more, or leave it out")


def computes_here(*, on_gpu: bool) -> Computes:
    """Return what this machine computes with, without initializing CUDA or importing Transformer Engine."""
    return Computes(on_gpu=on_gpu, engine=transformer_engine_version() if on_gpu else None)


def check_gpu(cfg: RunConfig) -> None:
    """Check the rules on a rank, where precision, GPU, importable packages and sizes of the model are known.

    Raises:
        UserError: If options are not supported; the message lists all of them.
    """
    from nemo_kto.device.dtypes import DTYPES
    from nemo_kto.device.kernels import uses_transformer_engine

    works = uses_transformer_engine(DTYPES["bf16"])  # it may be installed and fail to import
    computes = Computes(
        on_gpu=device.on_gpu(),
        engine=transformer_engine_version() if works else None,
        capability=device.compute_capability() if device.on_gpu() else None,
    )
    if broken := [*gpu_rules(cfg, computes), *fp8_model(cfg), *packed_windows(cfg, computes)]:
        raise UserError("\n  ".join(["nothing was started:", *map(str, broken)]))


def fp8_model(cfg: RunConfig) -> Iterator[ConfigError]:
    """Check that the model's layers and the sizes of a rank's matrices support fp8; reads config.json."""
    if cfg.model.fp8 is None:
        return
    from nemo_kto.architecture.architecture import read_architecture
    from nemo_kto.architecture.parameters import rank_parameters

    tensor, folder = cfg.model.tensor_model_parallel_size, config_folder(Path(cfg.pretrained_checkpoint.restore_from_path))
    architecture = read_architecture(folder, tensor_parallel=tensor)
    if architecture.unsupported_by_te:
        parts = f"{' and '.join(architecture.unsupported_by_te)} ({architecture.family.name})"
        text = f"must be null for a model with {parts}, which Transformer Engine's layers lack, got {cfg.model.fp8}"
        yield ConfigError("model.fp8", f"{text}; leave it out", ("pretrained_checkpoint.restore_from_path",))
        return
    matrices = [each for each in rank_parameters(architecture) if each.is_multiplied]
    odd = [each for each in matrices if any(size % FP8_MULTIPLE for size in each.shape)]
    if odd:
        shape = " x ".join(map(str, odd[0].shape))
        text = (
            f"must be null where a size of a rank's matrices is no multiple of {FP8_MULTIPLE}, got {cfg.model.fp8} with "
            f"{odd[0].name} of {shape}; leave it out, or use another model.tensor_model_parallel_size than {tensor}"
        )
        yield ConfigError("model.fp8", text, ("model.tensor_model_parallel_size",))


def packed_windows(cfg: RunConfig, computes: Computes) -> Iterator[ConfigError]:
    """Check that Transformer Engine supports packed sequences with context parallelism and the model's windows.

    Reads the model's configuration.
    """
    model, in_engine = cfg.model, computes.engine is not None and PRECISIONS[cfg.trainer.precision] != "32"
    if model.context_parallel_size == 1 or not model.data.packing or not in_engine:
        return
    from nemo_kto.architecture.architecture import read_architecture

    architecture = read_architecture(config_folder(Path(cfg.pretrained_checkpoint.restore_from_path)), tensor_parallel=1)
    if any(window is not None for window in architecture.windows) and not architecture.unsupported_by_te:
        text = "must be false with model.context_parallel_size above 1 where layers have a sliding window, got true"
        remedy = "Transformer Engine cannot do all three; leave one out"
        yield ConfigError("model.data.packing", f"{text}; {remedy}", ("model.context_parallel_size",))


def _version(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))


def _given(cfg: RunConfig) -> Iterator[_Option]:
    model, optim = cfg.model, cfg.model.optim
    if optim.moments_dtype != "fp32":
        yield _Option("model.optim.moments_dtype", optim.moments_dtype, "fp32")
    if optim.offload_fraction:
        yield _Option(_OFFLOAD, optim.offload_fraction, "0")
    if model.fp8 is not None:
        yield _Option("model.fp8", model.fp8, "null", sharded=False)


def _together(cfg: RunConfig) -> Iterator[ConfigError]:
    """Check for combinations of options that are unsupported on all hardware."""
    optim = cfg.model.optim
    if optim.offload_fraction and optim.moments_dtype != "fp32":
        text = f"must be fp32 with {_OFFLOAD} above 0, got {optim.moments_dtype}; set one or the other"
        yield ConfigError("model.optim.moments_dtype", text, (_OFFLOAD,))
