"""Functions that the ranks of the Hugging Face tests run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.architecture.lora import LoRASettings
from nemo_kto.architecture.segments import cut, segments, split_dimension
from nemo_kto.architecture.stages import PipelineSplit
from nemo_kto.config.resolved import ModelFiles
from nemo_kto.distributed import state
from nemo_kto.distributed.state import Layout
from nemo_kto.huggingface import hf_weights as weights
from nemo_kto.huggingface.hf_weights import export, load_weights
from nemo_kto.huggingface.peft import export_adapter, load_adapter
from nemo_kto.huggingface.rank_weights import rank_weights
from nemo_kto.models.engine.optimizer import wrap_data_parallel
from nemo_kto.models.gpt import HiddenStateGPT, build_gpt
from nemo_kto.models.lora.adapters import add_adapters, disable_adapters, merge_adapters
from tests.helpers import hf_models

ADAPTER_SEED = 5


def build(
    folder: Path, layout: Layout, *, base_format: str | None = None, **settings: Any
) -> tuple[HiddenStateGPT, Architecture]:
    files = ModelFiles(source=folder, tensor_parallel=layout.tensor, expert_tensor_parallel=layout.expert_tensor)
    architecture = replace(files, base_format=base_format).architecture
    model = build_gpt(
        architecture,
        **{"params_dtype": torch.float32, **settings},
        split=PipelineSplit(stages=layout.pipeline),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        sequence_parallel=layout.sequence_parallel,
        expert_parallel=layout.expert,
    )
    return model, architecture


def logits(model: HiddenStateGPT, architecture: Architecture, tokens: torch.Tensor) -> Any:
    """Logits over the unpadded vocabulary on the ranks of the last stage, else None."""

    def forward(_: Any, chunk: HiddenStateGPT) -> tuple[torch.Tensor, Any]:
        positions = torch.arange(tokens.size(1)).expand_as(tokens)
        return chunk(tokens, positions, None), lambda hidden, **__: hidden

    outputs = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=None,
        model=[model],
        num_microbatches=1,
        seq_length=tokens.size(1),
        micro_batch_size=tokens.size(0),
        forward_only=True,
        collect_non_loss_data=True,
    )
    if not parallel_state.is_pipeline_last_stage():
        return None
    group = parallel_state.get_tensor_model_parallel_group()
    hidden = outputs[0]
    if model.config.sequence_parallel:
        hidden = torch.cat(gather(hidden, group), dim=1)
    part = capped(model, hidden @ model.output_weight().T)
    return torch.cat(gather(part, group), dim=-1)[..., : architecture.vocab_size]


def capped(model: HiddenStateGPT, values: torch.Tensor) -> torch.Tensor:
    """What becomes of logits."""
    cap = model.logit_softcap
    return values if cap is None else cap * torch.tanh(values / cap)


def gather(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts


def adapted_model(folder: Path, layout: Layout, settings: LoRASettings | None) -> tuple[HiddenStateGPT, Architecture]:
    """A model in evaluation mode with its weights, and with new adapters unless ``settings`` is None."""
    model, architecture = build(folder, layout)
    if settings is not None:
        add_adapters(model, settings, architecture=architecture, seed=ADAPTER_SEED)
    load_weights([model], architecture, folder)
    return model.eval(), architecture


def logits_of_tokens(model: HiddenStateGPT, architecture: Architecture) -> Any:
    """Logits of hf_models.tokens(), as an array, on the ranks of the last stage; else None."""
    with torch.no_grad():
        result = logits(model, architecture, hf_models.tokens())
    return None if result is None else result.numpy()


def check_models(layout: Layout, folders: dict[str, Path], out: Path, factor: float = 1.0) -> dict[str, Any]:
    """Load, run and export each model, times a factor; returns the logits (on the last stage)."""
    state.init_distributed(layout=layout, seed=3)
    results: dict[str, Any] = {}
    for name, folder in folders.items():
        model, architecture = adapted_model(folder, layout, None)
        results[name] = logits_of_tokens(model, architecture)
        for parameter in model.parameters():
            parameter.data.mul_(factor)
        export([model], architecture, source=folder, out=out / name, max_shard_bytes=40_000)
    return results


def check_adapters(
    layout: Layout, folders: dict[str, Path], adapters: dict[str, Path], settings: dict[str, LoRASettings], out: Path
) -> dict[str, dict[str, Any]]:
    """For each model: logits with its new, loaded, disabled and merged adapters, and without adapters.

    Writes the new adapters, the loaded ones and the merged weights to ``out``/NAME/first, again and merged.
    """
    state.init_distributed(layout=layout, seed=3)
    results: dict[str, dict[str, Any]] = {}
    for name, folder in folders.items():
        model, architecture = adapted_model(folder, layout, settings[name])
        export_adapter([model], architecture, out=out / name / "first", base_model=folder)
        found = {"first": logits_of_tokens(model, architecture)}
        load_adapter([model], architecture, adapters[name])
        found["adapted"] = logits_of_tokens(model, architecture)
        export_adapter([model], architecture, out=out / name / "again", base_model=folder)
        with disable_adapters([model]):
            found["off"] = logits_of_tokens(model, architecture)
        merge_adapters([model])
        found["merged"] = logits_of_tokens(model, architecture)
        export([model], architecture, source=folder, out=out / name / "merged", max_shard_bytes=10**9)
        found["base"] = logits_of_tokens(*adapted_model(folder, layout, None))
        results[name] = found
    return results


def new_adapters(folders: dict[str, Path], settings: dict[str, LoRASettings], out: Path) -> None:
    """Write the new adapters of each model to ``out``/NAME, on one rank."""
    state.init_distributed(layout=Layout(), seed=3)
    for name, folder in folders.items():
        model, architecture = adapted_model(folder, Layout(), settings[name])
        export_adapter([model], architecture, out=out / name, base_model=folder)


def check_gradients(
    layout: Layout, folders: dict[str, Path], out: Path, dtype: torch.dtype = torch.float32
) -> dict[str, float]:
    """Write the gradients of sum(logits * hf_models.cotangent()) as if they were weights."""
    state.init_distributed(layout=layout, seed=3)
    largest: dict[str, float] = {}
    for name, folder in folders.items():
        model, architecture = build(folder, layout, params_dtype=dtype)
        load_weights([model], architecture, folder)
        wrapped = wrap_data_parallel([model], use_distributed_optimizer=False)
        model.config.finalize_model_grads_func = finalize_model_grads
        for chunk in wrapped:
            chunk.zero_grad_buffer()
        _backward(wrapped, model)
        for weight in rank_weights(wrapped, architecture):
            if not weight.mapping.frozen:  # one that is keeps its values
                weight.parameter.data.copy_(weight.parameter.main_grad)  # type: ignore[attr-defined]
        largest[name] = max([0.0, *(padding.abs().max().item() for padding in _paddings(wrapped, architecture))])
        export(wrapped, architecture, source=folder, out=out / name, max_shard_bytes=10**9)
    return largest


def weighted_logits(
    model: HiddenStateGPT, cotangent: torch.Tensor, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """The sum of logits * cotangent over this rank's rows of the vocabulary, as a loss of megatron-core's schedules."""
    if model.config.sequence_parallel:
        hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden.transpose(0, 1)).transpose(0, 1)
    else:
        hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
    weight = model.output_weight()
    first = parallel_state.get_tensor_model_parallel_rank() * weight.size(0)
    part = cotangent.to(weight.device)[..., first : first + weight.size(0)]
    return (capped(model, hidden @ weight[: part.size(-1)].T) * part).sum(), torch.tensor(1, dtype=torch.int), {}


def _backward(chunks: list[Any], model: HiddenStateGPT) -> None:
    tokens, loss = hf_models.tokens(), partial(weighted_logits, model, hf_models.cotangent())

    def forward(_: Any, chunk: Any) -> tuple[torch.Tensor, Any]:
        return chunk(tokens, torch.arange(tokens.size(1)).expand_as(tokens), None), loss

    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=None,
        model=chunks,
        num_microbatches=1,
        seq_length=tokens.size(1),
        micro_batch_size=tokens.size(0),
        forward_only=False,
    )


def _paddings(chunks: list[Any], architecture: Architecture) -> Any:
    """The parts of this rank's parameters that no Hugging Face weight fills."""
    for weight in rank_weights(chunks, architecture):
        dimension = split_dimension(weight.mapping)
        if dimension is not None:
            length = weight.parameter.size(dimension)
            start = parallel_state.get_tensor_model_parallel_rank() * length
            for offset, part in cut(segments(weight.mapping, architecture), start=start, length=length):
                if part.source is None:
                    yield weight.parameter.data.narrow(dimension, offset, part.length)


def message_of(action: Any) -> str:
    """The error that ``action`` raises, as "Type: text"; empty if it raises none."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def load_only(layout: Layout, folder: Path) -> str:
    """Load; returns the error."""
    state.init_distributed(layout=layout, seed=3)
    model, architecture = build(folder, layout)
    return message_of(lambda: load_weights([model], architecture, folder))


def export_only(layout: Layout, folder: Path, out: Path, source: Path | None = None) -> str:
    """Load and export; returns the error."""
    state.init_distributed(layout=layout, seed=3)
    model, architecture = build(folder, layout)
    load_weights([model], architecture, folder)
    return message_of(lambda: export([model], architecture, source=source or folder, out=out, max_shard_bytes=40_000))


def export_to_broken_disk(layout: Layout, folder: Path, out: Path) -> str:
    """The same on a disk that takes one file of weights and no more."""
    save = safetensors.torch.save_file
    saved: list[object] = []

    def save_one(*arguments: Any, **settings: Any) -> None:
        if saved:
            raise OSError("No space left on device")
        saved.append(save(*arguments, **settings))

    safetensors.torch.save_file = save_one
    try:
        return export_only(layout, folder, out)
    finally:
        safetensors.torch.save_file = save


def bytes_read(layout: Layout, folder: Path) -> tuple[int, int, int]:
    """Bytes that loading reads in all, at most at once, and bytes of this rank's parameters."""
    state.init_distributed(layout=layout, seed=3)
    model, architecture = build(folder, layout)
    sizes: list[int] = []
    original = weights.safe_open

    class Slice:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getitem__(self, where: Any) -> torch.Tensor:
            values = self.inner[where]
            sizes.append(values.numel() * values.element_size())
            return values

    class Opened:
        """Only slices may be had: whole tensors and keys are missing on purpose."""

        def __init__(self, *arguments: Any, **settings: Any) -> None:
            self.context = original(*arguments, **settings)

        def __enter__(self) -> Opened:
            self.inner = self.context.__enter__()
            return self

        def __exit__(self, *arguments: Any) -> None:
            self.context.__exit__(*arguments)

        def get_slice(self, name: str) -> Slice:
            return Slice(self.inner.get_slice(name))

    try:
        setattr(weights, "safe_open", Opened)  # noqa: B010
        load_weights([model], architecture, folder)
    finally:
        setattr(weights, "safe_open", original)  # noqa: B010
    return sum(sizes), max(sizes), sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def convert_type(layout: Layout, folder: Path, out: Path) -> str:
    """Load in bf16 and export; returns the dtype of the parameters."""
    state.init_distributed(layout=layout, seed=3)
    model, architecture = build(folder, layout, params_dtype=torch.bfloat16)
    load_weights([model], architecture, folder)
    export([model], architecture, source=folder, out=out, max_shard_bytes=10**9)
    return ", ".join({str(parameter.dtype) for parameter in model.parameters()})


def save_sharded(layout: Layout, folder: Path, checkpoint: Path) -> None:
    """Load and save with megatron-core's distributed checkpointing."""
    state.init_distributed(layout=layout, seed=3)
    model, architecture = build(folder, layout)
    load_weights([model], architecture, folder)
    dist_checkpointing.save(model.sharded_state_dict(), str(checkpoint))


def load_sharded(layout: Layout, folder: Path, checkpoint: Path, out: Path) -> float:
    """Load a distributed checkpoint and export it; returns the largest padded value."""
    state.init_distributed(layout=layout, seed=4)
    model, architecture = build(folder, layout)
    model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), str(checkpoint)))
    export([model], architecture, source=folder, out=out, max_shard_bytes=10**9)
    return max([0.0, *(padding.abs().max().item() for padding in _paddings([model], architecture))])
