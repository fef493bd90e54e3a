"""Model-parallel degrees, process groups, and how a rank joins and leaves."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from nemo_kto.device import device
from nemo_kto.device.cpu import install_cpu_backend
from nemo_kto.errors import UserError
from nemo_kto.processes import rendezvous, watchdog
from nemo_kto.processes.signals import Stopped
from nemo_kto.processes.waits import Section

Item = TypeVar("Item")
_FOR_ALL = "at work for all ranks"  # what a rank does that the others wait for, where nothing more is said


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How one model is spread over ranks; what is left of the world is data parallel.

    Attributes:
        tensor: ranks that share every layer (tensor parallel).
        pipeline: ranks that hold consecutive groups of layers (pipeline parallel).
        context: ranks that share every sequence (context parallel).
        virtual: model chunks of each pipeline rank (virtual pipeline parallel); None for one.
        sequence_parallel: also shard the activations between the tensor-parallel regions over the sequence.
        expert: ranks over which the experts of a layer are shared out (expert parallel); of those of a stage.
        expert_tensor: ranks that share every expert; None for those that share every layer.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    virtual: int | None = None
    sequence_parallel: bool = False
    expert: int = 1
    expert_tensor: int | None = None

    @property
    def expert_ranks(self) -> int:
        """Number of ranks that hold one copy of a layer's experts."""
        return self.expert * (self.tensor if self.expert_tensor is None else self.expert_tensor)

    @property
    def model_ranks(self) -> int:
        """Number of ranks that evaluate a sequence together; the others have other sequences."""
        return self.tensor * self.pipeline * self.context


def init_distributed(*, layout: Layout, seed: int, timeout: timedelta = timedelta(minutes=30)) -> None:
    """Join the world and form the groups of ``layout``.

    The default process group is made by :func:`~nemo_kto.processes.rendezvous.join` unless it exists already.

    Args:
        layout: model-parallel degrees.
        seed: seed of every generator; ranks of one tensor-parallel group draw what megatron-core prescribes.
        timeout: how long a collective waits for a missing rank before it fails.

    Raises:
        ValueError: the world cannot be divided into whole copies of the model, or of its experts.
    """
    install_cpu_backend()
    device.select()
    if not dist.is_initialized():
        rendezvous.join("nccl" if device.on_gpu() else "gloo", timeout=timeout)
    if world_size() % layout.model_ranks:
        raise ValueError(
            f"tensor ({layout.tensor}) x pipeline ({layout.pipeline}) x context ({layout.context}) = {layout.model_ranks} "
            f"must divide the number of ranks, got {world_size()}; use a multiple of {layout.model_ranks} ranks"
        )
    if (of_stage := world_size() // layout.pipeline) % layout.expert_ranks:
        raise ValueError(
            f"expert ({layout.expert}) x expert tensor = {layout.expert_ranks} must divide the ranks of a pipeline stage, "
            f"got {of_stage}; use a smaller expert-parallel size"
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        virtual_pipeline_model_parallel_size=layout.virtual,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        distributed_timeout_minutes=max(1, int(timeout.total_seconds() // 60)),
        create_gloo_process_groups=uses_gloo_groups(),
    )
    seed += 100 * pipeline_stage()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def uses_gloo_groups() -> bool:
    """Whether megatron-core makes gloo groups beside those of the default backend: not where that is NCCL.

    megatron-core 0.16 and 0.19 use them only to gather the distributed optimizer's state on the host, for checkpoints of a
    form that is not written here. Each would take sockets and a thread of every rank.
    """
    return not device.on_gpu()


def destroy() -> None:
    """Leave the groups and the world."""
    watchdog.stop(holds_store=rendezvous.holds_store())
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    """This rank's number in the world; 0 before :func:`init_distributed`."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of ranks; 1 before :func:`init_distributed`."""
    return dist.get_world_size() if dist.is_initialized() else 1


def pipeline_stage() -> int:
    """This rank's pipeline stage, from 0."""
    return int(parallel_state.get_pipeline_model_parallel_rank())


def tensor_group(*, of_expert: bool) -> dist.ProcessGroup:
    """The ranks over which a layer is cut, or an expert."""
    if of_expert:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def gather(item: Item) -> list[Item]:
    """What every rank gives (anything that can be pickled), in the order of the ranks; collective."""
    items: list[Item | None] = [None] * world_size()
    dist.all_gather_object(items, item)
    return cast(list[Item], items)


def is_rank_zero() -> bool:
    """True on the one rank that logs and writes."""
    return rank() == 0


def is_first_of_machine() -> bool:
    """True on the first process of each machine, which fills what the others of that machine read."""
    return os.environ.get("LOCAL_RANK", str(rank())) == "0"


def largest(answer: int) -> int:
    """The largest answer of all ranks, on every rank; collective."""
    box = torch.full((), answer, device=device.current_device())  # filled there: the host waits for the answer only
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return int(box.item())


def sum_over_ranks(count: int) -> int:
    """The sum of all ranks' counts; collective."""
    box = torch.tensor(count, dtype=torch.int64, device=device.current_device())
    dist.all_reduce(box)
    return int(box)


def any_rank(*answers: bool) -> list[bool]:
    """For each answer, whether it is yes on any rank; collective."""
    box = torch.tensor([int(answer) for answer in answers], device=device.current_device())
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return [bool(answer) for answer in box.tolist()]


@dataclass(frozen=True)
class Problem:
    """Why a rank cannot go on, and whether that is a mistake of the user, or a signal that asked the run to stop."""

    text: str
    of_user: bool
    stopped: bool = False

    @classmethod
    def of(cls, error: BaseException) -> Problem:
        """That of an exception."""
        of_user, stopped = isinstance(error, UserError), isinstance(error, Stopped)
        return cls(str(error) if of_user or stopped else f"{type(error).__name__}: {error}", of_user, stopped)

    def error(self, failure: str = "{}") -> BaseException:
        """What is raised: a UserError, Stopped or a RuntimeError; ``failure`` with the text in the place of ``{}``."""
        if self.stopped:
            return Stopped(self.text)
        return (UserError if self.of_user else RuntimeError)(failure.format(self.text))

    def while_waiting_for(self, whom: str) -> BaseException:
        """What the ranks raise that only waited for the one with the problem."""
        return self.error("{}" if self.of_user else f"{whom} failed while the others waited for it: {{}}")


def attempt(action: Callable[[], object]) -> Problem | None:
    """Do it. Returns what went wrong, because the other ranks must hear of it before this one leaves."""
    try:
        action()
    except Exception as error:
        return Problem.of(error)
    return None


def raise_together(problem: Problem | None, failure: str) -> None:
    """Fail on every rank if any rank has a ``problem``; collective.

    Raises:
        UserError: some rank has one, and the first is a mistake of the user.
        RuntimeError: some rank has one. The message is ``failure``, with the first problem in the place of ``{}``.
    """
    if (first := _first_problem(problem)) is not None:
        raise first.error(failure)


def on_rank_zero(action: Callable[[], object], failure: str) -> None:
    """Do it on rank 0, for as long as it takes. All ranks succeed, or all fail as :func:`raise_together` does."""
    section = Section(doing=_FOR_ALL)
    problem = attempt(action) if is_rank_zero() else None
    section.finish()
    raise_together(problem, failure)


def from_rank_zero(action: Callable[[], Item], *, doing: str = _FOR_ALL) -> Item:
    """What ``action`` gives on rank 0 (anything that can be pickled), on every rank; collective.

    The others wait for as long as it takes while rank 0 is alive. If it fails, they fail with its message.

    Args:
        action: what is done on rank 0.
        doing: the same in words, for the error that rank 0 is gone: "comparing the run with its checkpoints".
    """
    if world_size() == 1:  # also before there is a process group
        return action()
    box: list[Any] = [None, None]  # the result, the problem
    section = Section(doing=doing)
    try:
        if is_rank_zero():
            box[0] = action()
    except BaseException as error:
        box[1] = Problem.of(error)
        raise
    finally:
        section.finish()
        dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise box[1].while_waiting_for("rank 0")
    result: Item = box[0]
    return result


@contextlib.contextmanager
def main_process_first(*, doing: str = _FOR_ALL) -> Iterator[None]:
    """Let the first process of each machine do the block (it fills a cache), then the others (they read it).

    The others wait for as long as it takes while the first one is alive. If it fails, they fail with its message.

    Args:
        doing: what the block does, for the error that a first process is gone: "tokenising the rows".
    """
    first, problem = is_first_of_machine(), None
    section = Section(doing=doing)
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
    """Every rank does the block, each in its own time, and waits for those that are alive; one that fails waits for nobody.

    Args:
        doing: what the block does, for the error that a rank is gone: "loading the weights".
    """
    section = Section(doing=doing)
    try:
        yield
    except BaseException:
        section.leave()
        raise
    section.finish()


def _first_problem(problem: Problem | None) -> Problem | None:
    """The problem of the first rank that has one, on every rank; collective."""
    return next((found for found in gather(problem) if found is not None), None)
