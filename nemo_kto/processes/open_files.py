"""The limit on open files of a process (``ulimit -n``): raised if permitted, and reported if it is too low."""

from __future__ import annotations

import errno
import resource

from nemo_kto.errors import UserError

MIN_FILES = 256  # a run of two ranks has a hundred files and sockets open, and each further rank adds about ten
_WANTED = 2**16
_REMEDY = "raise it before the start, e.g. ulimit -n 4096"


def limit_mistake() -> str | None:
    """Return constraint, value and remedy if this user may not open enough files for a run; else None."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= MIN_FILES:
        return None
    return f"must be at least {MIN_FILES} (open files of a process), got {hard}; {_REMEDY}"


def raise_limit() -> None:
    """Raise the limit of this process to its hard limit, at most 65536: many shells and services set a lower soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def explained(error: Exception) -> Exception:
    """Return a UserError that names the limit if it caused the error; else the error itself."""
    cause: BaseException | None = error
    seen: list[BaseException] = []  # guards against a cycle, as of an error raised from its own consequence
    while cause is not None and cause not in seen:
        seen.append(cause)
        if (isinstance(cause, OSError) and cause.errno == errno.EMFILE) or "Too many open files" in str(cause):
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            found = UserError(f"ulimit -n must allow all files and sockets of a rank, got {soft} ({error}); {_REMEDY}")
            found.__cause__ = error
            return found
        cause = cause.__cause__ or cause.__context__
    return error
