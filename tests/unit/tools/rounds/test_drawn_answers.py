"""Answers that a model draws: the form in which files keep them, and their tokens from end to end."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from nemo_kto.data.rows.records import RowError, TextOrMessages, pair_of_row, records_of_row
from nemo_kto.data.tokens.chat_template import EncodedExample, RecordEncoder
from nemo_kto.data.tokens.drawn import drawn_text, read_drawn
from nemo_kto.data.tokens.rendering import TOKEN_IDS
from nemo_kto.errors import UserError
from nemo_kto.tools.chat import chat_command as chat
from nemo_kto.tools.rounds import compare_command as compare
from nemo_kto.tools.rounds import label_command as label
from nemo_kto.tools.rounds import sample_command as sample
from tests.helpers.messages import raises
from tests.helpers.tiny_models import CHATML, TURN_END, make_tokenizer, write_rows
from tests.unit.tools.rounds.conftest import SCORES, read

PROMPT = [{"role": "user", "content": "Is it warm in Paris?"}]
TOKENS = re.compile(
    r"<[|\uff5c][^<>'\"\s{}]*[|\uff5c]>|</s>|</?(?:start_of_turn|end_of_turn|end_of_utterance|tool_call)>"
    r"|<\|?(?:turn|tool_call|tool_response|channel)\|?>|\[/?[A-Z_]{3,}\]"
)
ENDS = ("<|call|>", "<|tool_response>", "</s>")  # of a turn, which the models' generation_config.json has


def tokenizer_of(template: str) -> PreTrainedTokenizerBase:
    """The byte-level tokenizer with a chat template and its special tokens."""
    made: PreTrainedTokenizerBase = make_tokenizer()
    made.chat_template = template
    made.add_special_tokens({"additional_special_tokens": sorted({*TOKENS.findall(template), "<|im_start|>"} - {TURN_END})})
    return made


def tools(template: str) -> tuple[PreTrainedTokenizerBase, RecordEncoder, frozenset[int]]:
    made = tokenizer_of(template)
    encoder = RecordEncoder(tokenizer=made, bounded=True)
    ends = {made.convert_tokens_to_ids(token) for token in ENDS if token in made.get_vocab()}
    return made, encoder, encoder.stop_ids() | ends


def encoded(encoder: RecordEncoder, response: TextOrMessages) -> EncodedExample | RowError:
    """Tokens of a row that was written to a file."""
    row = json.loads(json.dumps({"prompt": PROMPT, "response": response, "label": True}))
    (record,) = records_of_row(row, 1)
    (example,) = encoder.encode([record])
    return example


GPT_OSS = (
    "{% for m in messages %}{% if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>{% else %}"
    "{% if '<|channel|>' in m.content %}{{ raise_exception('channel in content') }}{% endif %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}<|start|>assistant to=functions.{{ f.name }}"
    "<|channel|>commentary json<|message|>{{ f.arguments | tojson }}<|call|>{% else %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
MISTRAL = (
    "{{ '<s>' }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% else %}"
    " {{ m.content | trim }}</s>{% endif %}{% endfor %}{# [THINK] [/THINK] [TOOL_CALLS] #}"
)
PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}" + TURN_END + "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}{# <|python_tag|> #}"
)
FUNCTION = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo", "days": [1, 2]}}}


@pytest.mark.parametrize(
    ("template", "text", "answer", "same"),
    [
        (
            GPT_OSS,
            "<|channel|>analysis<|message|>Seven has no divisors.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
            "<|return|>",
            [{"role": "assistant", "content": "Yes.", "reasoning_content": "Seven has no divisors."}],
            True,
        ),
        (GPT_OSS, "<|channel|>final<|message|>Yes.<|return|>", "Yes.", True),
        (
            GPT_OSS,
            "<|channel|>analysis<|message|>Look.\n<|end|><|start|>assistant to=functions.weather<|channel|>commentary json"
            '<|message|>{"city": "Oslo", "days": [1, 2]}<|call|>',
            [{"role": "assistant", "content": "", "reasoning_content": "Look.\n", "tool_calls": [FUNCTION]}],
            True,
        ),
        # cut in the thoughts: the template cannot write it
        (GPT_OSS, "<|channel|>analysis<|message|>Seven has", "<|channel|>analysis<|message|>Seven has", False),
        (MISTRAL, " [THINK]Look.[/THINK]Yes.</s>", "[THINK]Look.[/THINK]Yes.", True),
        (MISTRAL, ' [TOOL_CALLS][{"name": "f"}]</s>', '[TOOL_CALLS][{"name": "f"}]', True),
        (MISTRAL, " Yes.\n</s>", [{"role": "assistant", "content": "Yes."}], True),  # the template removes the line break
        (PLAIN, f"<|python_tag|>f(1){TURN_END}", "<|python_tag|>f(1)", True),
        (PLAIN, " Yes .\n", " Yes .\n", True),  # cut by its length
    ],
)
def test_the_form_of_a_drawn_answer(template: str, text: str, answer: TextOrMessages, same: bool) -> None:
    made, encoder, stop_ids = tools(template)
    rendered = made.apply_chat_template(PROMPT, tokenize=False, add_generation_prompt=True)
    prompt_ids, ids = (made(each, add_special_tokens=False)["input_ids"] for each in (rendered, text))
    given: Any = {"prompt_ids": prompt_ids, "stop_ids": stop_ids, "variables": {}}
    drawn = read_drawn(encoder, made, [*PROMPT], ids, **given)
    found = json.loads(json.dumps(drawn.answer).replace('"thinking":', '"reasoning_content":'))  # before transformers 5.23
    tokens = found[0].pop(TOKEN_IDS, None) if isinstance(found, list) else None
    assert (found, drawn.is_same) == (answer, same)
    assert tokens == (ids[:-1] if text.endswith(".\n</s>") else None)
    ended = ids[-1] in stop_ids
    assert drawn_text(made, ids, stop_ids) == (made.decode(ids[:-1]) if ended else text)
    if same:
        again = encoded(encoder, drawn.answer)
        assert isinstance(again, EncodedExample)
        assert again.response_ids[: len(ids)] == ids


def test_a_text_keeps_the_division_into_tokens_that_was_drawn() -> None:
    made = tokenizer_of(CHATML)
    made.add_tokens(["Yes"])
    encoder = RecordEncoder(tokenizer=made, bounded=True)
    stop_ids = encoder.stop_ids()
    prompt_ids = made(made.apply_chat_template(PROMPT, tokenize=False, add_generation_prompt=True))["input_ids"]
    letters = made.convert_tokens_to_ids(["Y", "e", "s", "."])
    drawn = read_drawn(
        encoder, made, [*PROMPT], [*letters, *stop_ids], prompt_ids=prompt_ids, stop_ids=stop_ids, variables={}
    )
    assert drawn.answer == [{"role": "assistant", "content": "Yes.", TOKEN_IDS: letters}]
    assert drawn.is_same
    rest = made.convert_tokens_to_ids([TURN_END])
    usual = made("Yes.")["input_ids"]
    assert usual != letters
    for content, tokens, expected in (
        ("Yes.", letters, letters),
        ("Yes!", letters, made("Yes!")["input_ids"]),  # the text was changed
        ("Yes.", [*letters, 10**6], usual),  # of another tokenizer
        ("Yes.", [str(each) for each in letters], usual),
        ("Yes.", [], usual),
        ("", made.convert_tokens_to_ids(["\u0120"]), made.convert_tokens_to_ids(["\u0120"])),  # a space
        ("Yes.", "Yes.", usual),
    ):
        found = encoded(encoder, [{"role": "assistant", "content": content, TOKEN_IDS: tokens}])
        assert isinstance(found, EncodedExample)
        assert found.response_ids == [*expected, *rest]


DRAWN = (
    "<|channel|>analysis<|message|>Seven has no divisors.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
    "<|channel|>final<|message|>No.<|return|>",
)


@pytest.fixture
def with_channels(small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[list[int]]]:
    """A model with the template of gpt-oss that draws two answers in turn, and their tokens."""
    folder = tmp_path / "model"
    shutil.copytree(small_model, folder)
    made = tokenizer_of(GPT_OSS)
    made.save_pretrained(folder)
    ids: list[list[int]] = made([*DRAWN], add_special_tokens=False)["input_ids"]

    def generate(_: object, prompt_ids: torch.Tensor, *, streamer: Any = None, **__: object) -> torch.Tensor:
        drawn = torch.full((len(prompt_ids), max(map(len, ids))), made.convert_tokens_to_ids("<|return|>"))
        for number in range(len(prompt_ids)):
            drawn[number, : len(ids[number])] = torch.tensor(ids[number])
        if streamer is not None:
            streamer.put(prompt_ids)
            for token in ids[0]:
                streamer.put(torch.tensor([token]))
        return torch.cat([prompt_ids, drawn], dim=1)

    monkeypatch.setattr("transformers.generation.utils.GenerationMixin.generate", generate)
    return folder, ids


def test_rows_of_all_commands_have_the_drawn_tokens(
    with_channels: tuple[Path, list[list[int]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    model, drawn = with_channels
    prompts, answers = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "Is 7 a prime?"}]), tmp_path / "answers.jsonl"
    sample.main([str(model), str(prompts), "--out", str(answers), "-n", "2"])
    assert "than were drawn" not in capsys.readouterr().err
    scored = ["--score", f"{SCORES}.thoughtful"]
    for _ in range(2):  # the same command continues with rows of messages
        label.main([str(answers), "--out", "thumbs.jsonl", *scored])
        label.main([str(answers), "--out", "pairs.jsonl", "--pairs", *scored])
    compare.main([str(model), str(answers), str(prompts), "-n", "2", "--out", "compared.jsonl", *scored])
    thumbs, (pair,) = read(Path("thumbs.jsonl")), read(Path("pairs.jsonl"))
    assert [row["label"] for row in thumbs] == [True, False]
    assert {row["verdict"] for row in read(Path("compared.jsonl"))} == {"tie"}
    assert read(tmp_path / "compared_model.jsonl")[0]["answer"] == thumbs[0]["response"]
    encoder = RecordEncoder(tokenizer=tokenizer_of(GPT_OSS))
    records = [record for row in thumbs for record in records_of_row(row, 1)] + [*pair_of_row(pair, 1).sides]
    examples = encoder.encode(records)
    assert [each.response_ids for each in examples if isinstance(each, EncodedExample)] == [*drawn, *drawn]


def test_a_chat_goes_on_after_an_answer_with_thoughts(
    with_channels: tuple[Path, list[list[int]]], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The template refuses the marks of its channels in the content of a message."""
    model, _ = with_channels
    monkeypatch.setattr("sys.stdin", io.StringIO("Is 7 a prime?\nSure?\n"))
    chat.main([str(model), "--json"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["answer"] for line in lines] == [DRAWN[0].removesuffix("<|return|>")] * 2
    assert lines[1]["message"]["content"] == "Yes."
    assert lines[1]["finish"] == "stop"
    (model / "chat_template.jinja").write_text("{{ raise_exception('no system message') }}")
    with raises(UserError, str(model), "no system message; leave out the system message, or correct the template"):
        chat.main([str(model), "-p", "Hello", "--system", "Be brief."])
