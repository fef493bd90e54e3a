"""Prompts of samples: those of validation rows and of a file, and those that cannot be used."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_kto.data.batches.dataset import KTOExample
from nemo_kto.errors import UserError
from nemo_kto.run.data import check_validation_rows
from nemo_kto.run.samples import SamplePrompts, Sampler, _row_text, build_prompts
from tests.helpers.messages import raises
from tests.helpers.tiny_models import EOS, TURN_END, TURN_START, make_tokenizer
from tests.unit.run.test_build_rows import resolved

KEY = "exp_manager.samples"


def examples(*prompts: str) -> list[KTOExample]:
    ids = make_tokenizer()(list(prompts), add_special_tokens=False)["input_ids"]
    return [KTOExample(prompt_ids=each, response_ids=[1], desirable=True) for each in ids]


def prompts_of(
    *overrides: str, train: Sequence[KTOExample] = (), has_template: bool = True, **sets: Sequence[KTOExample]
) -> SamplePrompts | None:
    run = resolved("model.data.seq_length=30", f"{KEY}.max_new_tokens=10", *(f"{KEY}.{each}" for each in overrides))
    splits: Any = SimpleNamespace(validation=sets, train=train)
    tokenizer = make_tokenizer()
    if not has_template:
        tokenizer.chat_template = None
    return build_prompts(run, tokenizer, splits, date=datetime(2026, 11, 26))


def test_there_are_two_by_default() -> None:
    found = prompts_of("max_new_tokens=64", rows=examples("a", "a", "b", "c"), other=examples("d"))
    assert found is None, "32 tokens are longer than a sequence"
    found = prompts_of(rows=examples("a", "a", "b", "c"), other=examples("d"))
    assert found is not None
    assert [prompt.text for prompt in found.prompts] == ["a", "b"]
    found = prompts_of(train=examples("e", "f", "g"))
    assert found is not None
    assert [prompt.text for prompt in found.prompts] == ["e", "f"]


def test_there_are_none_without_a_template_or_if_disabled() -> None:
    assert prompts_of(rows=examples("a"), has_template=False) is None
    assert prompts_of("count=0", rows=examples("a")) is None


def test_the_first_different_prompts_of_each_set_are_taken() -> None:
    found = prompts_of("count=2", one=examples("a", "a", "b", "c"), other=examples("x" * 21, "d"))
    assert found is not None
    assert [prompt.text for prompt in found.prompts] == ["a", "b", "d"], "the long one leaves no room"
    assert {prompt.messages for prompt in found.prompts} == {None}
    assert found.decoding.stop_ids == {make_tokenizer().convert_tokens_to_ids(TURN_END)}
    assert (found.decoding.max_new_tokens, found.decoding.seq_length) == (10, 30)


def test_prompts_of_a_file_follow(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("who?\nwhat?\n")
    found = prompts_of("count=1", f"prompts={file}", rows=examples("a"))
    assert found is not None
    assert [prompt.text for prompt in found.prompts] == ["a", "who?", "what?"]


def test_prompts_that_leave_no_room_are_errors(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(f"who?\n{'x' * 25}\n{'x' * 20}\n")
    with raises(UserError, f"{KEY}.prompts", f"{file}:2: ", "model.data.seq_length", f"{KEY}.max_new_tokens = 20", "25"):
        prompts_of(f"prompts={file}")
    with raises(UserError, f"{KEY}.max_new_tokens", "10", "model.data.seq_length=30", "lower"):
        prompts_of("count=1", rows=examples("x" * 21))


def test_answers_are_shown_with_special_tokens_but_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer()
    found = prompts_of("count=1", rows=examples("a"))
    assert found is not None
    ids = tokenizer([f"{TURN_START}Why?{EOS} Ok{TURN_END}", f" Cut{EOS}"], add_special_tokens=False)["input_ids"]
    monkeypatch.setattr("nemo_kto.run.samples.generate", lambda *_, **__: ids)
    prompts = SamplePrompts([found.prompts[0]] * 2, found.decoding)
    given: Any = {"engine": None, "collate": {}, "must_stop": None, "is_policy": True}
    sampler = Sampler(tokenizer=tokenizer, samples=prompts, starts_as="policy", **given)
    answers = sampler.answers(3)
    assert [(each.answer, each.ended) for each in answers] == [(f"{TURN_START}Why?{EOS} Ok", True), (f" Cut{EOS}", False)]
    assert _row_text(tokenizer, ids[0], [1]) == f"{TURN_START}Why?{EOS} Ok"


@pytest.mark.parametrize(("key", "value", "without"), [("count", "3", "0"), ("prompts", "asked.txt", "null")])
def test_a_run_without_validation_rows_takes_no_samples(key: str, value: str, without: str) -> None:
    run, data = resolved(f"{KEY}.{key}={value}"), SimpleNamespace(validation={})
    with raises(UserError, "model.data.splits_string", f"{KEY}.{key}={value}", f"{KEY}.{key}={without}"):
        check_validation_rows(run.cfg, data)  # type: ignore[arg-type]
