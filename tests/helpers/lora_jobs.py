"""Functions that the ranks of the LoRA tests run."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config, unwrap_model
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_kto.architecture.architecture import Architecture, read_architecture
from nemo_kto.architecture.lora import LoRASettings
from nemo_kto.architecture.stages import PipelineSplit
from nemo_kto.checkpoint.manager import CheckpointManager, newest_checkpoint
from nemo_kto.config.resolved import ModelFiles
from nemo_kto.device import device
from nemo_kto.distributed import state
from nemo_kto.huggingface.hf_weights import load_weights
from nemo_kto.huggingface.peft import export_adapter, load_adapter
from nemo_kto.models.engine.optimizer import build_optimizer, build_scheduler, wrap_data_parallel
from nemo_kto.models.gpt import build_chunks
from nemo_kto.models.lora.adapters import add_adapters, constant_weights, disable_adapters, merge_adapters
from tests.helpers.engines import split_of
from tests.helpers.hf_jobs import message_of, weighted_logits

ROWS, SEQUENCE, VOCABULARY = 4, 16, 259
LR, WEIGHT_DECAY, BETAS, EPS, CLIP = 0.01, 0.1, (0.9, 0.99), 1e-4, 0.05


def tokens(row: int) -> torch.Tensor:
    """A text: [1, sequence]."""
    return torch.randint(0, VOCABULARY, (1, SEQUENCE), generator=torch.Generator().manual_seed(row))


def cotangent(row: int) -> torch.Tensor:
    """Weights of the logits of a text in the loss: [1, sequence, vocabulary]."""
    return torch.randn(1, SEQUENCE, VOCABULARY, generator=torch.Generator().manual_seed(100 + row)) / VOCABULARY


def build(
    folder: Path,
    layout: state.Layout,
    settings: LoRASettings | None = None,
    *,
    recompute: bool | str | None = False,
    distributed: bool = True,
    overlap: bool = False,
    reduce_in_fp32: bool = True,
    dtype: torch.dtype = torch.float32,
    split: PipelineSplit | None = None,
    **options: Any,
) -> tuple[list[Any], Architecture]:
    """The model at ``folder`` in data-parallel wrappers, with adapters unless ``settings`` is None.

    Args:
        recompute: the granularity; True for full.
        **options: further arguments of ``build_chunks``.
    """
    if not parallel_state.model_parallel_is_initialized():
        state.init_distributed(layout=layout, seed=3)
    architecture = read_architecture(
        folder, tensor_parallel=layout.tensor, expert_tensor_parallel=layout.expert_tensor or layout.tensor
    )
    granularity = "full" if recompute is True else recompute or None
    built = build_chunks(
        architecture,
        params_dtype=dtype,
        split=split or split_of(layout),
        context_parallel=layout.context,
        expert_parallel=layout.expert,
        sequence_parallel=layout.sequence_parallel,
        recompute_granularity=granularity,
        recompute_method="uniform" if granularity == "full" else None,
        recompute_num_layers=1 if granularity == "full" else None,
        **options,
    )
    if settings is not None:
        for gpt in built:
            add_adapters(gpt, settings, architecture=architecture, seed=3)
    chunks = wrap_data_parallel(built, use_distributed_optimizer=distributed, overlap=overlap, reduce_in_fp32=reduce_in_fp32)
    get_model_config(chunks[0]).finalize_model_grads_func = finalize_model_grads
    load_weights(chunks, architecture, folder)
    return chunks, architecture


def optimizer_of(
    chunks: list[Any],
    *,
    distributed: bool = True,
    dtype: torch.dtype = torch.float32,
    clip_grad: float = CLIP,
    **further: Any,
) -> Any:
    optimizer = build_optimizer(
        chunks=chunks,
        lr=LR,
        min_lr=LR,
        weight_decay=WEIGHT_DECAY,
        betas=BETAS,
        eps=EPS,
        clip_grad=clip_grad,
        params_dtype=dtype,
        use_distributed_optimizer=distributed,
        **further,
    )
    for group in optimizer.param_groups:  # as a scheduler does
        group["weight_decay"] *= group["wd_mult"]
    return optimizer


def backward(chunks: list[Any]) -> None:
    """Gradients of the mean over all texts of sum(logits * cotangent), one text a micro-batch."""
    gpt = unwrap_model(chunks[-1])
    for chunk in chunks:
        chunk.train()
        chunk.zero_grad_buffer()
        for parameter in chunk.parameters():
            parameter.grad = None
    mine = range(ROWS)[parallel_state.get_data_parallel_rank() :: parallel_state.get_data_parallel_world_size()]

    def forward(rows: Any, chunk: Any) -> tuple[torch.Tensor, Any]:
        row, here = next(rows), device.current_device()
        output = chunk(tokens(row).to(here), torch.arange(SEQUENCE, device=here)[None], None)
        return output, partial(weighted_logits, gpt, cotangent(row))

    with constant_weights(chunks):
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(mine) for _ in chunks],
            model=chunks,
            num_microbatches=len(mine),
            seq_length=SEQUENCE,
            micro_batch_size=1,
            forward_only=False,
        )


def train(chunks: list[Any], optimizer: Any, steps: int) -> list[float]:
    """Take optimizer steps; returns the norms of the gradients."""
    norms = []
    for _ in range(steps):
        backward(chunks)
        norms.append(float(optimizer.step()[1]))
    return norms


def adding_in_place() -> Any:
    """Context in which adapters are added on the CPU as on a GPU."""
    return mock.patch("nemo_kto.models.lora.lora_layers._adds_in_place", return_value=True)


_NO_KERNELS = ("::empty", "::new_empty", "::detach", "::_unsafe_view")


class Launches(TorchDispatchMode):
    """Counts the operations that would start a kernel on a GPU: all but those that return a view or an empty tensor."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not function.is_view and not any(name in function.name() for name in _NO_KERNELS)
        return function(*args, **(kwargs or {}))


def launches(folder: Path, adapters: list[LoRASettings | None]) -> list[tuple[int, int]]:
    """For each of the settings: kernels of the forward pass of a micro-batch, and those that a pass runs once."""
    state.init_distributed(layout=state.Layout(), seed=3)
    found, here = [], torch.arange(SEQUENCE)[None]
    for settings in adapters:
        chunks, _ = build(folder, state.Layout(), settings)
        counts = []
        for micro_batches in (1, 3):
            with adding_in_place(), constant_weights(chunks), Launches() as counted:
                for _ in range(micro_batches):
                    chunks[0](tokens(0), here, None)
            counts.append(counted.count)
        each = (counts[1] - counts[0]) // 2
        found.append((each, counts[0] - each))
    return found


def gradients_and_steps(
    layout: state.Layout,
    models: dict[str, tuple[Path, Path, LoRASettings]],
    out: Path,
    options: dict[str, Any],
) -> dict[str, list[float]]:
    """For each model (folder, adapter, settings): write the first gradients and the adapter after a few steps.

    With ``in_place`` among the options, B A x is added as on a GPU.

    Returns:
        The norm of the gradient at each step; last, the largest value where there must be zeros.
    """
    if options.get("in_place"):
        rest = {name: value for name, value in options.items() if name != "in_place"}
        with adding_in_place():
            return gradients_and_steps(layout, models, out, rest)
    state.init_distributed(layout=layout, seed=3)
    result = {}
    for name, (folder, adapter, settings) in models.items():
        # a distributed optimizer's ranks have parts of the summed gradient each, so that it is looked at without one
        chunks, architecture = build(folder, layout, settings, **{**options, "distributed": False})
        load_adapter(chunks, architecture, adapter)
        backward(chunks)
        for parameter in (each for chunk in chunks for each in chunk.parameters()):
            if parameter.requires_grad:
                parameter.data.copy_(parameter.main_grad)
        export_adapter(chunks, architecture, out=out / name / "gradients", base_model=folder)
        chunks, architecture = build(folder, layout, settings, **options)
        load_adapter(chunks, architecture, adapter)
        norms = train(chunks, optimizer_of(chunks, distributed=options.get("distributed", True)), 3)
        export_adapter(chunks, architecture, out=out / name / "trained", base_model=folder)
        result[name] = [*norms, _where_zeros_belong(chunks)]
    return result


def replicated_after_dropout(layout: state.Layout, folder: Path, settings: LoRASettings) -> tuple[Any, ...]:
    """A few steps with dropout.

    Returns:
        Norms of the gradient, the adapter parameters that every tensor-parallel rank holds in full, and the state of the
        generator that all of them share.
    """
    state.init_distributed(layout=layout, seed=3)
    chunks, _ = build(folder, layout, settings)
    _perturb_b(chunks)
    norms, replicated = train(chunks, optimizer_of(chunks), 2), {}
    for name, parameter in unwrap_model(chunks[0]).named_parameters():
        if parameter.requires_grad and not getattr(parameter, "tensor_model_parallel", False):
            replicated[name] = parameter.detach().numpy().copy()
    return norms, replicated, torch.get_rng_state().tolist()


def dropped(layout: state.Layout, folder: Path, settings: LoRASettings) -> dict[str, Any]:
    """A applied to ones, in training and in evaluation, with the same input and A on every rank."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    state.init_distributed(layout=layout, seed=3)
    chunks, _ = build(folder, layout, settings)
    attention = unwrap_model(chunks[0]).decoder.layers[0].self_attention
    result: dict[str, Any] = {}
    for name, linear in {"column": attention.linear_qkv, "row": attention.linear_proj}.items():
        linear.lora_a.data.fill_(1.0)
        ones = torch.ones(5, 1, linear.lora_a.size(1))
        # the transformer block switches the generator where it is sequence parallel
        switched = get_cuda_rng_tracker().fork() if layout.sequence_parallel else contextlib.nullcontext()

        def low_rank(linear: Any = linear, ones: torch.Tensor = ones) -> torch.Tensor:
            with torch.no_grad():
                return torch.nn.functional.linear(linear._dropout(ones), linear.lora_a) * linear.adapter_scale

        linear.train()
        with switched:
            result[name] = low_rank().numpy()
        linear.eval()
        result[f"{name}, evaluation"] = low_rank().unique().tolist()
        result[f"{name}, width"] = ones.size(-1)
    return result


def half_precision(layout: state.Layout, folder: Path, adapter: Path, settings: LoRASettings, distributed: bool) -> Any:
    """Norms of the gradient in bf16 over three steps, and the dtypes of base weights and adapters."""
    state.init_distributed(layout=layout, seed=3)
    chunks, architecture = build(folder, layout, settings, dtype=torch.bfloat16, distributed=distributed)
    load_adapter(chunks, architecture, adapter)
    norms = train(chunks, optimizer_of(chunks, dtype=torch.bfloat16, distributed=distributed), 3)
    return norms, {str(parameter.dtype) for parameter in chunks[0].parameters()}


def misuse(folder: Path) -> list[str]:
    """The errors of adapters that are used in the wrong order."""
    state.init_distributed(layout=state.Layout(), seed=3)
    chunks, architecture = build(folder, state.Layout(), LoRASettings(rank=2, alpha=2))
    gpt = unwrap_model(chunks[0])

    def switch_off() -> None:
        with disable_adapters(chunks):
            pass

    beyond = LoRASettings(rank=2, alpha=2, layers=(4, 5))
    actions = [
        lambda: merge_adapters(chunks),
        lambda: merge_adapters(chunks),
        switch_off,
        lambda: add_adapters(gpt, LoRASettings(rank=1, alpha=1), architecture=architecture, seed=1),
        lambda: add_adapters(gpt, beyond, architecture=architecture, seed=1),
    ]
    return [message_of(action) for action in actions]


def _where_zeros_belong(chunks: list[Any]) -> float:
    """Largest value of rows of B whose weight is zero: those of padded heads. (Weights of real rows are random.)"""
    largest = 0.0
    for name, module in (named for chunk in chunks for named in chunk.named_modules()):
        if name.endswith("linear_qkv") and hasattr(module, "lora_b"):
            padded = module.weight.abs().sum(1) == 0
            largest = max([largest, *module.lora_b[padded].abs().flatten().tolist()])
        if name.endswith("linear_proj") and hasattr(module, "lora_a"):
            padded = module.weight.abs().sum(0) == 0
            largest = max([largest, *module.lora_a[:, padded].abs().flatten().tolist()])
    return largest


def manager_of(chunks: list[Any], optimizer: Any, folder: Path, source: Path, **schedule: Any) -> CheckpointManager:
    """Checkpoints of a model; ``schedule``: what differs from a constant learning rate."""
    constant: dict[str, Any] = {"name": "constant", "lr": LR, "min_lr": LR, "weight_decay": WEIGHT_DECAY}
    constant |= {"warmup_steps": 0, "constant_steps": 0, "max_steps": 10}
    scheduler = build_scheduler(optimizer=optimizer, **(constant | schedule))
    return CheckpointManager(
        folder=folder,
        chunks=chunks,
        optimizer=optimizer,
        scheduler=scheduler,
        monitor="val_loss",
        mode="min",
        save_top_k=-1,
        async_save=False,
        hugging_face_source=source,
        original=ModelFiles(source=source).original,
    )


def train_and_save(
    layout: state.Layout,
    folder: Path,
    settings: LoRASettings | None,
    run: Path,
    steps: int,
    distributed: bool = True,
    also: int | None = None,
) -> list[float]:
    """Resume from the newest checkpoint of ``run``, if any, train until step ``steps`` and save, and after step ``also``.

    Returns:
        Norms of the gradient.
    """
    state.init_distributed(layout=layout, seed=3)
    chunks, architecture = build(folder, layout, settings, distributed=distributed)
    optimizer = optimizer_of(chunks, distributed=distributed)
    manager = manager_of(chunks, optimizer, run, folder)
    if settings is not None:  # from a B that is not zero, or nothing that is wrong with A shows in the first step
        _perturb_b(chunks)
        optimizer.reload_model_params()
    newest = newest_checkpoint(run)
    done = 0 if newest is None else manager.load(newest)["step"]
    norms = []
    for step in range(done + 1, steps + 1):
        backward(chunks)
        manager.scheduler.step(1)
        _, norm, _ = optimizer.step()
        norms.append(float(norm))
        if step == also:
            manager.save({"step": step}, {})
    manager.save({"step": steps}, {})
    if settings is not None:
        export_adapter(chunks, architecture, out=run / f"adapter-{steps}", base_model=folder)
    return norms


def _perturb_b(chunks: list[Any]) -> None:
    """The same pattern in every row of B of a layer, so that it does not depend on the layout; nothing where padding is."""
    for name, module in (named for chunk in chunks for named in chunk.named_modules()):
        if hasattr(module, "lora_b"):
            used = module.weight.abs().sum(1, keepdim=True) != 0
            factor = 2 if name.endswith("linear_qkv") else 1
            pattern = factor * torch.linspace(-0.1, 0.1, module.lora_b.size(1), device=used.device)
            module.lora_b.data.copy_(pattern * used)
