from __future__ import annotations

from tests.distributed.conftest import jobs, ranks

__all__ = ["jobs", "ranks"]
