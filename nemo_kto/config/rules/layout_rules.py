"""Rules for the parallel layout (ranks, pipeline stages, experts), and for GPUs and the packages that use them."""

from __future__ import annotations

import importlib
import importlib.metadata
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from nemo_kto.architecture.base_format import width_problem
from nemo_kto.architecture.families import ExpertFields, Family
from nemo_kto.architecture.lora import NEMO_TARGETS, LoRASettings, has_adaptable_experts
from nemo_kto.architecture.stages import ONE_STAGE, PipelineSplit, SplitError
from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.config.schema import GPTConfig
from nemo_kto.device import device, environment
from nemo_kto.device.precision import FP8_MULTIPLE, PRECISIONS
from nemo_kto.errors import ConfigError, UserError, either
from nemo_kto.model_files.checkpoint_files import is_checkpoint

Errors = Iterator[ConfigError]
_MODEL = "pretrained_checkpoint.restore_from_path"
_STAGES, _TENSOR = "model.pipeline_model_parallel_size", "model.tensor_model_parallel_size"
_CONTEXT, _RANKS = "model.context_parallel_size", ("trainer.devices", "trainer.num_nodes")
_EXPERT, _EXPERT_TENSOR = "model.expert_model_parallel_size", "model.expert_tensor_parallel_size"
_SCHEME, _ADAPTER = "model.peft.peft_scheme", "model.peft.restore_from_path"
_TARGETS, _SELECTION = "model.peft.lora_tuning.target_modules", "model.peft.lora_tuning.layer_selection"
_SHARDED, _INSTANCES = "model.optim.use_distributed_optimizer", "model.optim.num_distributed_optimizer_instances"
_RECOMPUTE = "model.activations_checkpoint"
# Attribute of PipelineSplit -> the key that sets it.
_KEYS = {
    "stages": _STAGES,
    "chunks": "model.virtual_pipeline_model_parallel_size",
    "first": "model.num_layers_in_first_pipeline_stage",
    "last": "model.num_layers_in_last_pipeline_stage",
    "counts_embedding": "model.account_for_embedding_in_pipeline_split",
    "counts_loss": "model.account_for_loss_in_pipeline_split",
}


def rank_rules(run: ResolvedRun, ranks: int) -> Errors:
    """Check that the number of ranks, the parallel sizes and the batch size fit together."""
    model = run.cfg.model
    names = ["tensor_model_parallel_size", "pipeline_model_parallel_size"]
    names += ["context_parallel_size"] * (model.context_parallel_size > 1)
    keys, sizes = tuple(f"model.{name}" for name in names), [getattr(model, name) for name in names]
    one_model = math.prod(sizes)
    if ranks % one_model:
        product = f"{' * '.join(names[1:])} = {' * '.join(map(str, sizes))} = {one_model}"
        text = f"* {product} must divide the number of ranks, got {ranks}"
        remedy = f"use a multiple of {one_model} ranks (trainer.devices) or smaller sizes"
        yield ConfigError(keys[0], f"{text}; {remedy}", (*keys, *_RANKS))
    elif model.global_batch_size % (step := (model.micro_batch_size or 1) * (ranks // one_model)):
        product = f"the number of data-parallel ranks = {step}"
        if model.micro_batch_size is not None:
            product = f"micro_batch_size * data-parallel ranks = {model.micro_batch_size} * {ranks // one_model} = {step}"
        below = model.global_batch_size // step * step
        near = f"{below} or {below + step}" if below else f"{step}"
        text = f"must be divisible by {product}, got {model.global_batch_size}; use {near}"
        yield ConfigError("model.global_batch_size", text, ("model.micro_batch_size", *keys, *_RANKS))
    # The ranks of each pipeline stage hold complete copies of the experts in a layer.
    stages, shards = model.pipeline_model_parallel_size, model.expert_tensor_parallel_size
    shards = model.tensor_model_parallel_size if shards is None else shards
    one_copy = model.expert_model_parallel_size * shards
    if ranks % (model.tensor_model_parallel_size * stages) == 0 and ranks // stages % one_copy:
        factors = f"{model.expert_model_parallel_size} * {shards} = {one_copy}"
        text = f"* expert_tensor_parallel_size = {factors} must divide the ranks of a pipeline stage, got {ranks // stages}"
        remedy = "use more ranks (trainer.devices) or smaller sizes"
        yield ConfigError(_EXPERT, f"{text}; {remedy}", (_STAGES, _EXPERT_TENSOR, _TENSOR, *_RANKS))
    yield from _instance_rules(model, ranks, one_copy)
    if model.sequence_parallel and model.tensor_model_parallel_size == 1:
        text = f"must be false with {_TENSOR}=1, got true; set model.sequence_parallel=false, or raise {_TENSOR}"
        yield ConfigError("model.sequence_parallel", text, (_TENSOR,))
    for name in ("reset_attention_mask", "eod_mask_loss"):
        if getattr(model.data, name):
            text = "must be false, got true; a row is one prompt with one answer, not several documents in one sequence"
            yield ConfigError(f"model.data.{name}", text)
    if model.context_parallel_size > 1 and model.data.share_prompts is True:
        value = f"{_CONTEXT}={model.context_parallel_size}"
        text = f"must be false or auto with {value}, got true; attention to shared prompts does not support both"
        yield ConfigError("model.data.share_prompts", text, (_CONTEXT,))


def _instance_rules(model: GPTConfig, ranks: int, expert_ranks: int) -> Errors:
    """Check the number of optimizer instances; ``expert_ranks``: ranks that hold one copy of a layer's experts."""
    instances = model.optim.num_distributed_optimizer_instances
    if instances == 1:
        return
    if not model.optim.use_distributed_optimizer:
        text = f"must be 1 with {_SHARDED}=false, got {instances}; set {_SHARDED}=true, or leave it out"
        yield ConfigError(_INSTANCES, text, (_SHARDED,))
    of_stage, rest = divmod(ranks, model.pipeline_model_parallel_size)
    copies = {
        "data-parallel ranks (times context_parallel_size)": model.tensor_model_parallel_size,
        "ranks with the same experts": expert_ranks,
    }
    for name, one_copy in copies.items():
        count, uneven = divmod(of_stage, one_copy)
        if not rest and not uneven and count % instances:
            text = f"must divide the number of {name} = {count}, got {instances}; use {divisor_below(count, instances)}"
            yield ConfigError(_INSTANCES, text, (_TENSOR, _STAGES, _CONTEXT, _EXPERT, _EXPERT_TENSOR, *_RANKS))
            return


def mixer_rules(run: ResolvedRun) -> Errors:
    """Check that tensor- and context-parallel ranks can divide the groups of heads of sequence mixers.

    Raises UserError if the architecture is needed and cannot be read.
    """
    model = run.cfg.model
    tensor, size = model.tensor_model_parallel_size, model.context_parallel_size
    if tensor == size == 1:
        return
    architecture = run.architecture
    for groups in {mixer.divided_heads(replace(architecture, tensor_parallel=1)) for mixer in architecture.mixers} - {0}:
        if tensor > groups:
            text = f"must be at most {groups}, the groups of heads in {architecture.family.name} layers, got {tensor}"
            remedy = f"use {groups}, and more pipeline stages ({_STAGES}), expert- or data-parallel ranks"
            yield ConfigError(_TENSOR, f"{text}: ranks without one would idle; {remedy}", (_MODEL,))
    for heads in {mixer.divided_heads(architecture) for mixer in architecture.mixers}:
        if heads % size:
            text = f"must divide the {heads} heads of a tensor-parallel rank's {architecture.family.name} layers"
            yield ConfigError(_CONTEXT, f"{text}, got {size}; use {divisor_below(heads, size)}", (_TENSOR,))


def pipeline_rules(run: ResolvedRun, layers: int | None) -> Errors:
    """Check the pipeline split of a model; ``layers`` is its number of layers, None if not known."""
    split = run.split
    changed = {name: getattr(split, name) for name in _KEYS if getattr(split, name) != getattr(ONE_STAGE, name)}
    ends = [_KEYS[name] for name in ("first", "last") if name in changed]
    counted = [_KEYS[name] for name in ("counts_embedding", "counts_loss") if name in changed]
    if split.stages == 1:
        for name, value in changed.items():
            off, got = "false" if isinstance(value, bool) else "null", str(value).lower()
            text = f"must be {off} with {_STAGES}=1, got {got}; set {_KEYS[name]}={off}, or raise {_STAGES} above 1"
            yield ConfigError(_KEYS[name], text, (_STAGES,))
    if split.stages > 1 and ends and counted:
        for key in counted:
            text = f"must be false if {' or '.join(ends)} is set, got true; set one or the other"
            yield ConfigError(key, text, tuple(ends))
    elif layers is not None and (split.stages > 1 or not changed):
        yield from _layer_rules(run, layers)


def _layer_rules(run: ResolvedRun, layers: int) -> Errors:
    """Check that the layers can be partitioned across pipeline stages, and into groups that are recomputed together."""
    split, keys = run.split, (_MODEL, *_KEYS.values())
    try:
        stages = split.layers(layers)
    except SplitError as error:
        key, got = _KEYS[error.name], getattr(split, error.name)
        text = f"{error.constraint} of {run.files.source}, got {got}; {_split_remedy(split, error.name, layers)}"
        yield ConfigError(key, text, tuple(other for other in keys if other != key))
        return
    # megatron-core forms groups of equal size within a chunk.
    sizes, group = sorted({len(chunk) for stage in stages for chunk in stage} - {0}), run.recompute_num_layers
    if run.recompute_method == "uniform" and group and any(size % group for size in sizes):
        fitting = max(number for number in range(1, group) if not any(size % number for size in sizes))
        text = f"must divide the number of layers of each model chunk ({' and '.join(map(str, sizes))}), got {group}"
        yield ConfigError(f"{_RECOMPUTE}_num_layers", f"{text}; use {fitting}", (f"{_RECOMPUTE}_method", *keys))


def _split_remedy(split: PipelineSplit, name: str, layers: int) -> str:
    """Return the nearest valid values of the field ``name``; for the number of stages, also other ends of the pipeline."""

    def fits(**changes: Any) -> bool:
        return replace(split, **changes).fits(layers)

    value = getattr(split, name)
    fitting = [other for other in range(1, layers + 1) if fits(**{name: other})]
    below, above = [other for other in fitting if other < value][-1:], [other for other in fitting if other > value][:1]
    words = ["null" if name == "chunks" and other == 1 else str(other) for other in below]
    words += map(str, above if name in ("first", "last") else ())
    if name == "stages":
        counted = [end for end in ("counts_embedding", "counts_loss") if getattr(split, end)]
        words += [f"{_KEYS[end]}=false" for end in counted if fits(**{end: False})]
        if not counted:
            average = layers / split.stages
            last_sizes = [last for last in range(1, layers) if fits(last=last)]
            # Sizes below the average first, because the last stage also computes the loss.
            nearest = sorted(last_sizes, key=lambda last: (last > average, abs(last - average)))
            words += [f"{_KEYS['last']}={last}" for last in nearest[:1]]
    return f"use {', or '.join(words)}" if words else "choose another number of stages"


def expert_rules(run: ResolvedRun, config: Mapping[str, Any], family: Family) -> Errors:
    """Check the settings for experts against the content of config.json and the family that it names."""
    model, source, fields = run.cfg.model, run.files.source, family.experts_of(config)
    if fields is None:
        for key, (off, text) in {
            _EXPERT: (1, "1"),
            _EXPERT_TENSOR: (None, "null"),
            "model.moe_aux_loss_coeff": (0, "0.0"),
        }.items():
            if (value := getattr(model, key.removeprefix("model."))) != off:
                got = f"got {value} with {source} ({family.name})"
                yield ConfigError(key, f"must be {text} for a model without experts, {got}; leave it out", (_MODEL,))
        return
    number, parallel = config.get(fields.number), model.expert_model_parallel_size
    if number is not None and number % parallel:
        text = f"must divide the {number} experts of {source}, got {parallel}; use {divisor_below(number, parallel)}"
        yield ConfigError(_EXPERT, text, (_MODEL,))
    tensor, shards = model.tensor_model_parallel_size, model.expert_tensor_parallel_size
    key, shards = (_TENSOR, tensor) if shards is None else (_EXPERT_TENSOR, shards)
    name, width = fields.ffn_hidden_size, config.get(fields.ffn_hidden_size)
    if width is not None and width % shards:
        remedy = f"use {_EXPERT_TENSOR}={divisor_below(width, shards)}"
        yield ConfigError(key, f"must divide {name} = {width} of {source}, got {shards}; {remedy}", (_MODEL, _EXPERT_TENSOR))
    if tensor > 1 and not model.sequence_parallel:
        text = f"must be true for a mixture-of-experts model with {_TENSOR}={tensor}, got false; set it"
        yield ConfigError("model.sequence_parallel", text, (_TENSOR, _MODEL))
    if model.fp8 is not None:
        text = "must be null for a mixture-of-experts model, because the number of tokens of an expert varies"
        yield ConfigError("model.fp8", f"{text}, got {model.fp8}; leave it out", (_MODEL,))
    try:
        adapters = run.adapters
    except ValueError:
        return  # reported by the check of the adapters
    modules = [] if adapters is None else [name for name in adapters.modules if name in NEMO_TARGETS["mlp"]]
    has_adapted_experts = adapters is not None and adapters.experts and bool(modules) and has_adaptable_experts(family)
    if has_adapted_experts:
        yield from _adapted_expert_rules(run, modules, shards)
    if adapters is None or has_adapted_experts:
        yield from _trained_expert_rules(run, config, fields, adapters)


def _adapted_expert_rules(run: ResolvedRun, modules: list[str], shards: int) -> Errors:
    if shards > 1:
        text = f"must be 1 with adapters on experts ({', '.join(modules)}), which cannot be sharded, got {shards}; set it"
        remedy = f"or leave the experts out: {_TARGETS}=[all-linear]"
        yield ConfigError(_EXPERT_TENSOR, f"{text}, {remedy}", (_SCHEME, _TARGETS, _ADAPTER, _TENSOR, _MODEL))
    if run.files.adapter_folder is None and len({"gate_proj", "up_proj"}.intersection(modules)) == 1:
        got = ", ".join(run.cfg.model.peft.lora_tuning.target_modules)
        text = "must include both gate_proj and up_proj for a mixture-of-experts model, because peft has both in one tensor"
        yield ConfigError(_TARGETS, f"{text}, got {got}; use mlp_fc1 for both", (_SCHEME, _MODEL))


def _trained_expert_rules(
    run: ResolvedRun, config: Mapping[str, Any], fields: ExpertFields, adapters: LoRASettings | None
) -> Errors:
    """Check that all pipeline stages train experts, or none: the experts' gradient norm is summed over all stages."""
    layers, split = config.get("num_hidden_layers"), run.split
    if layers is None or not split.fits(layers):
        return
    trained = fields.layers(config, layers)
    if adapters is not None and adapters.layers is not None:
        trained &= {number - 1 for number in adapters.layers}
    stages = [{layer for chunk in stage for layer in chunk} for stage in split.layers(layers)]
    without = [number for number, of_stage in enumerate(stages, start=1) if trained.isdisjoint(of_stage)]
    if without and trained:
        kind = "experts" if adapters is None else "adapted experts"
        text = f"must leave layers with {kind} on every stage, got {split.stages}: stage {without[0]} has none"
        yield ConfigError(_STAGES, f"{text}; use fewer stages", (_SCHEME, _TARGETS, _ADAPTER, _SELECTION, _MODEL))


def divisor_below(number: int, limit: int) -> int:
    """Return the largest divisor of ``number`` that does not exceed ``limit``."""
    return next(divisor for divisor in range(min(number, limit), 0, -1) if number % divisor == 0)


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
_OFFLOAD, _MOMENTS, _FP8 = "model.optim.offload_fraction", "model.optim.moments_dtype", "model.fp8"
_QUANTIZE = "model.quantize"
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


def gpu_rules(run: ResolvedRun, computes: Computes | None) -> Errors:
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


def model_gpu_rules(run: ResolvedRun, computes: Computes) -> Errors:
    """Find all options that hardware, software or the model's architecture do not support.

    Raises UserError if the architecture is needed and cannot be read.
    """
    yield from gpu_rules(run, computes)
    yield from _fp8_rules(run)
    yield from quantize_rules(run)
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


def _deterministic_rules(run: ResolvedRun) -> Errors:
    """Find what has no deterministic kernel on a GPU, and environment variables that ask for others."""
    for name, values in environment.DETERMINISTIC.items():
        if (value := os.environ.get(name)) is not None and value not in values:
            yield ConfigError(name, f"must be {either(values)} with {_DETERMINISTIC}=true, got {value}; unset it")
    # torch has no deterministic cumulative sum on GPUs; fla and mamba_ssm choose among kernels by timing
    if not all(mixer.deterministic for mixer in run.architecture.mixers):
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


def _fp8_rules(run: ResolvedRun) -> Errors:
    """Check that the model's layers and the sizes of a rank's matrices support fp8."""
    if run.cfg.model.fp8 is None:
        return
    from nemo_kto.architecture.parameters import rank_parameters

    architecture, got = run.architecture, f"got {run.cfg.model.fp8}"
    if architecture.unsupported_by_te:
        parts = f"{' and '.join(architecture.unsupported_by_te)} ({architecture.family.name})"
        text = f"must be null for a model with {parts}, which Transformer Engine's layers lack, {got}; leave it out"
        yield ConfigError(_FP8, text, ("pretrained_checkpoint.restore_from_path", _QUANTIZE))
        return
    matrices = [each for each in rank_parameters(architecture) if each.is_multiplied]
    odd = [each for each in matrices if any(size % FP8_MULTIPLE for size in each.shape)]
    if odd:
        shape = f"{odd[0].names[0]} is {' x '.join(map(str, odd[0].shape))}"
        text = f"must be null if a size of a rank's matrices is not a multiple of {FP8_MULTIPLE}, {got} and {shape}"
        remedy = f"leave it out, or use another model.tensor_model_parallel_size than {architecture.tensor_parallel}"
        yield ConfigError(_FP8, f"{text}; {remedy}", ("model.tensor_model_parallel_size",))


def quantize_rules(run: ResolvedRun) -> Errors:
    """Check that the base model can be quantized: only adapters are trained, it is one model, and blocks divide its rows."""
    if (value := run.cfg.model.quantize) is None:
        return
    if not run.has_adapters:
        text = f"must be null if all weights are trained, got {value}; leave it out, or set {_SCHEME}=lora"
        yield ConfigError(_QUANTIZE, text, (_SCHEME,))
        return
    if (other := run.reference_model) is not None:  # it would be quantized too, and adapters cannot be merged into it
        text = f"must be null if the reference is another model, got {value} and {other}; leave out one of the two"
        yield ConfigError(_QUANTIZE, text, ("model.reference.restore_from_path",))
    if is_checkpoint(base := run.files.own.base):
        text = f"must be null if the base model is a checkpoint, got {value} and {base}"
        yield ConfigError(_QUANTIZE, f"{text}; export it first: nemo-kto export {base} FOLDER", (_MODEL,))
    if (problem := width_problem(run.architecture)) is not None:
        sizes = ", or another tensor-parallel size" * (run.architecture.tensor_parallel > 1)
        text = f"must be null if blocks do not divide the weights of a rank, got {value}: {problem}"
        yield ConfigError(_QUANTIZE, f"{text}; leave it out{sizes}", (_MODEL, _TENSOR, _EXPERT_TENSOR))
