"""All patches of megatron-core and torch, each with the reason for it.

megatron-core calls CUDA functions that have a meaning on the CPU as well (query the current device, synchronise, allocate
memory). On the CPU these calls get CPU equivalents; with a GPU they are left alone. The GPTModel, the pipeline schedules,
DistributedDataParallel, the distributed optimizer and dist_checkpointing that run on a laptop are therefore the ones that
run on a cluster.

Supported are megatron-core 0.16.1 to 0.19.2 and torch 2.9.1 to 2.13. A patch without a version is needed by all of them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import TYPE_CHECKING, Any

from nemo_kto.device import device
from nemo_kto.utils import lazy_import

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

# Warnings of megatron-core and torch in every run.
_EXPECTED_WARNINGS = (
    ".*full scope is deprecated.*",
    ".*torch.distributed.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated.*",
    ".*`load_state_dict` is deprecated and will be removed.*",
    ".*we are deprecating ShardedTensor.*",
    ".*The .grad attribute of a Tensor that is not a leaf Tensor is being accessed.*",
)
# Warnings of megatron-core in every run without a GPU.
_EXPECTED_ON_CPU = (".*Apex (is|are) not installed.*", ".*CUDA_DEVICE_MAX_CONNECTIONS.*")
# Packages that megatron-core uses if they can be imported, and that compute only on GPUs. amp_C is a part of apex.
_GPU_PACKAGES = ("transformer_engine", "apex", "amp_C")
# Loggers that megatron-core imports for inference and for its timers. Importing both takes 0.7 s in every process, and
# wandb creates temporary folders that remain after a kill.
_UNUSED_LOGGERS = ("wandb", "torch.utils.tensorboard")
# Factory functions that megatron-core calls with device="cuda".
_FACTORIES = (
    "arange", "empty", "empty_like", "full", "full_like", "linspace", "ones", "ones_like", "rand", "rand_like", "randint",
    "randn", "randn_like", "tensor", "zeros", "zeros_like",
)  # fmt: skip


# ---- while megatron-core is imported ----


def install_import_hook() -> None:
    """Adapt the import of megatron-core to the device, which is checked only then; until then torch is not loaded."""
    sys.meta_path.insert(0, _MegatronFinder())


class _MegatronFinder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None) -> ModuleSpec | None:
        if name in _UNUSED_LOGGERS and _importing_module().startswith("megatron."):
            raise ModuleNotFoundError(f"No module named {name!r} for megatron-core", name=name)
        if name not in ("megatron.core", "megatron.core.jit"):
            return None
        on_gpu = device.on_gpu()
        compiles = on_gpu and not device.missing_for_compiling()
        if name == "megatron.core.jit":
            return None if compiles else _jit_without_compiler(name, path)
        silence_warnings(on_gpu)
        if not on_gpu:
            # On the CPU of a machine with GPUs (device.force_cpu), megatron-core would use Transformer Engine's optimizer,
            # which fails on CPU tensors. None makes Python raise ImportError for a package.
            sys.modules.update(dict.fromkeys(_GPU_PACKAGES))  # type: ignore[arg-type]
        elif not compiles:
            _disable_compiling()
        return None


def _importing_module() -> str:
    """Return the name of the module whose import statement is being executed."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and "importlib" in frame.f_code.co_filename:  # "<frozen importlib._bootstrap>"
        frame = frame.f_back
    return "" if frame is None else frame.f_globals.get("__name__", "")


def silence_warnings(on_gpu: bool) -> None:
    """Suppress warnings that every run causes; on the CPU also those about missing GPU packages."""
    for message in (*_EXPECTED_WARNINGS, *(() if on_gpu else _EXPECTED_ON_CPU)):
        warnings.filterwarnings("ignore", message=message)
    if not on_gpu:  # megatron-core's "GPU generator" is then the CPU generator, so its warning of a change does not apply
        random = logging.getLogger("megatron.core.tensor_parallel.random")
        random.addFilter(lambda record: "CPU RNG" not in record.getMessage())
    for name in ("megatron.core.rerun_state_machine", "megatron.core.optimizer_param_scheduler"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _disable_compiling() -> None:
    # torch.compile would fail in the first step of a run on a GPU, see device.missing_for_compiling. torch 2.13 also uses
    # Triton kernels for some of its own operations if Triton can be imported: outer products in ``bmm``.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    with contextlib.suppress(ImportError):  # older versions have no such kernels
        from torch._native import triton_utils

        triton_utils.deregister_op_overrides()


def _jit_without_compiler(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    # megatron.core.jit decides how small functions are fused. Compiling them needs a C++ compiler on the CPU, and takes
    # seconds in every process without a benefit.
    spec = PathFinder.find_spec(name, path)
    if spec is None or spec.loader is None:
        return None
    execute = spec.loader.exec_module

    def execute_and_disable(module: types.ModuleType) -> None:
        execute(module)
        module.disable_jit_fuser()  # megatron-core's own switch

    spec.loader.exec_module = execute_and_disable  # type: ignore[method-assign]
    return spec


# ---- on every device ----


@functools.cache
def install_cpu_backend() -> None:
    """Prepare this process for megatron-core on the CPU; with a GPU, only apply the patches that every device needs.

    May be called any number of times. Raises RuntimeError if megatron-core was imported with an optimizer for GPUs before
    the CPU was selected.
    """
    define_missing_names()
    distinguish_host_adam()
    group_ranks_without_einops()
    keep_norm_on_device()
    use_known_message_shapes()
    add_weight_gradients()
    if device.on_gpu():
        return
    if not getattr(sys.modules.get("megatron.core.optimizer"), "USING_PYTORCH_OPTIMIZER", True):
        raise RuntimeError(
            "the CPU must be selected before megatron-core is imported, which has loaded its optimizer for GPUs; "
            "set NEMO_KTO_FORCE_CPU=1 before Python starts, and import nemo_kto before megatron-core"
        )
    _remove_compiler_wrappers()
    _replace_device_functions()
    _replace_generator_functions()
    _replace_cuda_arguments()
    _return_cuda_type_names()
    _patch_collectives()


def define_missing_names() -> None:
    """Define two names that megatron-core 0.16.1 needs without Transformer Engine, and 0.19 does not."""
    from megatron.core import utils
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):  # the router would raise NameError
        moe_utils.te_general_gemm = None
    if utils.get_te_version() is None:  # an offloaded optimizer would compare it with a version
        utils._te_version = utils.PkgVersion("0.0.0")


def distinguish_host_adam() -> None:
    """Give megatron-core's offloaded optimizer another class for the part on the host than for the part on the GPU.

    It moves a loaded state to the host if its optimizer is of the host's class, which is torch's AdamW for both parts
    without Transformer Engine.
    """
    from megatron.core import optimizer

    class HostAdamW(torch.optim.AdamW):
        """torch's AdamW, for parameters on the host."""

    optimizer.CPUAdam = HostAdamW


def group_ranks_without_einops() -> None:
    """Give megatron-core the one function of einops with which it groups the ranks of optimizer instances.

    It does not depend on einops, and fails without it if there are several instances.
    """
    from megatron.core import parallel_state

    def rearrange(ranks: Any, pattern: str, *, l: int, s: int, u: int) -> Any:  # noqa: E741  # its names
        assert pattern == "(l s u) -> (l u) s"
        return ranks.reshape(l, s, u).swapaxes(1, 2).reshape(l * u, s)

    if not parallel_state.HAVE_EINOPS:
        parallel_state.einops = types.SimpleNamespace(rearrange=rearrange)
        parallel_state.HAVE_EINOPS = True


def keep_norm_on_device() -> None:
    """Make megatron-core compute the norm of the gradient on the device if it has no kernel for it.

    Without Transformer Engine and apex it copies the norm of each parameter to the host, which waits for each of them.
    """
    from megatron.core.optimizer import clip_grads

    def l2_norm(
        chunk_size: int, flag: torch.Tensor, lists: list[list[torch.Tensor]], per_item: bool
    ) -> tuple[torch.Tensor, None]:
        norm = torch.nn.utils.get_total_norm(tensor for tensors in lists for tensor in tensors)
        return norm.float().view(1).to(flag.device), None

    if getattr(clip_grads.l2_norm_impl, "__name__", "") == "local_multi_tensor_l2_norm":
        clip_grads.l2_norm_impl = l2_norm


def use_known_message_shapes() -> None:
    """Make pipeline stages read the shapes of messages from ``config.message_shapes`` instead of sending them.

    With micro-batches of different widths, megatron-core sends three integers before each message, and waits for the device
    twice: in ``torch.cuda.synchronize``, and to read the integers. ``models/engine/engine.py`` has the shapes;
    a configuration without them, which the engine has not set, keeps megatron-core's exchange.
    """
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    exchange = P2PCommunicator._communicate_shapes

    def known_shapes(
        self: Any, send_next: object, send_prev: object, recv_prev: bool, recv_next: bool
    ) -> tuple[Sequence[int], Sequence[int]]:
        if (shapes := getattr(self.config, "message_shapes", None)) is None:
            return exchange(self, send_next, send_prev, recv_prev, recv_next)
        return next(shapes.hidden_states) if recv_prev else (0, 0, 0), next(shapes.gradients) if recv_next else (0, 0, 0)

    P2PCommunicator._communicate_shapes = known_shapes


def add_weight_gradients() -> None:
    """Make megatron-core's linear layers add weight gradients to main_grad with torch's product, without apex's kernel.

    ``kernels.adds_products`` says for which matrices torch can do so.
    """
    from megatron.core.tensor_parallel import layers

    def accumulate(input_TI: torch.Tensor, grad_output_TO: torch.Tensor, main_grad_OI: torch.Tensor) -> None:
        if input_TI.dtype == main_grad_OI.dtype:
            main_grad_OI.addmm_(grad_output_TO.t(), input_TI)
        else:
            torch.addmm(main_grad_OI, grad_output_TO.t(), input_TI, out_dtype=main_grad_OI.dtype, out=main_grad_OI)

    if not device.on_gpu() or not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(
            wgrad_gemm_accum_fp32=accumulate,
            wgrad_gemm_accum_fp16=accumulate,  # for main_grad in bf16 too
        )


# ---- torch on the CPU ----


def _remove_compiler_wrappers() -> None:
    # Nothing is compiled on the CPU, but torch would import its compiler, which takes seconds, only to exclude functions
    # from compilation.
    if "torch._dynamo" in sys.modules:  # megatron-core was imported first, or runs on the CPU of a machine with a GPU
        torch.compiler.set_stance("force_eager")

    def disable(function: object = None, recursive: bool = True, *, reason: str | None = None) -> object:
        return function if function is not None else lambda decorated: decorated

    torch.compiler.disable = disable  # type: ignore[assignment]
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        setattr(torch.optim.Optimizer, name, inspect.unwrap(getattr(torch.optim.Optimizer, name)))
    for optimizer in (torch.optim.Adam, torch.optim.AdamW):  # the removed wrapper also disables gradients
        optimizer.step = torch.no_grad()(inspect.unwrap(optimizer.step))  # type: ignore[method-assign]


class _Stream:
    """Replacement for a CUDA stream: on the CPU every operation is complete when it returns."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def record_event(self, event: object = None) -> _Event:
        return _Event()

    def _return(self, *args: object) -> None:
        pass

    synchronize = wait_stream = wait_event = record = wait = __exit__ = _return

    def query(self) -> bool:
        return True

    def __enter__(self) -> _Stream:
        return self


class _Event(_Stream):
    """Replacement for a CUDA event, which is always complete."""

    def elapsed_time(self, other: object) -> float:
        return 0.0


def _replace_device_functions() -> None:
    cpu, stream = torch.device("cpu"), _Stream()
    # values that do not enable any CUDA code path
    properties = types.SimpleNamespace(name="cpu", major=0, minor=0, multi_processor_count=0, total_memory=0)

    def always(value: object) -> Callable[..., object]:
        return lambda *args, **kwargs: value  # a new function each time: torch.compile distinguishes them by identity

    values: dict[str, object] = {
        "is_available": False, "device_count": 0, "current_device": cpu,
        "get_device_properties": properties, "get_device_capability": (0, 0),
        "set_device": None, "synchronize": None, "empty_cache": None, "is_current_stream_capturing": False,
        "current_stream": stream, "default_stream": stream,
        "stream": contextlib.nullcontext(), "device": contextlib.nullcontext(),
        "memory_allocated": 0, "max_memory_allocated": 0, "memory_reserved": 0,
    }  # fmt: skip
    for name, value in values.items():
        setattr(torch.cuda, name, always(value))
    torch.cuda.Stream, torch.cuda.Event = _Stream, _Event  # type: ignore[misc, assignment]
    torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop = always(None), always(None)  # type: ignore[assignment]


def _replace_generator_functions() -> None:
    # megatron-core keeps one CUDA generator state for each purpose. With the CPU generator behind these functions, its own
    # dropout and initialisation code runs unchanged.
    from megatron.core.tensor_parallel import random as mcore_random

    def get_state(*args: object, **kwargs: object) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *args: object, **kwargs: object) -> None:
        torch.set_rng_state(state)

    torch.cuda.get_rng_state = mcore_random._get_cuda_rng_state = get_state  # type: ignore[assignment]
    torch.cuda.set_rng_state = mcore_random._set_cuda_rng_state = set_state  # type: ignore[assignment]
    torch.cuda.manual_seed = torch.default_generator.manual_seed  # type: ignore[assignment]


def _replace_cuda_arguments() -> None:
    # megatron-core passes the literal "cuda" to factory functions and ``Tensor.to``, and calls ``.cuda()``.
    import torch
    from torch.utils._device import _device_constructors

    # "with torch.device(...)" recognises factory functions by identity, and collects them when it is first used. This call
    # makes it collect the original functions; otherwise models that transformers builds on "meta" would have uninitialised
    # values.
    _device_constructors()

    def is_cuda(value: object) -> bool:
        name = value.type if isinstance(value, torch.device) else value
        return isinstance(name, str) and name.startswith("cuda")

    def on_cpu(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(function)
        def call(*args: object, **kwargs: object) -> torch.Tensor:
            args = tuple("cpu" if is_cuda(argument) else argument for argument in args)
            if is_cuda(kwargs.get("device")):
                kwargs["device"] = "cpu"
            return function(*args, **kwargs)

        return call

    for name in _FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *a, **k: self  # type: ignore[assignment, method-assign]
    torch.nn.Module.cuda = lambda self, *a, **k: self  # type: ignore[assignment, method-assign]
    torch.Tensor.to = on_cpu(torch.Tensor.to)  # type: ignore[assignment, method-assign]


def _return_cuda_type_names() -> None:
    # megatron-core's optimizers and gradient clipping compare ``tensor.type()`` with "torch.cuda.FloatTensor" and its
    # variants, and raise an error for any other type.
    original: Callable[..., str | torch.Tensor] = torch.Tensor.type

    @functools.wraps(original)
    def tensor_type(
        self: torch.Tensor, dtype: torch.dtype | str | None = None, *args: object, **kwargs: object
    ) -> str | torch.Tensor:
        if dtype is not None:
            return original(self, dtype, *args, **kwargs)
        name = str(original(self))
        return name if ".cuda." in name else name.replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = tensor_type  # type: ignore[assignment, method-assign]


# ---- megatron-core on the CPU ----


def _patch_collectives() -> None:
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.moe import token_dispatcher

    def sizes_to_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        # gloo's all-to-all needs its sizes as numbers; megatron-core converts only tensors on a GPU
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = sizes_to_numpy
    mappings._gather_along_first_dim = _for_unequal_sizes(mappings._gather_along_first_dim, _gather_unequal)
    mappings._reduce_scatter_along_first_dim = _for_unequal_sizes(
        mappings._reduce_scatter_along_first_dim, _reduce_scatter_unequal
    )
    for name in ("dist_reduce_scatter_func", "dist_all_gather_func"):
        setattr(param_and_grad_buffer, name, _unless_single_rank(getattr(param_and_grad_buffer, name)))


def _unless_single_rank(collective: Callable[..., object]) -> Callable[..., object]:
    # In a group of one rank the output is the input; gloo would copy all gradients, or weights, and copy them back.

    @functools.wraps(collective)
    def call(output: torch.Tensor, input_: torch.Tensor, **options: Any) -> object:
        in_place = output.data_ptr() == input_.data_ptr() and torch.distributed.get_world_size(options["group"]) == 1
        if in_place and not options.get("async_op"):
            return None
        return collective(output, input_, **options)

    return call


def _for_unequal_sizes(
    equal: Callable[..., torch.Tensor], unequal: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    # gloo gathers and scatters only tensors of equal sizes, but the number of tokens that the router sends to experts
    # differs between ranks.

    @functools.wraps(equal)
    def call(
        input_: torch.Tensor,
        group: Any,
        sizes: list[int] | None = None,
        use_global_buffer: bool = False,
        *,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
    ) -> torch.Tensor:
        sizes = sizes or output_split_sizes or input_split_sizes
        if sizes is None or len(set(sizes)) == 1:
            return equal(input_, group, None, use_global_buffer)
        return unequal(input_, group, sizes)

    return call


def _gather_unequal(input_: torch.Tensor, group: Any, sizes: list[int]) -> torch.Tensor:
    padded = input_.new_zeros(max(sizes), *input_.shape[1:])
    padded[: len(input_)] = input_
    parts = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _reduce_scatter_unequal(input_: torch.Tensor, group: Any, sizes: list[int]) -> torch.Tensor:
    whole = input_.clone()
    torch.distributed.all_reduce(whole, group=group)
    return whole.split(sizes)[group.rank()].clone()
