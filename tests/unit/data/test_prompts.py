"""Files of prompts, their token ids, and the tokens that end an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_kto.data.rows import reader
from nemo_kto.data.rows.reader import MAX_PROMPTS, read_prompts
from nemo_kto.data.rows.records import DataError, PromptRecord
from nemo_kto.data.tokens.chat_template import EncodedExample, RecordEncoder
from nemo_kto.utils import files
from tests.helpers.messages import raises
from tests.unit.data.test_chat import ANSWER, USER, record
from tests.unit.data.tiny_data import chatml_tokenizer, llama_tokenizer, write_rows

SYSTEM = {"role": "system", "content": "Be brief."}


def write(file: Path, *rows: Any) -> Path:
    return write_rows(file, rows)


def test_a_text_has_one_prompt_per_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffWhat is a lake?\r\n\r\n  Name {a} fruit \nÄpfel".encode())
    found = [(each.prompt, each.line) for each in read_prompts(file)]
    assert found == [("What is a lake?", 1), ("Name {a} fruit", 3), ("Äpfel", 4)]


def test_rows_give_the_prompt_without_its_answer(tmp_path: Path) -> None:
    file = write(
        tmp_path / "rows.jsonl",
        {"prompt": "text", "response": "ignored", "label": True},
        {"prompt": [SYSTEM, USER]},
        {"messages": [USER, ANSWER, USER, ANSWER], "label": False},
        {"messages": [USER], "tools": [{"type": "function"}]},
    )
    found = read_prompts(file)
    assert [each.prompt for each in found] == ["text", [SYSTEM, USER], [USER, ANSWER, USER], [USER]]
    assert found[3].template == {"tools": [{"type": "function"}]}


def test_cells_of_a_table_may_be_messages(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text('id,prompt\n2,"[{""role"": ""user"", ""content"": ""Who?""}]"\n', encoding="utf-8")
    assert [each.prompt for each in read_prompts(file, ["prompt"])] == [[{"role": "user", "content": "Who?"}]]
    with raises(DataError, "rows.csv:2", "model.data.json_columns=[prompt]"):
        read_prompts(file)


def test_broken_rows_are_listed_together(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", {"question": "?"}, {"prompt": "good"}, {"prompt": ""}, {"messages": [ANSWER]})
    with raises(DataError, "3 broken rows", f"{file}:1: ", '"prompt"', "question", f"{file}:3: ", f"{file}:4: "):
        read_prompts(file)


@pytest.mark.parametrize(
    ("content", "parts"),
    [(None, ["cannot be read"]), (b"", ["at least one"]), (b"\xff\xfe", ["UTF-8"]), (b"?\n" * (MAX_PROMPTS + 1), ["1,000"])],
)
def test_an_unusable_file_is_named(tmp_path: Path, content: bytes | None, parts: list[str]) -> None:
    file = tmp_path / "prompts.txt"
    if content is not None:
        file.write_bytes(content)
    with raises(DataError, str(file), *parts):
        read_prompts(file)


def test_a_line_above_the_limit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is it cut, nor do the lines after it get lost."""
    for module in (files, reader):
        monkeypatch.setattr(module, "MAX_LINE_BYTES", 8)
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"one\n\nthree-three\nfour\n")
    with raises(DataError, f"{file}:3: ", "at most 8 bytes", "one prompt per line"):
        read_prompts(file)


@pytest.mark.parametrize("apply_chat_template", [False, True])
def test_a_prompt_has_the_tokens_that_it_has_before_an_answer(apply_chat_template: bool) -> None:
    for tokenizer in (chatml_tokenizer(), llama_tokenizer()):
        encoder = RecordEncoder(tokenizer=tokenizer, apply_chat_template=apply_chat_template)
        rows = [record([USER, ANSWER, USER], [ANSWER], True, 1), record("what is a good film?", "the film", True, 2)]
        examples = encoder.encode(rows)
        prompts = encoder.encode_prompts([PromptRecord(prompt=row.prompt, line=row.line) for row in rows])
        assert prompts == [example.prompt_ids for example in examples if isinstance(example, EncodedExample)]
        assert len(prompts) == 2


def test_an_answer_ends_with_the_token_that_ends_a_turn() -> None:
    tokenizer = chatml_tokenizer()
    turn_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    tokenizer.eos_token = "a"
    eos = tokenizer.eos_token_id
    assert None not in (eos, turn_end)
    assert eos != turn_end
    assert RecordEncoder(tokenizer=tokenizer).stop_ids() == {eos, turn_end}
    tokenizer.chat_template = None
    assert RecordEncoder(tokenizer=tokenizer).stop_ids() == {eos}


PHI3 = (
    "{% for message in messages %}{{ '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}{% endfor %}"
    "{{ '<|assistant|>\n' if add_generation_prompt else eos_token }}"
)


@pytest.mark.parametrize("bounded", [True, False])
def test_an_answer_ends_with_all_tokens_after_its_text_and_those_of_the_files(bounded: bool, tmp_path: Path) -> None:
    """Phi-3's template ends a turn with <|end|>, a new line and the EOS; its generation_config.json lists others too."""
    tokenizer = chatml_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>", "<|assistant|>", "<|user|>"]})
    tokenizer.chat_template = PHI3
    end, eos = tokenizer.convert_tokens_to_ids(["<|end|>", tokenizer.eos_token])
    tokenizer.name_or_path = str(tmp_path)
    assert RecordEncoder(tokenizer=tokenizer, bounded=bounded).stop_ids() == {end, eos}
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert RecordEncoder(tokenizer=tokenizer, bounded=bounded).stop_ids() == {end, eos, 7}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9, None]}))
    assert RecordEncoder(tokenizer=tokenizer, bounded=bounded).stop_ids() == {end, eos, 8, 9}
