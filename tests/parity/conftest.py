from __future__ import annotations

from tests.distributed.conftest import ranks

__all__ = ["ranks"]
