"""Models with a quantized base on ranks, and the same models with dequantized weights in their files."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_kto.architecture.base_format import is_quantized
from nemo_kto.architecture.family import name_in_file, prefixes_of
from nemo_kto.architecture.lora import LoRASettings
from nemo_kto.config.resolved import ModelFiles
from nemo_kto.distributed import state
from nemo_kto.distributed.state import Layout
from nemo_kto.huggingface.hf_weights import export, load_weights
from nemo_kto.huggingface.peft import export_adapter, load_adapter
from nemo_kto.huggingface.rank_weights import gather_weights, rank_adapters, rank_weights, sends_weights
from nemo_kto.layers.layer_settings import FORMATS
from nemo_kto.layers.quantized_weight import QuantizedWeight
from nemo_kto.layers.weight_formats import dequantize, quantize
from nemo_kto.models.engine.optimizer import wrap_data_parallel
from nemo_kto.models.lora.adapters import add_adapters, disable_adapters
from tests.helpers import hf_jobs


def write_dequantized(folder: Path, out: Path, form: str) -> None:
    """Copy a model, with the weights that a format applies to quantized and dequantized, each as one matrix of the file."""
    shutil.copytree(folder, out)
    architecture = replace(ModelFiles(source=folder).architecture, base_format=form)
    transposed = {
        name.format(**place): mapping.transposed
        for mapping in architecture.family.mappings
        if is_quantized(mapping.mcore_name, architecture)
        for place in architecture.instances(mapping, range(architecture.num_layers))
        for name in mapping.hf_names
    }
    assert transposed

    def dequantized(values: Tensor) -> Tensor:
        if values.dim() == 3:
            return torch.stack([dequantized(matrix) for matrix in values])
        return dequantize(quantize(values, FORMATS[form]), FORMATS[form]).to(values.dtype)

    for file in out.glob("*.safetensors"):
        weights = load_file(file)
        prefixes = prefixes_of(weights, architecture.family.prefixes)
        in_file = {name_in_file(name, prefixes): turned for name, turned in transposed.items()}
        for name in in_file.keys() & weights.keys():
            turned = weights[name].mT if in_file[name] else weights[name]
            weights[name] = (dequantized(turned).mT if in_file[name] else dequantized(turned)).contiguous()
        save_file(weights, file, {"format": "pt"})


class DenseMemory(TorchDispatchMode):
    """Counts the dense matrices of floats that operations return and that are alive at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.alive, self.most = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if type(result) is Tensor and result.is_floating_point() and result._base is None:
            size = result.untyped_storage().nbytes()
            self.alive += size
            self.most = max(self.most, self.alive)
            weakref.finalize(result, self._free, size)
        return result

    def _free(self, size: int) -> None:
        self.alive -= size


def adapted(
    layout: Layout,
    folder: Path,
    form: str | None,
    settings: LoRASettings,
    adapter: Path | None,
    out: Path,
    only_weights: bool = False,
) -> dict[str, Any]:
    """Logits of a model with adapters and without; its weights, its exports and the gradients of its adapters in ``out``.

    The gradients are those of sum(logits * hf_models.cotangent()), written as if they were adapters.
    """
    state.init_distributed(layout=layout, seed=3)
    model, architecture = hf_jobs.build(folder, layout, base_format=form)
    add_adapters(model, settings, architecture=architecture, seed=1)
    load_weights([model], architecture, folder)
    if adapter is not None:
        load_adapter([model], architecture, adapter)
    model.eval()

    def dense() -> Iterator[Any]:
        for weight in rank_weights([model], architecture):
            parameter = weight.parameter
            yield replace(weight, parameter=parameter.dense() if isinstance(parameter, QuantizedWeight) else parameter)

    kinds = [type(weight.parameter) is QuantizedWeight for weight in rank_weights([model], architecture)]
    weights = dict(gather_weights(dense(), architecture)) if sends_weights() else {}
    if weights:
        out.mkdir(parents=True, exist_ok=True)
        save_file({name: values.contiguous() for name, values in weights.items()}, out / "dense.safetensors")
    if only_weights:
        return {"quantized": sum(kinds)}
    found = {"logits": hf_jobs.logits_of_tokens(model, architecture), "quantized": sum(kinds)}
    with disable_adapters([model]):
        found["off"] = hf_jobs.logits_of_tokens(model, architecture)
    export_adapter([model], architecture, out=out / "adapter", base_model=folder)
    if form is not None:
        export([model], architecture, source=folder, out=out / "merged", max_shard_bytes=10**9, base=folder)
    wrapped = wrap_data_parallel([model], use_distributed_optimizer=False)
    model.config.finalize_model_grads_func = finalize_model_grads
    wrapped[0].zero_grad_buffer()
    hf_jobs._backward(wrapped, model)
    for weight in rank_adapters(wrapped, architecture, settings, {}):
        weight.parameter.data.copy_(weight.parameter.main_grad)  # type: ignore[attr-defined]
    export_adapter([model], architecture, out=out / "gradients", base_model=folder)
    return found


def export_to(layout: Layout, folder: Path, form: str, base: Path, out: Path) -> None:
    """Export a quantized model with the weights of another base."""
    state.init_distributed(layout=layout, seed=3)
    model, architecture = hf_jobs.build(folder, layout, base_format=form)
    export([model], architecture, source=folder, out=out, max_shard_bytes=10**9, base=base)


def loading_peak(folder: Path, form: str) -> tuple[int, int, int, int]:
    """Bytes of the largest quantized weight, of weights that are not quantized, the peak of loading, and of all weights."""
    state.init_distributed(layout=Layout(), seed=3)
    with DenseMemory() as memory:
        model, architecture = hf_jobs.build(folder, Layout(), base_format=form)
        load_weights([model], architecture, folder)
    sizes = {parameter: parameter.numel() * parameter.element_size() for parameter in model.parameters()}
    largest = max(size for parameter, size in sizes.items() if isinstance(parameter, QuantizedWeight))
    outside = sum(size for parameter, size in sizes.items() if not isinstance(parameter, QuantizedWeight))
    return largest, outside, memory.most, sum(sizes.values())
