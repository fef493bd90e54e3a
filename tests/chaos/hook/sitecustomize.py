"""Kills processes of a run, or runs a shell command, when one of them reaches a given point. Python imports it at its start.

Nothing of the product knows of it: it listens to Python's audit events (files opened, folders renamed) and wraps a few
functions from outside. The environment says what is to happen (see tests/chaos/job.py):

    CHAOS_FOLDER  gets pids/NAME, a link to the number of each process (launcher, rank0, ...), and a file ``fired``
    CHAOS         JSON: at (which process), point, count (of times it has reached the point), victims, shell
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

_FOLDER = os.environ.get("CHAOS_FOLDER", "")
_WHO = f"rank{os.environ['RANK']}" if "RANK" in os.environ else "launcher"
_ORDER: dict[str, Any] = json.loads(os.environ.get("CHAOS", "null")) or {}
_WRITES = os.O_WRONLY | os.O_RDWR
# Point: the files whose opening is one. The step of a checkpoint is added to the name: save_write_4.
_WRITTEN = {
    "cache_write": re.compile(r"/cache/[^/]*arrow"),
    "reference_write": re.compile(r"/cache/reference/"),
    "save_write": re.compile(r"/run/checkpoints/[^/]*step_0*(\d+)[^/]*/state/"),
    "export_write": re.compile(r"/run/[^/]*hf[^/]*/"),
    "samples_write": re.compile(r"/run/samples\.jsonl$"),
    "report_write": re.compile(r"/run/\.report\.(?:html|md)-"),
}
_READ = {"rows_read": re.compile(r"/rows\.jsonl$"), "load": re.compile(r"/run/checkpoints/step_\d+/state/")}
# Point before and after a rename, by the name that is given.
_PUBLISHED = {
    ("cache_publish", "cache_published"): re.compile(r"/cache/[^/]*arrow$"),
    ("reference_publish", "reference_published"): re.compile(r"/cache/reference/.*\.npy$"),
    ("save_publish", "save_published"): re.compile(r"/run/checkpoints/step_0*(\d+)$"),
    ("export_publish", "export_published"): re.compile(r"/run/hf$"),
    ("report_publish", "report_published"): re.compile(r"/run/report\.(?:html|md)$"),
}
_REMOVED = re.compile(r"/run/checkpoints/step_\d+$")  # by the name that is taken away
_counts: Counter[str] = Counter()


def _reach(point: str) -> None:
    """This process is at ``point``."""
    if _ORDER.get("at") != _WHO or _ORDER["point"] != point:
        return
    _counts[point] += 1
    if _counts[point] != _ORDER["count"]:
        return
    with open(os.path.join(_FOLDER, "fired"), "w") as note:
        note.write(point)
    if _ORDER["shell"]:
        subprocess.run(_ORDER["shell"], shell=True, check=True)
    for victim in sorted(_ORDER["victims"], key=lambda each: each == _WHO):  # this process last
        with contextlib.suppress(OSError):
            os.kill(int(os.readlink(os.path.join(_FOLDER, "pids", victim))), signal.SIGKILL)


def _listen(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str | os.PathLike):
        path = os.path.abspath(os.fspath(arguments[0]))
        for point, pattern in (_WRITTEN if arguments[2] & _WRITES else _READ).items():
            if match := pattern.search(str(path)):
                _reach("_".join((point, *match.groups())))


def _wrap(module: str, owner: str, name: str, before: Callable[..., None], after: Callable[..., None] | None = None) -> None:
    """Call ``before`` and ``after`` with the arguments of a function of a module, or of a class in it."""
    holder = sys.modules[module]
    holder = getattr(holder, owner) if owner else holder
    wrapped = getattr(holder, name)

    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        before(*arguments, **keywords)
        result = wrapped(*arguments, **keywords)
        if after is not None:
            after(*arguments, **keywords)
        return result

    setattr(holder, name, wrapper)


def _renaming(side: int) -> Callable[..., None]:
    """The function called before (0) or after (1) a rename."""

    def note(source: Any, target: Any, **_: Any) -> None:
        if side == 0 and _REMOVED.search(os.path.abspath(source)):
            _reach("remove")
        for points, pattern in _PUBLISHED.items():
            if match := pattern.search(os.path.abspath(target)):
                _reach("_".join((points[side], *match.groups())))

    return note


def _start() -> None:
    try:
        os.symlink(str(os.getpid()), os.path.join(_FOLDER, "pids", _WHO))
    except FileExistsError:  # a process that one of ours has started
        return
    if not _ORDER:
        return
    sys.addaudithook(_listen)
    for name in ("rename", "replace"):
        _wrap("os", "", name, _renaming(0), _renaming(1))
    _wrap("nemo_kto.telemetry.watch", "PhaseTimers", "phase", lambda _, name: _reach(name))
    schedules = "megatron.core.pipeline_parallel.schedules"
    _wrap(schedules, "", "forward_step", lambda *_, **__: _reach("forward"))
    _wrap(schedules, "", "backward_step", lambda *_, **__: _reach("backward"))


# Processes of a run are forked from one that has imported their modules (tests/helpers/fork_server.py); others have not.
if _FOLDER and "nemo_kto.telemetry.watch" in sys.modules:
    _start()
