"""The number of hostile inputs of each kind."""

from __future__ import annotations

from tests.hostile.test_adapters import ADAPTERS
from tests.hostile.test_adapters import CHECKPOINTS as DAMAGED_CHECKPOINTS
from tests.hostile.test_checkpoints import CASES as PICKLES
from tests.hostile.test_commands import CORPUS as COMMANDS
from tests.hostile.test_models import AT_START, ON_RANKS
from tests.hostile.test_rows import PAIRS, ROWS


def test_the_corpus_is_large_enough() -> None:
    counts = {
        "command lines and configurations": len(COMMANDS),
        "models, tokenizers and templates": len(AT_START) + len(ON_RANKS),
        "adapters": len(ADAPTERS),
        "checkpoints": len(DAMAGED_CHECKPOINTS) + len(PICKLES),
        "rows": len(ROWS) + len(PAIRS),
    }
    assert sum(counts.values()) >= 500, counts
    assert min(counts.values()) >= 20, counts
