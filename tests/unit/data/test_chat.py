"""Token ids of plain rows and rows of messages: prompt, answer, BOS and EOS."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from nemo_kto.data.rows.records import KTORecord, RowError, TextOrMessages
from nemo_kto.data.tokens.chat_template import EncodedExample, RecordEncoder, load_tokenizer
from tests.helpers.messages import Message, assert_names, raises
from tests.helpers.tiny_models import make_tokenizer
from tests.unit.data.tiny_data import CHATML, chatml_tokenizer, llama_tokenizer

USER = {"role": "user", "content": "what is a good film?"}
ANSWER = {"role": "assistant", "content": "the film"}


def record(prompt: TextOrMessages, response: TextOrMessages, desirable: bool, line: int) -> KTORecord:
    return KTORecord(prompt=prompt, response=response, desirable=desirable, line=line)


def encode(tokenizer: PreTrainedTokenizerFast, prompt: TextOrMessages, response: TextOrMessages) -> EncodedExample:
    (row,) = RecordEncoder(tokenizer=tokenizer).encode([record(prompt, response, True, 1)])
    assert isinstance(row, EncodedExample), row
    return row


def problem(tokenizer: PreTrainedTokenizerFast, prompt: TextOrMessages, response: TextOrMessages) -> str:
    (row,) = RecordEncoder(tokenizer=tokenizer).encode([record(prompt, response, True, 1)])
    assert isinstance(row, RowError), row
    return str(row)


def texts(tokenizer: PreTrainedTokenizerFast, row: EncodedExample) -> tuple[str, str]:
    return tokenizer.decode(row.prompt_ids), tokenizer.decode(row.response_ids)


def test_chat_row_trains_only_on_the_answer_and_its_end_of_turn() -> None:
    tokenizer = chatml_tokenizer()
    row = encode(tokenizer, [USER], [ANSWER])
    assert texts(tokenizer, row) == (
        "<|im_start|>user\nwhat is a good film?<|im_end|>\n<|im_start|>assistant\n",
        "the film<|im_end|>",
    )
    assert row.response_ids.count(tokenizer.eos_token_id) == 1


def test_chat_row_with_history_and_a_template_that_writes_bos() -> None:
    tokenizer = llama_tokenizer()
    row = encode(tokenizer, [USER, ANSWER, USER], [ANSWER])
    assert texts(tokenizer, row) == (
        "<s>[INST] what is a good film? [/INST] the film </s>[INST] what is a good film? [/INST]",
        " the film </s>",
    )
    assert row.prompt_ids.count(tokenizer.bos_token_id) == 1
    assert row.response_ids.count(tokenizer.eos_token_id) == 1


def test_eos_is_added_after_a_template_without_end_of_turn() -> None:
    tokenizer = chatml_tokenizer("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}")
    row = encode(tokenizer, [USER], [ANSWER])
    assert texts(tokenizer, row) == ("user: what is a good film?\n", "assistant: the film\n<|im_end|>")


def test_plain_row_gets_bos_only_from_the_tokenizer_and_eos_once() -> None:
    plain, llama = chatml_tokenizer(), llama_tokenizer()
    assert texts(plain, encode(plain, "the film was", " good")) == ("the film was", " good<|im_end|>")
    assert texts(llama, encode(llama, "the film was", " good")) == ("<s>the film was", " good</s>")
    assert texts(llama, encode(llama, "<s>the film was", " good</s>")) == ("<s>the film was", " good</s>")
    assert texts(llama, encode(llama, "", "good")) == ("<s>", "good</s>")
    assert texts(plain, encode(plain, "the film was", "")) == ("the film was", "<|im_end|>")


def test_an_empty_prompt_without_bos_is_a_broken_row() -> None:
    message = problem(chatml_tokenizer(), "", "good")
    assert message == Message("prompt", "token", "''", "BOS")


@pytest.mark.parametrize(("prompt", "response"), [("the fi", "lm was good"), ("good ", "film"), ("hel", "lo there")])
def test_prompt_tokens_never_depend_on_the_answer(prompt: str, response: str) -> None:
    tokenizer = chatml_tokenizer()
    row = encode(tokenizer, prompt, response)
    assert row.prompt_ids == tokenizer(prompt)["input_ids"]
    assert tokenizer.decode(row.response_ids) == response + "<|im_end|>"


def test_plain_text_with_the_chat_template_is_tokenised_as_its_messages() -> None:
    for tokenizer in (chatml_tokenizer(), llama_tokenizer()):
        messages = [record([USER], [ANSWER], True, 1), record([USER, ANSWER, USER], [ANSWER], True, 2)]
        texts = [record(USER["content"], ANSWER["content"], True, 1), messages[1]]  # messages are unchanged
        applying = RecordEncoder(tokenizer=tokenizer, apply_chat_template=True)
        plain = RecordEncoder(tokenizer=tokenizer)
        assert applying.encode(texts) == plain.encode(messages)
        assert plain.encode(texts)[0] != plain.encode(messages)[0]
        assert applying.fingerprint() != plain.fingerprint()  # of the cached tokens


@pytest.mark.parametrize(
    ("prompt", "is_untemplated"),
    [("what is a good film?", True), ("<s>what is a good film?", True), ("<s>[INST] hi [/INST] ho </s>[INST] hi", False)],
)
def test_a_prompt_that_lacks_the_chat_template(prompt: str, is_untemplated: bool) -> None:
    tokenizer = llama_tokenizer()
    prompt_ids = encode(tokenizer, prompt, "the film").prompt_ids
    assert RecordEncoder(tokenizer=tokenizer).is_untemplated(prompt_ids) is is_untemplated
    assert not RecordEncoder(tokenizer=tokenizer, apply_chat_template=True).is_untemplated(prompt_ids)
    tokenizer.chat_template = None
    assert not RecordEncoder(tokenizer=tokenizer).is_untemplated(prompt_ids)


def test_a_template_error_is_a_broken_row() -> None:
    template = "{{ raise_exception('system is not supported') if messages[0]['role'] == 'system' else '' }}" + CHATML
    encoder = RecordEncoder(tokenizer=chatml_tokenizer(template))
    system = {"role": "system", "content": "x"}
    refused, fine = encoder.encode([record([system, USER], [ANSWER], True, 1), record([USER], [ANSWER], True, 2)])
    assert isinstance(refused, RowError)
    assert str(refused) == Message("chat template", "system is not supported")
    assert isinstance(fine, EncodedExample)


def test_a_row_that_is_refused_decides_nothing_about_others() -> None:
    """Mistral's templates refuse a call by the length of its id."""
    template = (
        "{% if messages[-1].tool_calls and messages[-1].tool_calls[0].id != '1' %}{{ raise_exception('id') }}{% endif %}"
    )
    encoder = RecordEncoder(tokenizer=chatml_tokenizer(template + CHATML))
    calls = ([{"id": number, "function": {"name": "f", "arguments": {}}}] for number in ("2", "1"))
    rows = [record([USER], [{**ANSWER, "tool_calls": each}], True, 1) for each in calls]
    refused, lost = encoder.encode(rows)
    assert_names(refused, "refuses the messages", "id")
    assert_names(lost, '"tool_calls" of the answer')


def test_no_template_and_a_template_without_a_stable_prompt_are_broken_rows() -> None:
    assert problem(chatml_tokenizer(None), [USER], [ANSWER]) == Message("chat template")
    unstable = "{{ messages | length }}{% for message in messages %}{{ message.content | upper }}{% endfor %}"
    assert problem(chatml_tokenizer(unstable), [USER], [ANSWER]) == Message("chat template", "prompt", "answer")


def test_a_tokenizer_without_eos_is_refused() -> None:
    tokenizer = chatml_tokenizer()
    tokenizer.eos_token = None
    with raises(ValueError, "EOS", "none"):
        RecordEncoder(tokenizer=tokenizer)


def test_the_fingerprint_depends_on_everything_that_determines_ids(tmp_path: Path) -> None:
    def fingerprint(tokenizer: PreTrainedTokenizerFast) -> str:
        return RecordEncoder(tokenizer=tokenizer).fingerprint()

    tokenizer = chatml_tokenizer()
    before = fingerprint(tokenizer)
    encoder = RecordEncoder(tokenizer=tokenizer)
    tokenizer("what is a good film?", truncation=True, max_length=4)  # leaves a setting behind in the tokenizer
    assert encoder.fingerprint() == before
    tokenizer.save_pretrained(tmp_path)
    assert fingerprint(load_tokenizer(tmp_path)) == fingerprint(load_tokenizer(tmp_path))
    assert fingerprint(chatml_tokenizer(CHATML + " ")) != before
    tokenizer.add_tokens(["film"])
    assert fingerprint(tokenizer) != before


def test_a_token_outside_the_vocabulary_is_a_broken_row(tmp_path: Path) -> None:
    """Gemma 3's models of text come with a tokenizer that has one more token, for images."""
    tokenizer = make_tokenizer()
    vocab_size = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(tmp_path)
    encoder = RecordEncoder(tokenizer=load_tokenizer(tmp_path, vocab_size=vocab_size), vocab_size=vocab_size)
    fine, wrong = encoder.encode([record("a film", "good", True, 1), record("a film", "an <image>", True, 2)])
    assert isinstance(fine, EncodedExample)
    assert max(fine.prompt_ids + fine.response_ids) < vocab_size
    assert isinstance(wrong, RowError)
    assert_names(wrong, "'<image>'", f"id {vocab_size}", "vocab_size", "remove")
    assert encoder.fingerprint() != RecordEncoder(tokenizer=load_tokenizer(tmp_path)).fingerprint()


def test_a_template_writes_the_date_that_it_is_given() -> None:
    """Today by default; and other tokens have another fingerprint."""
    tokenizer = chatml_tokenizer("{{ strftime_now('%d %b %Y') }}" + CHATML)
    encoders = [
        RecordEncoder(tokenizer=tokenizer, date=date) for date in (datetime(2026, 3, 9), datetime(2026, 3, 10), None)
    ]
    shown = []
    for encoder in encoders:
        (example,) = encoder.encode([record([USER], [ANSWER], True, 1)])
        assert isinstance(example, EncodedExample)
        shown.append(tokenizer.decode(example.prompt_ids).split("<")[0])
    assert shown == ["09 Mar 2026", "10 Mar 2026", datetime.now().strftime("%d %b %Y")]
    assert len({encoder.fingerprint() for encoder in encoders}) == 3
    plain = [RecordEncoder(tokenizer=chatml_tokenizer(), date=date).fingerprint() for date in (datetime(2026, 3, 9), None)]
    assert plain[0] == plain[1]
