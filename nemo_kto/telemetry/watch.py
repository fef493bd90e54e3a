"""Observation of a training: timers of its phases, its time limit, throughput, slow ranks and loss spikes."""

from __future__ import annotations

import contextlib
import logging
import math
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from nemo_kto.utils import lazy_import

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

logger = logging.getLogger(__name__)

OWN_PHASES = ("data", "forward", "reference_swap")
"""Phases in which a rank waits only for the ranks of its tensor- and context-parallel groups. In all other phases,
collectives make fast ranks take as long as the slowest."""
INTERVAL = 10  # steps between two comparisons
SLOW = 1.5  # a straggler takes longer than this multiple of the median of the other ranks with the same work
_SHARE = 0.1  # and is slower by more than this fraction of the step time; smaller delays do not justify a warning

_HISTORY, _MIN_HISTORY = 50, 20  # number of previous steps with which a loss is compared, and its minimum
_DEVIATIONS = 10  # median absolute deviations above the median: 6.7 standard deviations of a normal distribution
_MIN_DEVIATION = 1e-2  # minimum deviation as a fraction of the median, because the loss of a converged run hardly varies
_PAUSE = 50  # steps without a further warning after a warning

_DURATION = re.compile(r"(\d+):(\d{1,2}):(\d{1,2}):(\d{1,2})")


@dataclass(kw_only=True, eq=False)
class PhaseTimers:
    """Wall-clock seconds of the phases of a step, such as "reference"; the time of a nested phase is counted in both phases.

    With a device clock, a time is only reached when the device has finished the work queued before, so that the time of a
    kernel belongs to the phase that queued it.
    """

    observe: Callable[[str], AbstractContextManager[object]] = contextlib.nullcontext  # context for each phase, by name
    clock: Callable[[], Any] = time.perf_counter  # the difference of two times is in seconds

    def __post_init__(self) -> None:
        self._spans: list[tuple[str, Any, Any]] = []  # (name, begin, end)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the duration of the block to phase ``name``, even if the block raises."""
        with self.observe(name):
            begin = self.clock()
            try:
                yield
            finally:
                self._spans.append((name, begin, self.clock()))

    def report_and_reset(self) -> dict[str, float]:
        """Return the seconds by phase since the last report, in order of their first end; waits for the device."""
        spans, self._spans = self._spans, []
        report: dict[str, float] = {}
        for name, begin, end in spans:
            report[name] = report.get(name, 0.0) + (end - begin)
        return report


def parse_duration(text: str) -> int:
    """Return the seconds of a duration DD:HH:MM:SS, such as "00:03:45:00"; ValueError for another format or range."""
    if match := _DURATION.fullmatch(text.strip()):
        days, hours, minutes, seconds = map(int, match.groups())
        if hours < 24 and minutes < 60 and seconds < 60:
            return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    raise ValueError(f"a duration must be written DD:HH:MM:SS (days:hours:minutes:seconds), got {text!r}; e.g. 00:03:45:00")


def duration_text(seconds: float) -> str:
    """Format a duration in seconds, minutes or hours: 12 s, 12 min, 3.4 h."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


class StopReason(NamedTuple):
    """Reason why a run ends before its last step."""

    text: str
    early: bool  # the run must end at once, with a checkpoint but without validation and export


@dataclass(kw_only=True, eq=False)
class RunTimer:
    """Timer that decides, equally on all ranks, whether a run must stop because of its time limit or a signal.

    Raises ValueError if ``max_time`` has another format.
    """

    max_time: str | None  # time limit as DD:HH:MM:SS; None for no limit
    started: float | None = None  # start time by ``clock``; None for the time at which :meth:`start_time` is called
    received: Callable[[], int] | None = None  # number of the stop signal that this rank received, or 0
    agree: Callable[[int], int] | None = None  # maximum over all ranks, so that all stop; None for a single rank
    requeue: bool = False  # the job is requeued at once, so that the run also ends early at the time limit
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._limit = None if self.max_time is None else parse_duration(self.max_time)

    def start_time(self) -> None:
        """Set the start time to now, unless ``started`` is already set."""
        if self.started is None:
            self.started = self.clock()

    def stop_reason(self) -> StopReason | None:
        """Return why the run must stop now, or None; collective if ``agree`` is set.

        Raises RuntimeError if there is a time limit, but no start time.
        """
        number = self.received() if self.received is not None else 0
        time_is_over = False
        if not number and self._limit is not None:  # a signal takes precedence, because it leaves less time
            if self.started is None:
                raise RuntimeError("start_time() must be called before stop_reason()")
            time_is_over = self.clock() - self.started >= self._limit
        reason = 2 * number or int(time_is_over)
        if self.agree is not None:
            reason = self.agree(reason)
        if reason == 0:
            return None
        if reason == 1:
            return StopReason(f"max_time={self.max_time}", early=self.requeue)
        return StopReason(signal.Signals(reason // 2).name, early=True)


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """Times of one rank, in seconds per step on average."""

    host: str
    stage: int  # pipeline stage; different stages have different work
    step: float  # the whole step
    phases: Mapping[str, float]  # time of each phase by name

    @property
    def own(self) -> float:
        """Seconds spent in :data:`OWN_PHASES`."""
        return sum(self.phases.get(name, 0.0) for name in OWN_PHASES)


def slowest(times: Sequence[RankTimes]) -> dict[str, float]:
    """Return PHASE_max (seconds) and PHASE_max_rank (the slowest rank) for each phase; ``times`` is in rank order."""
    report: dict[str, float] = {}
    for name in dict.fromkeys(name for one in times for name in one.phases):
        seconds = [one.phases.get(name, 0.0) for one in times]
        report |= {f"{name}_max": max(seconds), f"{name}_max_rank": seconds.index(max(seconds))}
    return report


class StragglerFinder:
    """Detector of ranks that are slow in two consecutive comparisons; each rank is reported once."""

    def __init__(self) -> None:
        self._suspected: set[int] = set()
        self._reported: set[int] = set()

    def find(self, times: Sequence[RankTimes]) -> list[str]:
        """Return a warning for each new straggler; ``times`` is in rank order."""
        slow: dict[int, float] = {}  # rank -> median of the other ranks with the same work
        for rank, mine in enumerate(times):
            others = [one.own for other, one in enumerate(times) if other != rank and one.stage == mine.stage]
            typical = median(others) if others else math.inf
            if mine.own > SLOW * typical and mine.own - typical > _SHARE * mine.step:
                slow[rank] = typical
        new = [rank for rank in slow if rank in self._suspected - self._reported]
        self._suspected = set(slow)
        self._reported |= set(new)
        return [_straggler_warning(rank, times, slow[rank]) for rank in new]


def _straggler_warning(rank: int, times: Sequence[RankTimes], typical: float) -> str:
    mine = times[rank]
    parts = ", ".join(f"{name} {mine.phases[name]:.2f} s" for name in OWN_PHASES if name in mine.phases)
    return (
        f"rank {rank} of {len(times)} on {mine.host} is slower than the others with the same work: it needs {mine.own:.2f} "
        f"s of each step ({parts}), they need {typical:.2f} s (median, over {2 * INTERVAL} steps), and all ranks wait for it"
    )


class LossSpikes:
    """Detector of spikes in the training loss.

    A spike is a loss above the median of the last 50 losses plus ten times their median absolute deviation; single spikes
    hardly affect this bound. A non-finite loss does not count as a spike: such a step is skipped and reported separately.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_HISTORY)
        self._quiet_until = 0

    def watch(self, step: int, loss: float) -> None:
        """Add the loss of a step, and log a warning if it is a spike, unless there was a warning in the last 50 steps."""
        if not math.isfinite(loss):
            return
        losses = list(self._losses)
        self._losses.append(loss)
        if len(losses) < _MIN_HISTORY:
            return
        middle = median(losses)
        deviation = max(median(abs(one - middle) for one in losses), _MIN_DEVIATION * abs(middle))
        if loss > middle + _DEVIATIONS * deviation and step >= self._quiet_until:
            self._quiet_until = step + _PAUSE
            previous = f"the median of the last {len(losses)} steps is {middle:.4g}"
            logger.warning(f"step {step}: the loss jumped to {loss:.4g}; {previous}")


# Peak FLOP/s in dense bf16 with fp32 accumulation, of GPUs that are missing from Lightning's table or for which it gives the
# value with sparsity, for two GPUs, or without tensor cores. From NVIDIA's datasheets; where these only give the value with
# sparsity, it is halved, as their footnotes say.
_BF16_PEAKS = {
    "NVIDIA B200": 2250e12,  # Blackwell architecture technical brief, HGX B200
    "NVIDIA GB200": 2500e12,  # GB200 NVL72 datasheet, for one of its 72 GPUs
    "NVIDIA GH200 480GB": 989.5e12,  # GH200 Grace Hopper Superchip datasheet; the three variants differ in memory
    "NVIDIA GH200 120GB": 989.5e12,
    "NVIDIA GH200 144G HBM3e": 989.5e12,
    "NVIDIA H200": 989.5e12,  # H200 Tensor Core GPU datasheet
    "NVIDIA H200 NVL": 835.5e12,
    "NVIDIA H100 NVL": 835.5e12,  # H100 Tensor Core GPU datasheet
    "NVIDIA L40S": 362.05e12,  # L40S datasheet
    "NVIDIA L40": 181.05e12,  # L40 datasheet
    "NVIDIA A40": 149.7e12,  # A40 datasheet
    "NVIDIA A10": 125e12,  # A10 datasheet
    "NVIDIA RTX A6000": 154.8e12,  # GA102 architecture whitepaper, appendix
    "NVIDIA RTX 6000 Ada Generation": 364.2e12,  # RTX 6000 Ada datasheet
    "NVIDIA GeForce RTX 4090": 165.2e12,  # Ada architecture whitepaper, appendix
    "NVIDIA GeForce RTX 3090": 71e12,  # GA102 architecture whitepaper
}


def throughput(
    sums: Mapping[str, float], *, seconds: float, world_size: int, peak_flops: float | None = None
) -> dict[str, float]:
    """Return the throughput of steps, from their wall-clock time and their sums over all ranks.

    The sums are ``tokens`` and ``kl_tokens`` (of the KL examples), which exclude padding, ``padded_tokens``, which is both
    with padding but without ``shared_tokens``, those of shared prompts, ``flops``, and ``saved_flops``, those that shared
    prompts would have needed in addition. ``peak_flops`` is the FLOP/s of one device (:func:`device_peak_flops`). The names
    are tokens_per_sec, tokens_per_sec_per_rank, padding_fraction (0 to 1), shared_fraction (saved FLOPs as a fraction of
    those without shared prompts, 0 to 1) if a prompt is shared, kl_tokens_per_sec if there are KL examples, and mfu (model
    FLOPs utilisation: model FLOP/s as a fraction of the peak of all devices, 0 to 1) if the peak is known.
    """
    tokens, kl_tokens = int(sums["tokens"]), int(sums.get("kl_tokens", 0))
    report = {
        "tokens_per_sec": tokens / seconds,
        "tokens_per_sec_per_rank": tokens / seconds / world_size,
        "padding_fraction": 1.0 - (tokens + kl_tokens - int(sums.get("shared_tokens", 0))) / int(sums["padded_tokens"]),
    }
    if saved := sums.get("saved_flops", 0):
        report["shared_fraction"] = saved / (sums["flops"] + saved)
    if kl_tokens:
        report["kl_tokens_per_sec"] = kl_tokens / seconds
    if peak_flops:
        report["mfu"] = sums["flops"] / seconds / (peak_flops * world_size)
    return report


def device_peak_flops(device: torch.device, dtype: torch.dtype, *, name: str) -> float | None:
    """Return the peak FLOP/s without sparsity of a device with torch's ``name``; None if no table has it for this dtype."""
    if device.type == "cpu":
        return None
    if dtype == torch.bfloat16 and name in _BF16_PEAKS:
        return _BF16_PEAKS[name]
    from lightning_fabric.utilities.throughput import get_available_flops

    try:
        return get_available_flops(device, dtype)
    except RuntimeError:  # a listed device, but not for this dtype
        return None
