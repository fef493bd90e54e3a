"""Facts that a run derives from its configuration and from the files of its model, each computed once."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from hydra.utils import instantiate
from pydantic import BaseModel

from nemo_kto.algorithms.callbacks import Callback
from nemo_kto.algorithms.duration import TrainerConfig
from nemo_kto.architecture.config_file import CONFIG, read_config_file
from nemo_kto.architecture.lora import LoRASettings, has_adaptable_experts, names_experts, with_other_layers
from nemo_kto.architecture.stages import PipelineSplit
from nemo_kto.config.schema import RunConfig
from nemo_kto.data.rows.data_sources import validation_names
from nemo_kto.device import device
from nemo_kto.errors import UserError, import_object
from nemo_kto.losses.metrics import metric_prefix
from nemo_kto.model_files.adapter_files import read_adapter_settings
from nemo_kto.model_files.checkpoint_files import CHECKPOINTS, INFO, is_checkpoint
from nemo_kto.model_files.hub import is_hub_name, local_folder
from nemo_kto.model_files.model_folders import ModelSource, find_source
from nemo_kto.model_files.safetensors_files import OUTPUT_WEIGHT, has_own_output
from nemo_kto.processes.ranks import World
from nemo_kto.utils.files import read_json

if TYPE_CHECKING:
    import torch

    from nemo_kto.architecture.architecture import Architecture
    from nemo_kto.architecture.families import Family

_MAX_DEFAULT_LENGTH = 2048


# Keys that name a model or adapters: a folder, or a model of the Hugging Face hub (model_files/hub.py).
MODEL_KEYS = ("pretrained_checkpoint.restore_from_path", "model.reference.restore_from_path", "model.peft.restore_from_path")
# Model settings of a layout -> their values without one. recipe=auto chooses them; all ranks must have the same.
LAYOUT_SETTINGS: Mapping[str, object] = {
    **dict.fromkeys((f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context", "expert_model")), 1),
    **dict.fromkeys(("virtual_pipeline_model_parallel_size", "expert_tensor_parallel_size")),
    **dict.fromkeys(f"num_layers_in_{end}_pipeline_stage" for end in ("first", "last")),
    **dict.fromkeys((f"account_for_{end}_in_pipeline_split" for end in ("embedding", "loss")), False),
    "sequence_parallel": False,
    **dict.fromkeys(f"activations_checkpoint_{name}" for name in ("granularity", "method", "num_layers")),
    **dict.fromkeys(("micro_batch_size", "micro_batch_tokens")),
}
Base = TypeVar("Base", bound=BaseModel)


def value_of(section: BaseModel, key: str) -> object:
    """Return the value of a key of a configuration."""
    return reduce(getattr, key.split("."), section)


def with_value(section: Base, key: str, value: object) -> Base:
    """Return the configuration with another value of a key, which is not validated."""
    name, _, rest = key.partition(".")
    return section.model_copy(update={name: with_value(getattr(section, name), rest, value) if rest else value})


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """Files of the model that a run starts from; each is read once, when it is first needed.

    Properties raise UserError if a file is missing or invalid.
    """

    source: Path  # a Hugging Face folder or one of our checkpoints
    adapter_folder: Path | None = None  # adapters in PEFT format to start from; ``source`` may also contain adapters
    tensor_parallel: int = 1  # the architecture is padded for this size and the next
    expert_tensor_parallel: int | None = None
    base_format: str | None = None  # format of frozen linear layers (``architecture.base_format``)
    has_weights: bool = True  # False for a hub model of which only configuration and tokenizer were downloaded

    @cached_property
    def is_checkpoint(self) -> bool:
        return is_checkpoint(self.source)

    @cached_property
    def hf_folder(self) -> Path:
        """Hugging Face folder with the model's configuration and tokenizer: the source, or ``hf`` in a checkpoint."""
        return self.source / "hf" if self.is_checkpoint else self.source

    @cached_property
    def config(self) -> tuple[dict[str, Any], Family]:
        """Content of config.json, and the family that it names."""
        return read_config_file(self.hf_folder)

    @cached_property
    def longest_sequence(self) -> tuple[str, int | None]:
        """Field of config.json that limits the sequence length, and its value in tokens; None if it is not set."""
        config, family = self.config
        return family.longest_sequence(config)

    @cached_property
    def has_own_output(self) -> bool:
        """Whether the files have an output weight other than the embedding, even if config.json ties the two."""
        if not self.has_weights or self.is_checkpoint:
            return False
        return has_own_output(self.source, self.config[1].prefixes)

    @cached_property
    def architecture(self) -> Architecture:
        """Architecture with the padding of the layout; tied only if the weights are. Imports transformers."""
        return replace(self._configured, tied=False) if self.unties_output else self._configured

    @cached_property
    def _configured(self) -> Architecture:
        from nemo_kto.architecture.architecture import read_architecture

        tensor, expert_tensor = self.tensor_parallel, self.expert_tensor_parallel
        read = read_architecture(self.hf_folder, tensor_parallel=tensor, expert_tensor_parallel=expert_tensor)
        return replace(read, base_format=self.base_format)

    @property
    def unties_output(self) -> bool:
        """Whether config.json ties the output layer to the embedding and the weights do not."""
        return self._configured.tied and self.has_own_output

    @property
    def output_line(self) -> dict[str, str]:
        """Line of a report about an output layer that is not as in config.json, by its label."""
        text = f"not tied to the embedding, because {OUTPUT_WEIGHT} has other values; tie_word_embeddings=true is ignored"
        return {"output layer": text} if self.unties_output else {}

    @property
    def attention_line(self) -> dict[str, str]:
        """Line of a report about a model whose indexer would choose among the keys of longer sequences, by its label."""
        config, family = self.config
        if not (name := family.chosen_keys):
            return {}
        text = f"to all keys, as a sequence has at most {name} = {config[name]:,} tokens; the indexer is not trained"
        return {"attention": text}

    @cached_property
    def largest_file(self) -> int:
        """Bytes of the largest file of weights; 0 if there is none."""
        return max((file.stat().st_size for file in self.source.glob("*.safetensors")), default=0)

    @cached_property
    def own(self) -> ModelSource:
        """Base model and adapters in the source itself."""
        return find_source(self.source)

    @cached_property
    def original(self) -> Path | None:
        """Folder with the weights that are not trained, or whose dtype is kept; None if the family has none.

        Raises UserError if it is the one that a checkpoint names, and does not exist.
        """
        base, needed = self.own.base, self.config[1].needs_original
        if not needed or not is_checkpoint(base):
            return base if needed else None
        name = read_json(base / INFO).get("original")
        if not os.path.isfile(Path(str(name)) / CONFIG):
            text = f"{base} must have its original model on this machine, whose untrained weights exports keep"
            raise UserError(f"{text}, but {INFO} names {name}; copy it there, or correct original in {INFO}")
        return Path(str(name))

    @cached_property
    def initial(self) -> ModelSource:
        """Source of the initial weights; adapters that exist before the run are also part of the reference."""
        return self.own if self.adapter_folder is None else replace(self.own, adapters=self.adapter_folder)

    @property
    def has_adapters(self) -> bool:
        """Whether the run starts from adapters, which the reference has too."""
        return self.adapter_folder is not None or bool(self.is_checkpoint and read_json(self.source / INFO).get("adapters"))


class ReferenceMode(NamedTuple):
    """Mode of the reference and why it was chosen."""

    name: str  # swap, adapter, cached or none
    reason: str


@dataclass(frozen=True, kw_only=True)
class ResolvedRun:
    """A configuration with all that follows from it and from the files of the model."""

    cfg: RunConfig
    files: ModelFiles
    gpus: int  # number of GPUs of this machine that the run may use
    precision_reason: str = "set by the user"  # why trainer.precision has its value
    length_reason: str = "set by the user"  # why model.data.seq_length has its value
    # Of a run whose memory is planned (see ``memory``); a run that is trained has them in a ``run.prepare.Placement``.
    row_tokens: float | None = None  # mean over the training rows, of all answers together; None before they are read
    micro_batch_tokens: int | None = None  # default of model.micro_batch_tokens on GPUs; None before it is chosen
    micro_batch_reason: str = ""
    reference_memory: str = ""  # memory of swapped weights, "gpu" or "cpu"; empty before it is chosen
    reference_memory_reason: str = ""

    @classmethod
    def of(cls, cfg: RunConfig, *, gpus: int | None = None, weights: bool = True) -> ResolvedRun:
        """Return the run of a configuration, with a default for the sequence length, for which config.json is read.

        ``gpus``: by default those of this machine. ``weights``: those of hub models were downloaded.
        """
        if gpus is None:
            gpus = 0 if cfg.trainer.accelerator == "cpu" else device.device_count()
        adapter = cfg.model.peft.restore_from_path
        files = ModelFiles(
            source=local_folder(cfg.pretrained_checkpoint.restore_from_path),
            adapter_folder=None if adapter is None else local_folder(adapter),
            tensor_parallel=cfg.model.tensor_model_parallel_size,
            expert_tensor_parallel=cfg.model.expert_tensor_parallel_size,
            base_format=cfg.model.quantize,
            has_weights=weights or not is_hub_name(cfg.pretrained_checkpoint.restore_from_path),
        )
        run = cls(cfg=cfg, files=files, gpus=gpus)
        return run if cfg.model.data.seq_length is not None else run.with_default_length()

    def with_default_length(self) -> ResolvedRun:
        length, reason = _MAX_DEFAULT_LENGTH, "the default"
        with contextlib.suppress(UserError):  # a model that cannot be read has its own error
            name, positions = self.files.longest_sequence
            if positions is not None and positions < length:
                length, reason = positions, f"{name} of the model"
        data = self.cfg.model.data.model_copy(update={"seq_length": length})
        return replace(self.with_model(data=data), length_reason=reason)

    def with_precision(self, precision: str, reason: str) -> ResolvedRun:
        return replace(self, cfg=with_value(self.cfg, "trainer.precision", precision), precision_reason=reason)

    def with_row_tokens(self, row_tokens: float) -> ResolvedRun:
        return replace(self, row_tokens=row_tokens)

    def with_micro_batch_tokens(self, tokens: int | None, reason: str) -> ResolvedRun:
        return replace(self, micro_batch_tokens=tokens, micro_batch_reason=reason)

    def with_reference_memory(self, name: str, reason: str) -> ResolvedRun:
        return replace(self, reference_memory=name, reference_memory_reason=reason)

    def with_model(self, **values: Any) -> ResolvedRun:
        """Return the same run with other values in the section ``model``; the model's files are not read again."""
        model = self.cfg.model.model_copy(update=values)
        return replace(self, cfg=self.cfg.model_copy(update={"model": model}))

    @property
    def local_ranks(self) -> int:
        """Number of ranks per machine that the configuration requests."""
        devices = self.cfg.trainer.devices
        return devices if isinstance(devices, int) else self.gpus or 1

    def world_size(self, world: World | None = None) -> int:
        """Return the number of ranks of the run: those of ``world`` if they were already started."""
        return self.cfg.trainer.num_nodes * self.local_ranks if world is None else world.size

    @cached_property
    def length(self) -> TrainerConfig:
        """Run length, and intervals of validation, checkpoints and log lines."""
        return TrainerConfig(global_batch_size=self.cfg.model.global_batch_size, **self.cfg.loop.duration())

    @cached_property
    def folder(self) -> Path:
        return Path(self.cfg.exp_manager.explicit_log_dir)

    @cached_property
    def validation_titles(self) -> dict[str, str]:
        """Title of each validation set -> prefix of its logged metrics."""
        sets = validation_names(self.cfg.model.data.data_prefix)
        return {f"validation {name}".strip(): f"val/{metric_prefix(name)}" for name in sets}

    @property
    def checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS

    @cached_property
    def dtype(self) -> torch.dtype:
        """Data type of the weights; trainer.precision must not be auto."""
        from nemo_kto.device.precision import dtype_of

        return dtype_of(self.cfg.trainer.precision)

    @cached_property
    def architecture(self) -> Architecture:
        """Architecture of the model with the padding of this run's layout; raises UserError if it cannot be read."""
        tensor, expert_tensor = self.cfg.model.tensor_model_parallel_size, self.cfg.model.expert_tensor_parallel_size
        read, quantize = self.files.architecture, self.cfg.model.quantize
        files = (self.files.tensor_parallel, self.files.expert_tensor_parallel, self.files.base_format)
        if (tensor, expert_tensor, quantize) == files:
            return read
        of_experts = expert_tensor or tensor
        return replace(read, tensor_parallel=tensor, expert_tensor_parallel=of_experts, base_format=quantize)

    @cached_property
    def split(self) -> PipelineSplit:
        """Partition of the layers across pipeline stages."""
        model = self.cfg.model
        return PipelineSplit(
            stages=model.pipeline_model_parallel_size,
            chunks=model.virtual_pipeline_model_parallel_size or 1,
            first=model.num_layers_in_first_pipeline_stage,
            last=model.num_layers_in_last_pipeline_stage,
            counts_embedding=model.account_for_embedding_in_pipeline_split,
            counts_loss=model.account_for_loss_in_pipeline_split,
        )

    @property
    def recompute_method(self) -> str | None:
        """Value of model.activations_checkpoint_method, by default uniform if whole layers are recomputed."""
        full = self.cfg.model.activations_checkpoint_granularity == "full"
        return self.cfg.model.activations_checkpoint_method or ("uniform" if full else None)

    @property
    def recompute_num_layers(self) -> int | None:
        """Value of model.activations_checkpoint_num_layers, by default 1 with the method uniform."""
        return self.cfg.model.activations_checkpoint_num_layers or (1 if self.recompute_method == "uniform" else None)

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained instead of all weights."""
        return self.cfg.model.peft.peft_scheme != "none"

    @cached_property
    def adapters(self) -> LoRASettings | None:
        """LoRA settings from the configuration or from an existing adapter; None without adapters."""
        if not self.has_adapters:
            return None
        tuning, has_config = self.cfg.model.peft.lora_tuning, (self.files.hf_folder / CONFIG).is_file()
        family = self.files.config[1] if has_config else None  # another check reports that there is none
        always = family is None or not has_adaptable_experts(family)  # the settings of a model without experts are the same
        if self.files.adapter_folder is not None:
            saved = read_adapter_settings(self.files.adapter_folder)
            return replace(saved, dropout=tuning.adapter_dropout, experts=always or saved.experts)
        targets = tuple(tuning.target_modules)
        return LoRASettings(
            rank=tuning.adapter_dim,
            alpha=tuning.alpha,
            rslora=tuning.rslora,
            dora=tuning.dora,
            dropout=tuning.adapter_dropout,
            experts=always or names_experts(targets),
            target_modules=targets if family is None else with_other_layers(targets, family),
            layers=None if tuning.layer_selection is None else tuple(tuning.layer_selection),
        )

    @property
    def recompute_modules(self) -> tuple[str, ...]:
        """Modules of a layer that selective recomputation recomputes; by default the MLP, whose activations are the largest.

        megatron-core's default is the core attention, which is fused here, so that recomputing it would save little.
        """
        return tuple(self.cfg.model.recompute_modules or ("mlp",))

    @cached_property
    def has_new_kl_examples(self) -> bool:
        """Whether later epochs have sequences that the first lacks: KL examples, which are formed within a batch."""
        return self.cfg.loss.definition.needs_z0 and self.cfg.loop.max_epochs > 1

    @cached_property
    def reference(self) -> ReferenceMode:
        settings = self.cfg.model.reference
        if not self.cfg.loss.definition.needs_reference:
            return ReferenceMode("none", f"{self.cfg.loss.loss_name} needs no reference")
        later = "KL examples of later epochs when their epoch begins" if self.has_new_kl_examples else ""
        if settings.mode != "auto":
            note = f"; {later}" if settings.mode == "cached" and later else ""
            return ReferenceMode(settings.mode, f"set by the user{note}")
        if settings.sync_interval:
            return ReferenceMode("swap", "synchronised with the policy, so that its log-probs change")
        if self.has_adapters and settings.restore_from_path is None:
            given, none = "the given adapters; costs a copy of them", "its adapters disabled; costs almost no memory"
            return ReferenceMode("adapter", f"the model with {given if self.files.has_adapters else none}")
        return ReferenceMode("cached", f"precomputed before training{f'; {later}' if later else ''}")

    @property
    def reference_folder(self) -> Path | None:
        """Folder of the configured reference model; None if none is set."""
        name = self.cfg.model.reference.restore_from_path
        return None if name is None else local_folder(name)

    @cached_property
    def reference_model(self) -> ModelSource | None:
        """The configured reference model; None if none is set, or if it is the model from which the policy starts."""
        folder = self.reference_folder
        if folder is None or self.reference.name == "none":
            return None
        named = find_source(folder, default_base=self.files.own.base.absolute())
        return None if named.resolve() == self.files.initial.resolve() else named

    @cached_property
    def reference_passes(self) -> tuple[int, int]:
        """Number of passes per step in which the model serves as the reference: with swapped weights, without adapters."""
        # If training starts from existing adapters, the reference is the model with those, which are swapped in.
        disables_adapters = self.reference.name == "adapter" and not self.files.has_adapters
        return int(self.reference.name in ("swap", "adapter") and not disables_adapters), int(disables_adapters)

    @property
    def swaps_reference(self) -> bool:
        """Whether the reference has weights of its own, which are swapped with those of the policy at each step."""
        return self.reference_passes[0] > 0

    @property
    def reference_on_gpu(self) -> bool:
        """Whether swapped weights stay in the memory of the GPU; with ``auto``, not before this is chosen."""
        return "gpu" in (self.cfg.model.reference.device, self.reference_memory)

    @property
    def swapped_weights(self) -> Literal["all", "trained"] | None:
        """Weights that have a copy on the host, of the reference or of the policy while the reference is evaluated."""
        mode, has_other = self.reference.name, self.cfg.model.reference.restore_from_path is not None
        if mode == "cached" and self.has_new_kl_examples and (not self.has_adapters or has_other):
            return "all"
        if mode == "swap":
            return "trained" if self.has_adapters and not has_other else "all"
        # the reference is the model with the adapters with which training starts
        return "trained" if mode == "adapter" and self.files.has_adapters else None


def find_callback(spec: str | Mapping[str, object]) -> Callable[[], Callback]:
    """Return a factory for a user-defined callback of ``trainer.callbacks``.

    ``spec`` is the path package.module.NAME of a class or an instance, or a mapping with the path of a class under _target_
    and with keyword arguments. Raises UserError if it does not exist, is not a Callback, or does not accept these arguments.
    """
    settings = {"_target_": spec} if isinstance(spec, str) else dict(spec)
    path, arguments = str(settings.get("_target_")), {name: settings[name] for name in settings if not name.startswith("_")}
    found = import_object(path)
    if isinstance(found, Callback) and not arguments:
        return lambda: found
    if not (isinstance(found, type) and issubclass(found, Callback)):
        raise UserError(f"must name subclasses of {Callback.__module__}.{Callback.__name__}, got {path}")
    try:
        inspect.signature(found).bind(**arguments)
    except TypeError as error:
        raise UserError(f"must have the arguments that {path} takes, got {arguments}: {error}") from error
    return partial(instantiate, settings)
