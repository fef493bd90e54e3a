"""These tests need the environment of `make test-emulated`; elsewhere they are not collected."""

from __future__ import annotations

import sys

collect_ignore_glob = [] if "tests.emulated_cuda.start" in sys.modules else ["test_*.py"]
