"""Rules for GPUs and the packages that use them."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.config.rules.layout_rules import mixer_rules
from nemo_kto.device import device, environment
from nemo_kto.device.precision import FP8_MULTIPLE, PRECISIONS
from nemo_kto.errors import ConfigError, UserError, either


def check_transformer_engine() -> None:
    """Raise UserError if Transformer Engine is installed and cannot be imported; do nothing on the CPU.

    Importing megatron-core would fail with a traceback: it handles an ImportError, but Transformer Engine raises others if
    it is the empty shell that `pip install transformer-engine` installs, or if its parts have different versions.
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
            "pip install --no-build-isolation 'nemo-kto[gpu]' (docs/gpu/transformer-engine.md)"
        ) from error


def transformer_engine_version() -> tuple[int, int] | None:
    """Return the version of the installed Transformer Engine, such as (2, 9), without importing it; None if absent."""
    try:
        found = re.match(r"(\d+)\.(\d+)", importlib.metadata.version("transformer-engine"))
    except importlib.metadata.PackageNotFoundError:
        return None
    return (int(found[1]), int(found[2])) if found else None


OLDEST_ENGINE = (2, 3)  # oldest Transformer Engine for fp8
_FP8_CAPABILITY = (8, 9)  # NVIDIA Ada; Hopper is 9.0
_SHARDED, _OFFLOAD = "model.optim.use_distributed_optimizer", "model.optim.offload_fraction"
_MOMENTS, _FP8 = "model.optim.moments_dtype", "model.fp8"
_REDUCE = "model.optim.grad_reduce_in_fp32"
_DETERMINISTIC = "trainer.deterministic"
_SUMMANDS = "model.logprob_gradient_summands"


@dataclass(frozen=True, kw_only=True)
class Computes:
    """The hardware and software that a run computes with."""

    on_gpu: bool
    engine: tuple[int, int] | None  # version of Transformer Engine; None if absent
    capability: tuple[int, int] | None = None  # CUDA compute capability of the GPU; None if not known yet


def computes_here(*, on_gpu: bool) -> Computes:
    """Return what this machine computes with, without initializing CUDA or importing Transformer Engine."""
    return Computes(on_gpu=on_gpu, engine=transformer_engine_version() if on_gpu else None)


def check_gpu(run: ResolvedRun) -> None:
    """Check the rules on a rank, where precision, GPU and importable packages are known; raise UserError with all errors."""
    from nemo_kto.device.kernels import uses_transformer_engine
    from nemo_kto.device.precision import dtype_of

    works = uses_transformer_engine(dtype_of("bf16"))  # it may be installed and fail to import
    computes = Computes(
        on_gpu=device.on_gpu(),
        engine=transformer_engine_version() if works else None,
        capability=device.compute_capability() if device.on_gpu() else None,
    )
    if errors := list(model_gpu_rules(run, computes)):
        raise UserError("\n  ".join(["nothing was started:", *map(str, errors)]))


def gpu_rules(run: ResolvedRun, computes: Computes | None) -> Iterator[ConfigError]:
    """Find options that hardware or software (``computes``, None if not known) does not support; the model is not read.

    trainer.precision=auto counts as bf16, which it is on every GPU that supports any of these options.
    """
    model, optim = run.cfg.model, run.cfg.model.optim
    if optim.offload_fraction and optim.moments_dtype != "fp32":
        text = f"must be fp32 with {_OFFLOAD} above 0, got {optim.moments_dtype}; set one or the other"
        yield ConfigError(_MOMENTS, text, (_OFFLOAD,))
    if model.reference.device == "gpu" and computes is not None and not computes.on_gpu:
        text = "must be auto or cpu on the CPU, got gpu; use a GPU, or leave it out"
        yield ConfigError("model.reference.device", text, ("trainer.accelerator",))
    if optim.moments_dtype != "fp32" and not optim.use_distributed_optimizer:
        yield _refused(_MOMENTS, "fp32", optim.moments_dtype, f"with {_SHARDED}=false", f"set {_SHARDED}=true", _SHARDED)
    if not optim.grad_reduce_in_fp32 and PRECISIONS[run.cfg.trainer.precision] == "32":
        remedy = "leave it out, or use trainer.precision=bf16"
        yield _refused(_REDUCE, "true", "false", "with trainer.precision=32", remedy, "trainer.precision")
    options = {
        _OFFLOAD: (optim.offload_fraction or "0", "0"),
        _FP8: (model.fp8, "null"),
        _SUMMANDS: (model.logprob_gradient_summands, 1),
    }
    for key, (value, off) in options.items():
        if value in (None, off):
            continue
        refused = partial(_refused, key, off, value)
        if key == _OFFLOAD and not optim.use_distributed_optimizer:
            yield refused(f"with {_SHARDED}=false", f"set {_SHARDED}=true", _SHARDED)
        if computes is not None and not computes.on_gpu:
            yield refused("on the CPU", "use a GPU, or leave it out", "trainer.accelerator")
            continue
        if PRECISIONS[run.cfg.trainer.precision] == "32":
            remedy = "use trainer.precision=bf16, on a GPU that has it"
            yield refused("with trainer.precision=32", remedy, "trainer.precision")
        if key == _FP8 and computes is not None and (computes.engine is None or computes.engine < OLDEST_ENGINE):
            found = "none" if computes.engine is None else _version(computes.engine)
            where = f"without Transformer Engine {_version(OLDEST_ENGINE)} or newer (found: {found})"
            yield refused(where, "install transformer-engine[pytorch] (docs/gpu/transformer-engine.md)")
        capability = None if computes is None else computes.capability
        if key == _FP8 and capability is not None and capability < _FP8_CAPABILITY:
            where = f"on a GPU of compute capability {_version(capability)}"
            yield refused(where, f"use one of {_version(_FP8_CAPABILITY)} or more, or leave it out")


def _refused(key: str, off: object, value: object, where: str, remedy: str, *reads: str) -> ConfigError:
    return ConfigError(key, f"must be {off} {where}, got {value}; {remedy}", reads)


def _version(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))


def model_gpu_rules(run: ResolvedRun, computes: Computes) -> Iterator[ConfigError]:
    """Find all options that hardware, software or the model's architecture do not support.

    Raises UserError if the architecture is needed and cannot be read.
    """
    yield from gpu_rules(run, computes)
    yield from _fp8_rules(run)
    yield from mixer_rules(run)
    if run.cfg.trainer.deterministic and computes.on_gpu:
        yield from _deterministic_rules(run)
    model = run.cfg.model
    uses_engine = computes.engine is not None and PRECISIONS[run.cfg.trainer.precision] != "32"
    if model.context_parallel_size > 1 and model.data.packing is True and uses_engine:
        architecture = run.architecture
        if any(window is not None for window in architecture.windows) and not architecture.unsupported_by_te:
            text = (
                "must be false or auto with model.context_parallel_size above 1 and layers with a sliding window, got true"
            )
            remedy = "Transformer Engine cannot combine the three; leave one out"
            yield ConfigError("model.data.packing", f"{text}; {remedy}", ("model.context_parallel_size",))


def _deterministic_rules(run: ResolvedRun) -> Iterator[ConfigError]:
    """Find what has no deterministic kernel on a GPU, and environment variables that ask for others."""
    for name, values in environment.DETERMINISTIC.items():
        if (value := os.environ.get(name)) is not None and value not in values:
            yield ConfigError(name, f"must be {either(values)} with {_DETERMINISTIC}=true, got {value}; unset it")
    # torch has no deterministic cumulative sum on GPUs; fla and mamba_ssm choose among kernels by timing
    if any(mixer.divided_heads(run.architecture) for mixer in run.architecture.mixers):
        text = (
            f"must be false on a GPU for {run.architecture.family.name}, whose recurrent layers have no deterministic kernel"
        )
        yield ConfigError(_DETERMINISTIC, f"{text}, got true; leave it out", ("pretrained_checkpoint.restore_from_path",))
    samples = run.cfg.exp_manager.samples
    if samples.enabled and samples.temperature:
        text = f"must be 0.0 on a GPU with {_DETERMINISTIC}=true, because tokens are drawn with a cumulative sum"
        remedy = "set one or the other"
        yield ConfigError(
            "exp_manager.samples.temperature", f"{text}, got {samples.temperature}; {remedy}", (_DETERMINISTIC,)
        )


def _fp8_rules(run: ResolvedRun) -> Iterator[ConfigError]:
    """Check that the model's layers and the sizes of a rank's matrices support fp8."""
    if run.cfg.model.fp8 is None:
        return
    from nemo_kto.architecture.parameters import rank_parameters

    architecture, got = run.architecture, f"got {run.cfg.model.fp8}"
    if architecture.unsupported_by_te:
        parts = f"{' and '.join(architecture.unsupported_by_te)} ({architecture.family.name})"
        text = f"must be null for a model with {parts}, which Transformer Engine's layers lack, {got}; leave it out"
        yield ConfigError(_FP8, text, ("pretrained_checkpoint.restore_from_path",))
        return
    matrices = [each for each in rank_parameters(architecture) if each.is_multiplied]
    odd = [each for each in matrices if any(size % FP8_MULTIPLE for size in each.shape)]
    if odd:
        shape = f"{odd[0].names[0]} is {' x '.join(map(str, odd[0].shape))}"
        text = f"must be null if a size of a rank's matrices is not a multiple of {FP8_MULTIPLE}, {got} and {shape}"
        remedy = f"leave it out, or use another model.tensor_model_parallel_size than {architecture.tensor_parallel}"
        yield ConfigError(_FP8, f"{text}; {remedy}", ("model.tensor_model_parallel_size",))
