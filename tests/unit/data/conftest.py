"""Property tests draw the same examples everywhere and are not timed: a busy machine is no failure."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.load_profile("repeatable")
