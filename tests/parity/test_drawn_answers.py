"""Answers that a model draws: their rows have the tokens that were drawn, with the templates of all families in TRL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemo_kto.data.rows.records import KTORecord, RowError
from nemo_kto.data.tokens.chat_template import EncodedExample
from nemo_kto.data.tokens.drawn import read_drawn
from tests.unit.tools.rounds.test_drawn_answers import PROMPT, encoded, tools

pytestmark = pytest.mark.parity

CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}}
TEXT, CALLS, THOUGHTS = {"content": "Yes, it is."}, {"tool_calls": [CALL]}, {"reasoning_content": "June: 31 degrees."}
WRITTEN: list[dict[str, Any]] = [
    TEXT,
    {"content": "<think>\nJune: 31 degrees.\n</think>\n\nYes, it is."},
    {**TEXT, **THOUGHTS},
    {"content": "", **CALLS},
    {"content": "Let me see.", **CALLS},
    {"content": "Let me see.", **CALLS, **THOUGHTS},
]


def until_stop(ids: list[int], stop_ids: frozenset[int]) -> list[int]:
    """The tokens that a client draws."""
    return ids[: next((place for place, token in enumerate(ids, start=1) if token in stop_ids), None)]


def test_rows_have_the_drawn_tokens_with_every_template_of_trl() -> None:
    trl = pytest.importorskip("trl", reason="TRL ships the templates")
    from trl.chat_template_utils import gemma4_template

    files = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
    wrong, count = dict[str, str](), 0
    for file in files:
        made, encoder, stop_ids = tools(file.read_text())
        if file.stem.startswith(("gemma4", "diffusion_gemma")):
            made.response_template = gemma4_template  # type: ignore[attr-defined]  # as in the files of Gemma 4
        for number, message in enumerate(WRITTEN):
            (written,) = encoder.encode(
                [KTORecord(prompt=[*PROMPT], response=[{"role": "assistant", **message}], desirable=True, line=1)]
            )
            if isinstance(written, RowError):
                continue  # the template cannot write such an answer
            count += 1
            ids = until_stop(written.response_ids, stop_ids)
            given: Any = {"prompt_ids": written.prompt_ids, "stop_ids": stop_ids, "variables": {}}
            drawn = read_drawn(encoder, made, [*PROMPT], ids, **given)
            again = encoded(encoder, drawn.answer)
            found = again.response_ids[: len(ids)] if isinstance(again, EncodedExample) else []
            if not drawn.is_same or found != ids or again.prompt_ids != written.prompt_ids:  # type: ignore[union-attr]
                wrong[f"{file.stem} {number}"] = f"{made.decode(ids)} became {drawn.answer}"
    assert len(files) >= 70
    assert count > 280  # the others are refused, as the template leaves a part of them out
    assert wrong == {}
