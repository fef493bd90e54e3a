"""Rows with tools and template variables, against transformers and TRL, with templates of real models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from nemo_kto.data.rows.records import KTORecord, PromptRecord, RowError, TextOrMessages, pair_of_row, records_of_row
from nemo_kto.data.rows.values import read_values
from nemo_kto.data.tokens.chat import EncodedExample, RecordEncoder
from nemo_kto.data.tokens.content import as_parts
from tests.helpers.messages import Message
from tests.helpers.tiny_models import make_tokenizer

pytestmark = pytest.mark.parity

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
USER = {"role": "user", "content": "Is it warm in Paris?"}
ANSWERED = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "31 degrees"}]
GOOD, BAD = {"role": "assistant", "content": "Yes, it is."}, {"role": "assistant", "content": "No."}
OF_PARTS = ("idefics3", "llava_next", "smolvlm")  # write nothing, or fail, if the content of a message is a text


@pytest.fixture(params=["qwen2_5", "qwen3"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    """The byte-level tokenizer with the chat template of a real model, as TRL ships it."""
    trl = pytest.importorskip("trl", reason="TRL ships the templates")
    made: PreTrainedTokenizerBase = make_tokenizer()
    made.chat_template = (Path(trl.__file__).parent / "chat_templates" / f"{request.param}.jinja").read_text()
    return made


def texts(tokenizer: PreTrainedTokenizerBase, record: KTORecord) -> tuple[str, str]:
    encoder = RecordEncoder(tokenizer=tokenizer)
    encoder.stop_ids(trial=False)  # the trial of a template starts an interpreter
    (example,) = encoder.encode([record])
    assert isinstance(example, EncodedExample), example
    return str(tokenizer.decode(example.prompt_ids)), str(tokenizer.decode(example.response_ids))


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}])
@pytest.mark.parametrize("prompt", [[USER], ANSWERED], ids=["question", "called"])
@pytest.mark.parametrize("as_text", [False, True])
def test_tools_and_variables_reach_the_template_of_prompt_and_answer(
    tokenizer: PreTrainedTokenizerBase, prompt: list[dict], variables: dict[str, Any], as_text: bool
) -> None:
    from trl.data_utils import apply_chat_template

    tools = json.dumps([TOOL]) if as_text else [TOOL]
    row: dict[str, Any] = {"prompt": prompt, "chosen": [GOOD], "rejected": [BAD]}
    theirs = apply_chat_template({**row, "chat_template_kwargs": variables}, tokenizer, tools=[TOOL])
    row |= {"tools": tools, "chat_template_kwargs": variables}
    row = {**read_values(row, None, has_cells=False)}
    good, bad = records_of_row(row, 1)
    for record, name in ((good, "chosen"), (bad, "rejected")):
        shown, answer = texts(tokenizer, record)
        # TRL keeps the newline that the template writes after the end of the turn
        assert (shown, f"{answer}\n") == (theirs["prompt"], theirs[name])
        assert "get_weather" in shown.split("Is it warm")[0]
        whole = tokenizer.apply_chat_template([*prompt, *record.response], tools=[TOOL], tokenize=False, **variables)
        assert f"{shown}{answer}\n" == whole
    pair = pair_of_row(row, 1)
    assert pair.template == good.template == {"tools": [TOOL], **variables}
    plain = {key: value for key, value in row.items() if key not in ("tools", "chat_template_kwargs")}
    assert texts(tokenizer, records_of_row(plain, 1)[0])[0] != texts(tokenizer, good)[0]


def test_tools_are_refused_where_the_template_does_not_know_them() -> None:
    (record,) = records_of_row({"messages": [USER, GOOD], "label": True, "tools": [TOOL]}, 1)
    (wrong,) = RecordEncoder(tokenizer=make_tokenizer()).encode([record])
    assert isinstance(wrong, RowError)
    assert str(wrong) == Message('"tools"', "chat template", "remove")


SYSTEM, AGAIN = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "And in Rome?"}
# As in Mistral 7B v0.3: the system message stands in the last message, if that is the user's.
MISTRAL = (
    "{% set system = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}{{ '<s>' }}"
    "{% for message in messages if message.role != 'system' %}{% if message.role == 'user' %}"
    "[INST] {% if loop.last %}{{ system }}{% endif %}{{ message.content }}[/INST]"
    "{% else %} {{ message.content | trim }}</s>{% endif %}{% endfor %}"
)
# As in DeepSeek-R1: the prompt begins the reasoning, which is left out of answers.
R1 = (
    "{% for message in messages %}{% if message.role == 'user' %}<|User|>{% elif message.role == 'assistant' %}<|Assistant|>"
    "{% endif %}{{ message.content.split('</think>') | last }}{% if message.role == 'assistant' %}<|im_end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "prompt", "answer", "expected"),
    [
        (MISTRAL, [SYSTEM, USER], "Yes.", ("<s>[INST] Be brief.\n\nIs it warm in Paris?[/INST]", " Yes.</s><|im_end|>")),
        (
            MISTRAL,
            [SYSTEM, USER, GOOD, AGAIN],
            "No.",
            (
                "<s>[INST] Is it warm in Paris?[/INST] Yes, it is.</s>[INST] Be brief.\n\nAnd in Rome?[/INST]",
                " No.</s><|im_end|>",
            ),
        ),
        (R1, [USER], "Yes.", ("<|User|>Is it warm in Paris?<|Assistant|><think>\n", "Yes.<|im_end|>")),
        (
            R1,
            [SYSTEM, USER],
            "<think>\n31 degrees\n</think>\nYes.",
            ("Be brief.<|User|>Is it warm in Paris?<|Assistant|><think>\n", "31 degrees\n</think>\nYes.<|im_end|>"),
        ),
    ],
)
def test_a_prompt_that_changes_once_an_answer_follows(
    template: str, prompt: list[dict], answer: str, expected: tuple[str, str]
) -> None:
    """The prompt is the one of inference, and the answer ends as the template ends it."""
    made = make_tokenizer()
    made.chat_template = template
    (record,) = records_of_row({"prompt": prompt, "response": answer, "label": True}, 1)
    assert texts(made, record) == expected


def test_an_answer_whose_beginning_is_ambiguous_is_refused() -> None:
    made = make_tokenizer()
    made.chat_template = "{{ messages | length }}{% for message in messages %}{{ message.content | upper }}{% endfor %}"
    (record,) = records_of_row({"prompt": [USER], "response": "yes", "label": True}, 1)
    (wrong,) = RecordEncoder(tokenizer=made).encode([record])
    assert isinstance(wrong, RowError)
    assert "must render the prompt the same" in str(wrong)


def test_prompts_are_those_of_inference_with_every_template_of_trl() -> None:
    trl = pytest.importorskip("trl", reason="TRL ships the templates")
    files = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
    assert len(files) > 60
    made = make_tokenizer()
    for file in files:
        made.chat_template = file.read_text()
        for prompt in ([USER], [USER, GOOD, AGAIN]):
            (record,) = records_of_row({"prompt": prompt, "response": "No.", "label": True}, 1)
            shown, answer = texts(made, record)
            mode = {"enable_thinking": False} if file.stem.startswith("nemotron_3") else {}  # the answer has no thoughts
            read = as_parts(prompt) if file.stem.removesuffix("_training") in OF_PARTS else prompt
            assert shown == made.apply_chat_template(read, tokenize=False, add_generation_prompt=True, **mode), file.name
            assert all(str(turn["content"]) in shown for turn in prompt), file.name
            assert answer.count("No.") == 1, file.name
            (ids,) = RecordEncoder(tokenizer=made).encode_prompts([PromptRecord(prompt=[*prompt], line=1)])
            inference = made.apply_chat_template(read, tokenize=False, add_generation_prompt=True)
            assert made.decode(ids) == inference, file.name
            if inference.rstrip().endswith("<think>"):  # the model writes thoughts without their beginning
                (record,) = records_of_row({"prompt": prompt, "response": "June\n</think>\n\nNo.", "label": True}, 1)
                shown, answer = texts(made, record)
                assert shown == inference, file.name
                assert answer.startswith("June\n</think>\n\nNo."), file.name


def test_an_answer_with_thoughts_follows_the_prompt_that_begins_them() -> None:
    """Nemotron 3 writes an answer without thoughts as one to another prompt."""
    trl = pytest.importorskip("trl", reason="TRL ships the templates")
    made = make_tokenizer()
    made.chat_template = (Path(trl.__file__).parent / "chat_templates" / "nemotron_3_nano.jinja").read_text()
    thoughts = "<think>\nIn June.\n</think>\n\nNo."
    for prompt, answer, expected in (
        ([USER], "No.", ("<|im_start|>assistant\n<think></think>", "No.<|im_end|>")),
        ([USER], thoughts, ("<|im_start|>assistant\n<think>\n", "In June.\n</think>\n\nNo.<|im_end|>")),
        # as nemo-kto sample writes it, because the prompt begins the thoughts
        ([USER], thoughts[8:], ("<|im_start|>assistant\n<think>\n", "In June.\n</think>\n\nNo.<|im_end|>")),
    ):
        (record,) = records_of_row({"prompt": prompt, "response": answer, "label": True}, 1)
        shown, rest = texts(made, record)
        assert shown.endswith(expected[0])
        assert rest == expected[1]
    encoder = RecordEncoder(tokenizer=made, apply_chat_template=True)
    prompts: list[TextOrMessages] = [str(USER["content"]), [USER]]
    for given in prompts:
        (ids,) = encoder.encode_prompts([PromptRecord(prompt=given, line=1)])
        assert made.decode(ids).endswith("<|im_start|>assistant\n<think>\n")
    row = {"prompt": [USER], "label": True, "chat_template_kwargs": {"enable_thinking": True}}
    (record,) = records_of_row({**row, "response": "No."}, 1)
    (wrong,) = encoder.encode([record])
    assert isinstance(wrong, RowError)
    assert "must render the prompt the same" in str(wrong)
    assert "leave out enable_thinking" in str(wrong)
