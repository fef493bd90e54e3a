"""Parallel layout, setup and teardown of process groups, and error handling across ranks."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from nemo_kto.device import device
from nemo_kto.device.patches import install_cpu_backend
from nemo_kto.errors import UserError
from nemo_kto.processes import rendezvous, watchdog
from nemo_kto.processes.signals import Stopped
from nemo_kto.utils.fields import echo

Item = TypeVar("Item")
_FOR_ALL = "working for all ranks"  # default description of work for which the other ranks wait


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Model-parallel sizes; the remaining factor of the world size is data parallel."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    virtual: int | None = None  # number of model chunks of each pipeline rank (virtual pipeline parallelism); None for one
    sequence_parallel: bool = False  # also shard the activations between the tensor-parallel regions over the sequence
    expert: int = 1  # number of ranks of a stage among which the experts of a layer are partitioned
    expert_tensor: int | None = None  # tensor-parallel size of the experts; None for tensor
    optimizer_instances: int = 1  # groups of data-parallel ranks, over each of which the optimizer state is sharded

    @property
    def expert_ranks(self) -> int:
        """Number of ranks that hold one copy of a layer's experts."""
        return self.expert * (self.tensor if self.expert_tensor is None else self.expert_tensor)

    @property
    def model_ranks(self) -> int:
        """Number of ranks that process a sequence together; other ranks have other sequences."""
        return self.tensor * self.pipeline * self.context


def init_distributed(
    *, layout: Layout, seed: int, timeout: timedelta = timedelta(minutes=30), settings: Mapping[str, object] | None = None
) -> None:
    """Initialise the process groups of ``layout`` and seed all random generators.

    A default process group that exists already is used. ``timeout`` is the time that a collective waits for a missing rank
    before it fails. Raises ValueError if the world size does not fit the layout, and UserError on every rank if
    ``settings``, key -> value, are not the same on all ranks.
    """
    install_cpu_backend()
    device.select()
    if not dist.is_initialized():
        rendezvous.join("nccl" if device.on_gpu() else "gloo", timeout=timeout)
    if settings is not None:
        _check_same(settings)
    if world_size() % layout.model_ranks:
        raise ValueError(
            f"tensor ({layout.tensor}) x pipeline ({layout.pipeline}) x context ({layout.context}) = {layout.model_ranks} "
            f"must divide the number of ranks, got {world_size()} ranks; use a multiple of {layout.model_ranks}"
        )
    if (stage_ranks := world_size() // layout.pipeline) % layout.expert_ranks:
        raise ValueError(
            f"expert ({layout.expert}) x expert tensor = {layout.expert_ranks} must divide the number of ranks per "
            f"pipeline stage, got {stage_ranks} ranks; use a smaller expert-parallel size"
        )
    for sizes in (layout.tensor * layout.context, layout.expert_ranks):
        if stage_ranks // sizes % layout.optimizer_instances:
            raise ValueError(
                f"optimizer_instances must divide the {stage_ranks // sizes} ranks with the same weights, got "
                f"{layout.optimizer_instances}; use a smaller number"
            )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        virtual_pipeline_model_parallel_size=layout.virtual,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        num_distributed_optimizer_instances=layout.optimizer_instances,
        distributed_timeout_minutes=max(1, int(timeout.total_seconds() // 60)),
        create_gloo_process_groups=uses_gloo_groups(),
    )
    seed += 100 * pipeline_stage()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def _check_same(settings: Mapping[str, object]) -> None:
    """Raise UserError if ranks have different settings: the groups of different layouts would wait for each other."""
    of_ranks = gather(dict(settings))
    differing = [key for key in settings if any(other[key] != of_ranks[0][key] for other in of_ranks)]
    found: dict[str, list[int]] = {}  # values of the differing keys -> ranks with them
    for rank, own in enumerate(of_ranks):
        found.setdefault(" ".join(f"{key}={echo(own[key])}" for key in differing), []).append(rank)
    if differing:
        got = " and ".join(f"{values} on rank {', '.join(map(str, of_values))}" for values, of_values in found.items())
        remedy = "set these keys on the command line, because recipe=auto chooses them for the GPU of each rank"
        raise UserError(f"{', '.join(differing)} must be the same on all ranks, got {got}; {remedy}")


def uses_gloo_groups() -> bool:
    """Return whether megatron-core creates gloo groups besides those of the default backend: not if that is NCCL.

    megatron-core 0.16 and 0.19 use them only to gather the distributed optimizer's state on the host, for a checkpoint
    format that this package does not write. Each group would take sockets and a thread of every rank.
    """
    return not device.on_gpu()


def destroy() -> None:
    watchdog.stop(hosts_store=rendezvous.hosts_store())
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    """Return this process's rank in the world; 0 before :func:`init_distributed`."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of ranks; 1 before :func:`init_distributed`."""
    return dist.get_world_size() if dist.is_initialized() else 1


def pipeline_stage() -> int:
    return int(parallel_state.get_pipeline_model_parallel_rank())


def optimizer_instances() -> int:
    """Return the number of groups of data-parallel ranks, over each of which the optimizer state is sharded."""
    whole, one = (
        parallel_state.get_data_parallel_world_size(with_context_parallel=True, partial_data_parallel=partial)
        for partial in (False, True)
    )
    return int(whole // one)


def max_over_optimizer_instances(value: float) -> float:
    """Return the maximum of ``value`` over the ranks with the same optimizer state; collective if there are several."""
    if optimizer_instances() == 1:
        return value
    reduced = torch.full((), value, dtype=torch.float64, device=device.current_device())
    dist.all_reduce(reduced, op=dist.ReduceOp.MAX, group=parallel_state.get_inter_distributed_optimizer_instance_group())
    return float(reduced.item())


def tensor_group(*, of_expert: bool) -> dist.ProcessGroup:
    if of_expert:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def gather(item: Item) -> list[Item]:
    """Gather a picklable object from every rank, in the order of the ranks; collective."""
    if world_size() == 1:  # also before there is a process group
        return [item]
    items: list[Item | None] = [None] * world_size()
    dist.all_gather_object(items, item)
    return cast(list[Item], items)


def is_rank_zero() -> bool:
    """Return True on rank 0, which logs and writes files."""
    return rank() == 0


def is_first_of_machine() -> bool:
    """Return True on the first process of each machine, which fills caches that the others of that machine read."""
    return os.environ.get("LOCAL_RANK", str(rank())) == "0"


def max_over_ranks(value: int, *, group: dist.ProcessGroup | None = None) -> int:
    """Return the maximum of ``value`` over the ranks of a group, by default over all ranks; collective."""
    # filled on the device, so that the host waits only for the result
    reduced = torch.full((), value, device=device.current_device())
    dist.all_reduce(reduced, op=dist.ReduceOp.MAX, group=group)
    return int(reduced.item())


def sum_over_ranks(count: int) -> int:
    """Return the sum of ``count`` over all ranks; collective."""
    total = torch.tensor(count, dtype=torch.int64, device=device.current_device())
    dist.all_reduce(total)
    return int(total)


def any_rank(*flags: bool) -> list[bool]:
    """Return for each flag whether it is True on any rank; collective."""
    reduced = torch.tensor([int(flag) for flag in flags], device=device.current_device())
    dist.all_reduce(reduced, dist.ReduceOp.MAX)
    return [bool(flag) for flag in reduced.tolist()]


class Problem(NamedTuple):
    """Error of one rank, in a form that can be sent to the other ranks."""

    text: str
    kind: type[UserError] | type[Stopped] | type[RuntimeError]  # the last one stands for all other exceptions

    @classmethod
    def of(cls, error: BaseException) -> Problem:
        for kind in (UserError, Stopped):
            if isinstance(error, kind):
                return cls(str(error), kind)
        return cls(f"{type(error).__name__}: {error}", RuntimeError)

    def error(self, failure: str = "{}") -> BaseException:
        """Return an exception of this kind; except for Stopped, ``{}`` in ``failure`` is replaced by the text."""
        return self.kind(self.text if self.kind is Stopped else failure.format(self.text))

    def while_waiting_for(self, whom: str) -> BaseException:
        """Return the exception for ranks that only waited for ``whom``."""
        return self.error("{}" if self.kind is UserError else f"{whom} failed while the others waited for it: {{}}")


def attempt(action: Callable[[], object]) -> Problem | None:
    """Run ``action`` and return its error instead of raising: the other ranks must receive it before this rank exits."""
    try:
        action()
    except Exception as error:
        return Problem.of(error)
    return None


def raise_together(problem: Problem | None, failure: str) -> None:
    """Raise the error of the first rank with a ``problem`` on every rank, see :meth:`Problem.error`; collective."""
    if (first := _first_problem(problem)) is not None:
        raise first.error(failure)


def on_rank_zero(action: Callable[[], object], failure: str) -> None:
    """Run ``action`` on rank 0 without a time limit; either all ranks succeed or all fail as in :func:`raise_together`."""
    if (problem := from_rank_zero(lambda: attempt(action))) is not None:
        raise problem.error(failure)


def from_rank_zero(action: Callable[[], Item], *, doing: str = _FOR_ALL) -> Item:
    """Run ``action`` on rank 0 and return its result, a picklable object, on every rank; collective.

    The other ranks wait without a time limit while rank 0 is alive. If rank 0 fails, they fail with its message. ``doing``
    describes the action in the error message if rank 0 dies: "comparing the run with its checkpoints".
    """
    if world_size() == 1:  # also before there is a process group
        return action()
    outcome: list[Any] = [None, None]  # the result, the problem
    section = watchdog.section(doing=doing)
    try:
        if is_rank_zero():
            outcome[0] = action()
    except BaseException as error:
        outcome[1] = Problem.of(error)
        raise
    finally:
        section.finish()
        dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1].while_waiting_for("rank 0")
    return cast(Item, outcome[0])


@contextlib.contextmanager
def main_process_first(*, doing: str = _FOR_ALL) -> Iterator[None]:
    """Run the block on the first process of each machine, which fills a cache, then on the others, which read it.

    The others wait without a time limit while the first one is alive. If it fails, they fail with its message. ``doing`` is
    as for :func:`from_rank_zero`.
    """
    first, problem = is_first_of_machine(), None
    section = watchdog.section(doing=doing)
    try:
        if first:
            yield
    except BaseException as error:
        problem = Problem.of(error)
        raise
    finally:
        section.finish()
        problem = _first_problem(problem)
    if problem is not None:
        raise problem.while_waiting_for("the first process of a machine")
    if not first:
        yield


@contextlib.contextmanager
def on_all_ranks(*, doing: str) -> Iterator[None]:
    """Run the block on every rank and wait until all ranks have finished it, without a time limit while they are alive.

    A rank whose block fails does not wait. ``doing`` is as for :func:`from_rank_zero`.
    """
    section = watchdog.section(doing=doing)
    try:
        yield
    except BaseException:
        section.leave()
        raise
    section.finish()


def _first_problem(problem: Problem | None) -> Problem | None:
    """Return the problem of the first rank that has one, on every rank; collective."""
    return next((found for found in gather(problem) if found is not None), None)
