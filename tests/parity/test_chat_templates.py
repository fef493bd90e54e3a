"""Rows with tools and template variables, against transformers and TRL, with templates of real models."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from nemo_kto.data.rows.normalise import read_values
from nemo_kto.data.rows.records import (
    KTORecord,
    LostTextError,
    PromptRecord,
    RowError,
    TextOrMessages,
    pair_of_row,
    records_of_row,
)
from nemo_kto.data.tokens.chat_template import EncodedExample, RecordEncoder
from nemo_kto.data.tokens.rendering import as_parts
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


@pytest.fixture(autouse=True)
def no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial of a template starts an interpreter."""
    monkeypatch.setattr("nemo_kto.data.tokens.chat_template._TRIAL_ROWS", 0)


def template_files() -> list[Path]:
    """The chat templates of real models that TRL ships."""
    trl = pytest.importorskip("trl", reason="TRL ships the templates")
    files = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
    assert len(files) > 60
    return files


def template_of(model: str) -> str:
    (file,) = [file for file in template_files() if file.stem == model]
    return file.read_text()


def tokenizer_with(template: str) -> PreTrainedTokenizerBase:
    """The byte-level tokenizer with a chat template."""
    made: PreTrainedTokenizerBase = make_tokenizer()
    made.chat_template = template
    return made


@pytest.fixture(params=["qwen2_5", "qwen3"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    return tokenizer_with(template_of(request.param))


def texts(tokenizer: PreTrainedTokenizerBase, record: KTORecord) -> tuple[str, str]:
    encoder = RecordEncoder(tokenizer=tokenizer)
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
        (R1, [USER], "Yes.", ("<|User|>Is it warm in Paris?<|Assistant|><think>\n", "\n</think>\n\nYes.<|im_end|>")),
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
    (record,) = records_of_row({"prompt": prompt, "response": answer, "label": True}, 1)
    assert texts(tokenizer_with(template), record) == expected


def test_an_answer_whose_beginning_is_ambiguous_is_refused() -> None:
    template = "{{ messages | length }}{% for message in messages %}{{ message.content | upper }}{% endfor %}"
    (record,) = records_of_row({"prompt": [USER], "response": "yes", "label": True}, 1)
    (wrong,) = RecordEncoder(tokenizer=tokenizer_with(template)).encode([record])
    assert isinstance(wrong, RowError)
    assert "must render the prompt the same" in str(wrong)


def test_prompts_are_those_of_inference_with_every_template_of_trl() -> None:
    made = make_tokenizer()
    for file in template_files():
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
    made = tokenizer_with(template_of("nemotron_3_nano"))
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


def assistant(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", **fields}


def call(name: str, value: str) -> dict[str, Any]:
    return {"id": "abcdefghi", "type": "function", "function": {"name": name, "arguments": {"city": value}}}


SYSTEXT = {"role": "system", "content": "SYSTEXT"}
QUESTION, FIRST = {"role": "user", "content": "USERTEXT"}, {"role": "user", "content": "FIRSTTEXT"}
ANSWER, MIDDLE = assistant(content="ANSWERTEXT"), assistant(content="MIDDLETEXT")
CALLED = assistant(tool_calls=[call("CALLNAME", "CALLVALUE")])
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "content": "RESULTTEXT"}
IN_CONTENT = "<think>\nTHOUGHTTEXT\n</think>\n\n"
KINDS: dict[str, tuple[list[dict], dict]] = {
    "question": ([QUESTION], ANSWER),
    "turns": ([FIRST, MIDDLE, QUESTION], ANSWER),
    "developer": ([{"role": "developer", "content": "DEVTEXT"}, QUESTION], ANSWER),
    "system": ([SYSTEXT, QUESTION], ANSWER),
    "late system": ([FIRST, MIDDLE, SYSTEXT, QUESTION], ANSWER),
    "two systems": ([SYSTEXT, {"role": "system", "content": "OTHERTEXT"}, QUESTION], ANSWER),
    "function": ([QUESTION, MIDDLE, {"role": "function", "name": "f", "content": "RESULTTEXT"}], ANSWER),
    "result": ([QUESTION, CALLED, RESULT], ANSWER),
    "call": ([QUESTION], CALLED),
    "two calls": ([QUESTION], assistant(tool_calls=[call("CALLNAME", "CALLVALUE"), call("SECONDNAME", "SECONDVALUE")])),
    "call with text": ([QUESTION], {**CALLED, "content": "ANSWERTEXT"}),
    "thoughts": ([QUESTION], {**ANSWER, "reasoning_content": "THOUGHTTEXT"}),
    "thoughts in content": ([QUESTION], assistant(content=f"{IN_CONTENT}ANSWERTEXT")),
    "thoughts and call": ([QUESTION], {**CALLED, "reasoning_content": "THOUGHTTEXT"}),
    "thoughts in content and call": ([QUESTION], {**CALLED, "content": IN_CONTENT}),
    "tools": ([QUESTION], ANSWER),
}


def texts_of(*messages: dict) -> set[str]:
    """The words in capitals of a row, which are all of its texts."""
    return set(re.findall(r"[A-Z]{4,}", json.dumps(messages)))


@pytest.mark.parametrize("kind", KINDS)
def test_no_template_of_trl_loses_text(kind: str) -> None:
    """A row is trained whole, as the continuation of a prompt of inference, or refused because a text would be lost."""
    prompt, answer = KINDS[kind]
    row: dict[str, Any] = {"prompt": prompt, "response": [answer], "label": True}
    tools = [{"type": "function", "function": {"name": "TOOLNAME", "description": "", "parameters": {}}}]
    tools = tools if kind == "tools" else []
    (record,) = records_of_row({**row, "tools": tools}, 1)
    wanted, trained = texts_of(*prompt, answer, *tools), 0
    made = make_tokenizer()
    for file in template_files():
        made.chat_template = file.read_text()
        encoder = RecordEncoder(tokenizer=made)
        (example,) = encoder.encode([record])
        of_parts = file.stem.removesuffix("_training") in OF_PARTS

        def written(messages: list[dict], of_parts: bool = of_parts, **mode: Any) -> str:
            read = as_parts(messages) if of_parts else messages
            return str(made.apply_chat_template(read, tokenize=False, tools=tools or None, **mode))

        if isinstance(example, LostTextError):
            assert str(example) == Message("chat template", "model.data.drop=[unlabelled,lost_text]")
            whole = written([*prompt, answer])
            is_lost = not wanted <= texts_of({"": whole})
            assert is_lost or not whole.startswith(written(prompt, add_generation_prompt=True)), file.name
        elif isinstance(example, RowError):
            assert str(example) == Message("chat template", "refuses")
            with pytest.raises(Exception):  # noqa: B017  # of any kind, see the message
                written([*prompt, answer])
        else:
            trained += 1
            shown, rest = made.decode(example.prompt_ids), made.decode(example.response_ids)
            modes = [{}, {"enable_thinking": True}, {"enable_thinking": False}]
            assert shown in [written(prompt, add_generation_prompt=True, **mode) for mode in modes], file.name
            assert wanted <= texts_of({"": f"{shown}{rest}"}), (file.name, rest)
            assert texts_of(answer) <= texts_of({"": rest}), (file.name, rest)
            begun, closed = (shown.rstrip().endswith(tag) for tag in ("<think>", "</think>"))
            tags = rest.count("<think>"), rest.count("</think>")
            assert tags == (0, 1) if begun else tags in ([(0, 0)] if closed else [(0, 0), (1, 1)]), (file.name, rest)
            assert made.decode(example.response_ids, skip_special_tokens=True).strip(), f"{file.name}: only an end"
    assert trained >= 14


# As in Nemotron Nano 2: the prompt begins thoughts, and the last answer follows it as it is; a call begins another turn.
NANO = (
    "{% set answer = messages[-1] if messages[-1].role == 'assistant' else none %}"
    "{% for message in (messages[:-1] if answer else messages) %}<S>{{ message.role }}\n"
    "{{ message.content.split('</think>')[-1].strip() }}\n{% endfor %}"
    "{% if add_generation_prompt %}<S>Assistant\n<think>\n\n"
    "{% elif answer %}{% if answer.content %}<S>Assistant\n<think>\n\n{{ answer.content.strip() }}\n<E>\n{% endif %}"
    "{% if answer.tool_calls %}<S>Assistant\n{{ answer.tool_calls[0].function | tojson }}\n<E>\n{% endif %}{% endif %}"
)
# As in MiniMax M2: the prompt begins thoughts, which are written only if there are any.
MINIMAX = (
    "{# interleaved thinking #}{% for message in messages %}[{{ message.role }}]\n{% set content = message.content or '' %}"
    "{% set thoughts = message.reasoning_content or '' %}{% if '</think>' in content and not thoughts %}"
    "{% set thoughts = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].strip('\n') %}{% endif %}"
    "{% if thoughts and loop.last %}<think>\n{{ thoughts }}\n</think>\n\n{% endif %}{{ content }}"
    "{% for call in message.tool_calls or [] %}\n<call>{{ call.function | tojson }}{% endfor %}[e]\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n<think>\n{% endif %}"
)
# As in DeepSeek V3.1: a variable decides whether the prompt begins or closes thoughts, and answers are written without.
DEEPSEEK = (
    "{% for message in messages %}{% if message.role == 'user' %}<U>{{ message.content }}{% else %}<A></think>"
    "{{ message.content.split('</think>')[-1] }}<E>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<A>{{ '<think>' if thinking is defined and thinking else '</think>' }}{% endif %}"
)
# As in GigaChat 3: a call follows the text after a token that also ends the turn.
GIGACHAT = (
    "{% for message in messages %}{{ message.role }}<R>\n{{ message.content }}<M>\n"
    "{% for call in message.tool_calls or [] %}function call<R>\n{{ call.function | tojson }}<M>\n{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}assistant<R>\n{% endif %}"
)
# As in Command R7B: the beginning of an answer is always written.
ALWAYS = "{% for message in messages %}<START_OF_TURN>{{ message.content }}<E>{% endfor %}<START_OF_TURN><CHATBOT>"
QWEN = "qwen3_5_nothink"  # prompts have closed thoughts
THOUGHTS = {**GOOD, "reasoning_content": "31 degrees"}
BESIDE = assistant(content="<think>\n31 degrees\n</think>\n\nYes, it is.")
WRITTEN_CALL = '{"name": "CALLNAME", "arguments": {"city": "CALLVALUE"}}'
ASKED = "<|im_start|>user\nIs it warm in Paris?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("template", "answer", "expected"),
    [
        (QWEN, GOOD, (f"{ASKED}<think>\n\n</think>\n\n", "Yes, it is.<|im_end|>")),
        (QWEN, THOUGHTS, (f"{ASKED}<think>\n", "31 degrees\n</think>\n\nYes, it is.<|im_end|>")),
        (QWEN, BESIDE, (f"{ASKED}<think>\n", "31 degrees\n</think>\n\nYes, it is.<|im_end|>")),
        (NANO, GOOD, ("<S>Assistant\n<think>\n\n", "\n</think>\n\nYes, it is.\n<E>\n<|im_end|>")),
        (NANO, THOUGHTS, ("<S>Assistant\n<think>\n\n", "31 degrees\n</think>\n\nYes, it is.\n<E>\n<|im_end|>")),
        (NANO, BESIDE, ("<S>Assistant\n<think>\n\n", "31 degrees\n</think>\n\nYes, it is.\n<E>\n<|im_end|>")),
        (NANO, CALLED, None),
        (NANO, {**CALLED, "content": "Yes."}, None),
        (MINIMAX, GOOD, ("[assistant]\n<think>\n", "\n</think>\n\nYes, it is.[e]\n<|im_end|>")),
        (MINIMAX, THOUGHTS, ("[assistant]\n<think>\n", "31 degrees\n</think>\n\nYes, it is.[e]\n<|im_end|>")),
        (MINIMAX, CALLED, ("[assistant]\n<think>\n", f"\n</think>\n\n<call>{WRITTEN_CALL}[e]\n<|im_end|>")),
        (
            GIGACHAT,
            {**CALLED, "content": "Yes."},
            ("assistant<R>\n", f"Yes.<M>\nfunction call<R>\n{WRITTEN_CALL}<M>\n<|im_end|>"),
        ),
        (ALWAYS, GOOD, None),
        (DEEPSEEK, GOOD, ("?<A></think>", "Yes, it is.<E><|im_end|>")),
        (DEEPSEEK, THOUGHTS, ("?<A><think>", "31 degrees\n</think>\n\nYes, it is.<E><|im_end|>")),
        (
            DEEPSEEK,
            assistant(content="<think>31 degrees</think>Yes."),
            ("?<A><think>", "31 degrees</think>Yes.<E><|im_end|>"),
        ),
    ],
)
def test_thoughts_continue_the_prompt_of_inference(template: str, answer: dict, expected: tuple[str, str] | None) -> None:
    made = tokenizer_with(template_of(QWEN) if template == QWEN else template)
    row = {"prompt": [USER], "response": [answer], "label": True}
    ignored = {"chat_template_kwargs": {"enable_thinking": False}} if template == MINIMAX else {}
    (record,) = records_of_row({**row, **ignored}, 1)
    if expected is not None:
        shown, rest = texts(made, record)
        assert shown.endswith(expected[0])
        assert rest == expected[1]
        return
    encoder = RecordEncoder(tokenizer=made)
    (wrong,) = encoder.encode([record])
    assert isinstance(wrong, LostTextError)
    assert str(wrong) == Message("chat template", "model.data.drop=[unlabelled,lost_text]")


@pytest.mark.parametrize("declared", [["<|im_end|>", "<|user|>", "<|observation|>"], ["<|im_end|>"], None])
def test_an_answer_ends_with_the_token_that_begins_the_next_turn_if_no_other_ends_it(
    declared: list[str] | None, tmp_path: Path
) -> None:
    """GLM 4.5 stops at the role of the next turn, which its generation_config.json declares."""
    made = tokenizer_with(template_of("glm4moe"))
    made.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|observation|>"]})
    if declared is not None:
        made.save_pretrained(tmp_path)
        made.name_or_path = str(tmp_path)
        ids = made.convert_tokens_to_ids(declared)
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    for answer, end in ((GOOD, "<|user|>"), (THOUGHTS, "<|user|>"), (CALLED, "<|observation|>")):
        for prompt in ([USER], [USER, GOOD, AGAIN]):
            (record,) = records_of_row({"prompt": prompt, "response": [answer], "label": True}, 1)
            _, rest = texts(made, record)
            last = "is." if answer is not CALLED else "</tool_call>"
            assert rest.endswith(last + (end if declared != ["<|im_end|>"] else "<|im_end|>"))


def test_texts_of_earlier_answers_that_a_template_takes_for_thoughts_are_not_lost() -> None:
    """gpt-oss leaves the text beside a call out once an answer follows; Llama 3.1 never writes it."""
    made, spoken = make_tokenizer(), {**CALLED, "content": "Let me see."}
    for prompt, is_shown in (([USER, spoken, RESULT], True), ([USER, spoken, RESULT, GOOD, AGAIN], False)):
        (record,) = records_of_row({"prompt": prompt, "response": [BAD], "label": True}, 1)
        made.chat_template = template_of("gptoss")
        shown, answer = texts(made, record)
        assert shown == made.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        assert ("Let me see." in shown) is is_shown
        assert answer == "<|channel|>final<|message|>No.<|return|><|im_end|>"
        made.chat_template = template_of("llama3_1")
        (wrong,) = RecordEncoder(tokenizer=made).encode([record])
        assert isinstance(wrong, LostTextError)
        assert str(wrong) == Message('the content of messages of the role "assistant"', "chat template")
