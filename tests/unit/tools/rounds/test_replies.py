"""Replies of servers with OpenAI's interface: their answers and thoughts, what is no answer, settings that they refuse."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nemo_kto.errors import UserError
from nemo_kto.tools.rounds import endpoint
from nemo_kto.tools.rounds.judge import read_verdict
from tests.helpers.messages import Message, raises
from tests.helpers.openai_server import serving
from tests.helpers.tiny_models import write_rows
from tests.unit.tools.rounds.conftest import answers, read, run

ATTEMPTS = 6
DATA = Path(__file__).parents[3] / "data"
THOUGHTS = "Two and two make four."
ANSWER = {"answer": "Four."}
WITH_THOUGHTS = {"answer": [{"role": "assistant", "content": "Four.", "reasoning_content": THOUGHTS}]}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
PAST = "error"  # of a reply that another attempt may replace


OUT = Path("out.jsonl")


def message(content: object, finish: str = "stop", **fields: object) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": content, **fields}, "finish_reason": finish}
    return {"id": "1", "object": "chat.completion", "choices": [choice]}


def part(kind: str, text: object) -> dict[str, object]:
    return {"type": kind, ("text" if kind == "output_text" else kind): text}


class Case(NamedTuple):
    """A reply, and the fields of its answer in the file, or what the error about it says."""

    reply: object
    right: dict[str, Any] | list[str]


CASES = {
    "OpenAI": Case(message("Four.", refusal=None, annotations=[]), ANSWER),
    "vLLM 0.18": Case(message("Four.", reasoning_content=THOUGHTS, tool_calls=[], function_call=None), WITH_THOUGHTS),
    "vLLM 0.19": Case(message("Four.", reasoning=THOUGHTS, reasoning_content=None, refusal=None), WITH_THOUGHTS),
    "SGLang": Case(message("Four.", reasoning_content=THOUGHTS, tool_calls=None), WITH_THOUGHTS),
    "OpenRouter": Case(
        message("Four.", reasoning=THOUGHTS, reasoning_details=[{"type": "reasoning.text", "text": THOUGHTS}]), WITH_THOUGHTS
    ),
    "LiteLLM": Case(
        message("Four.", reasoning_content=THOUGHTS, thinking_blocks=[part("thinking", THOUGHTS)]), WITH_THOUGHTS
    ),
    "Mistral": Case(message([part("thinking", [part("text", THOUGHTS)]), part("text", "Four.")]), WITH_THOUGHTS),
    "parts": Case(message([part("text", "Fo"), part("output_text", "ur"), "."]), ANSWER),
    "thoughts in the text": Case(message("<think>\nHm\n</think>\n\nFour."), {"answer": "<think>\nHm\n</think>\n\nFour."}),
    "cut in the answer": Case(message("Four.", "length", reasoning=THOUGHTS), {**WITH_THOUGHTS, "finish": "length"}),
    "empty answer": Case(message(""), {"answer": ""}),
    "line breaks": Case(message("\n\n", "length"), {"answer": "\n\n", "finish": "length"}),
    "vLLM, cut thoughts": Case(message(None, "length", reasoning=THOUGHTS), ["thoughts", "cut", "--leave-out max_tokens"]),
    "llama.cpp, cut thoughts": Case(message("", "length", reasoning_content=THOUGHTS), ["thoughts", "cut", "length"]),
    "OpenAI, cut hidden thoughts": Case(message("", "length"), ["thoughts", "cut", "length"]),
    "thoughts and line breaks": Case(message("\n\n", "length", reasoning=THOUGHTS), ["thoughts", "cut", "length"]),
    "only thoughts": Case(message(None, reasoning=THOUGHTS), ["thoughts without an answer", "stop", "leave the prompt out"]),
    "call": Case(message(None, "tool_calls", tool_calls=[CALL]), ["tool call", "'add'", "without tools"]),
    "call beside text": Case(message("Four.", "tool_calls", tool_calls=[CALL]), ["tool call", "'add'"]),
    "older call": Case(message(None, "function_call", function_call=CALL["function"]), ["tool call", "'add'"]),
    "refusal": Case(message(None, refusal="I cannot help."), ["refusal", "'I cannot help.'", "leave the prompt out"]),
    "refusal as a part": Case(message([part("refusal", "I cannot help.")]), ["refusal", "'I cannot help.'"]),
    "filter": Case(message("", "content_filter"), ["filter", "content_filter", "leave the prompt out"]),
    "filter in the answer": Case(message("Fo", "content_filter"), ["filter", "content_filter"]),
    "OpenRouter, filter": Case(
        {"metadata": {"flagged_input": "2 + 2"}}, ["status 403", "flagged_input", "leave the prompt out"]
    ),
    "null": Case(message(None), ["null", "content", "stop"]),
    "image": Case(message([part("text", "Four."), part("image_url", {})]), ["part", "'image_url'", "no text"]),
    "error": Case({PAST: {"message": "Provider returned error", "code": 429}}, ["Provider returned error", "429"]),
    "error beside choices": Case({**message("Fo"), PAST: {"message": "Overloaded"}}, ["Overloaded"]),
    "vLLM, error": Case({"object": PAST, "message": "EngineCore died", "code": 500}, ["EngineCore died"]),
    "no choices": Case({"id": "1", "choices": [], PAST: None}, ["'choices': []"]),
    "null as choices": Case({"choices": None, "usage": PAST}, ["'choices': None"]),
    "no message": Case({"choices": [{"message": None, "finish_reason": PAST}]}, ["'message': None"]),
    "OpenRouter, broken off": Case(message("Fo", PAST), ["broke off", PAST]),
    "vLLM, aborted": Case({**message("Fo", "abort"), "note": PAST}, ["broke off", "abort"]),
    "a page": Case(f"<html>{PAST}</html>", ["not JSON", "<html>"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_answers_and_what_is_none(name: str) -> None:
    """The reply to the second of three prompts; the others are answered in any case."""
    reply, right = CASES[name]
    prompts = write_rows(Path("prompts.jsonl"), [{"prompt": each} for each in ("1 + 1", "2 + 2", "3 + 3")])
    counts = Counter[str]()

    def answer(body: dict[str, Any]) -> str | tuple[int, object]:
        counts[prompt := body["messages"][-1]["content"]] += 1
        return (403 if name == "OpenRouter, filter" else 200, reply) if prompt == "2 + 2" else "Two."

    with serving(answer) as server:
        words = [prompts, "-n", "1", "--concurrency", "1", "--endpoint", server.url]
        if isinstance(right, list):
            with raises(UserError, f"{prompts}:2", "--endpoint", *right) as error:
                run("sample", *words)
            is_repeated = PAST in str(reply)
            assert counts == {"1 + 1": 1, "2 + 2": ATTEMPTS if is_repeated else 1, "3 + 3": 1}
            assert ("6 attempts" in str(error.value)) == is_repeated
        else:
            run("sample", *words)
    rows = {row["line"]: {key: row[key] for key in ("answer", "finish")} for row in read(OUT)}
    two = {"answer": "Two.", "finish": "stop"}
    assert rows == {1: two, 3: two} | ({2: {"finish": "stop", **right}} if isinstance(right, dict) else {})


def test_a_reply_without_an_answer_is_asked_again(prompts: Path) -> None:
    replies = iter([case.reply for case in CASES.values() if PAST in str(case.reply)][: ATTEMPTS - 1])
    with serving(lambda body: next(((200, reply) for reply in replies), "Water.")) as server:
        run("sample", prompts, "-n", "1", "--concurrency", "1", "--endpoint", server.url)
        assert len(server.requests) == 2 + ATTEMPTS - 1
    assert [row["answer"] for row in read(OUT)] == ["Water.", "Water."]


def test_a_server_that_answers_no_prompt_is_given_up() -> None:
    prompts = write_rows(Path("prompts.jsonl"), [{"prompt": f"Question {number}"} for number in range(12)])
    with (
        serving(lambda body: (200, {"error": "no credits"})) as server,
        raises(UserError, "--endpoint", "10 requests in a row", "no credits", "repeat the command"),
    ):
        run("sample", prompts, "-n", "1", "--concurrency", "1", "--endpoint", server.url)


def refusal(text: str, status: int = 400) -> tuple[int, object]:
    return status, {"error": {"message": text, "code": None}}


OPENAI_LIMIT = refusal("Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens' instead.")
OPENAI_TEMPERATURE = refusal("Unsupported value: 'temperature' does not support 0.5. Only the default (1) is supported.")
VLLM_LIMIT = refusal("'max_tokens' or 'max_completion_tokens' is too large: 512. The context is 256 tokens.")
SETTINGS = {"max_tokens": 8, "temperature": 0.5, "top_p": 0.9, "seed": 0}  # seed: another one in each request
REFUSED: dict[str, tuple[dict[str, tuple[int, object]], dict[str, str | None]]] = {
    "OpenAI, reasoning": (
        {"max_tokens": OPENAI_LIMIT, "temperature": OPENAI_TEMPERATURE},
        {"max_tokens": "max_completion_tokens", "temperature": None},
    ),
    "another limit": (
        {"max_tokens": refusal("Unrecognized request argument supplied: max_tokens")},
        {"max_tokens": "max_completion_tokens"},
    ),
    "OpenAI, seed": ({"seed": refusal("Unrecognized request argument: seed")}, {"seed": None}),
    "Mistral": ({"seed": (422, {"detail": [{"loc": ["body", "seed"], "msg": "Extra inputs"}]})}, {"seed": None}),
    "LiteLLM, Claude": ({"top_p": refusal("`temperature` and `top_p` cannot both be specified")}, {"temperature": None}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_a_server_refuses(name: str, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Replies to requests with a setting, and its name in the requests that are answered."""
    replies, names = REFUSED[name]

    def answer(body: dict[str, Any]) -> str | tuple[int, object]:
        both = not {"temperature", "top_p"} <= body.keys() and name.startswith("LiteLLM")
        return next((reply for key, reply in replies.items() if key in body and not both), "Water.")

    words = ["--max-new-tokens", "8", "--temperature", "0.5", "--top-p", "0.9", "-n", "2", "--concurrency", "1"]
    with serving(answer) as server:
        run("sample", prompts, "--endpoint", server.url, *words)
        assert len(server.requests) == 4 + len(names), "each is refused once"
        sent = server.requests[-1].keys()
    assert sent - {"model", "messages"} >= {new for key in SETTINGS if (new := names.get(key, key))}
    assert not sent & names.keys()
    warnings = capsys.readouterr().err
    assert warnings.count("warning: --endpoint refuses") == len(names)
    for key, other in names.items():
        assert f"refuses {key} {SETTINGS[key]}" in warnings or key == "seed"
        assert (f"{other} is sent instead" if other else "left out of all requests") in warnings
    left_out = [key for key in ("max_tokens", "seed", "temperature", "top_p") if key in names and names[key] is None]
    assert [row.get("left_out", []) for row in read(OUT)] == [left_out] * 4
    assert {row["settings"]["temperature"] for row in read(OUT)} == {0.5}


def test_an_error_that_only_names_a_setting_changes_none(prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(body: dict[str, Any]) -> str | tuple[int, object]:
        return VLLM_LIMIT if "river" in body["messages"][-1]["content"] else "Water."

    turned = write_rows(Path("turned.jsonl"), [*reversed(read(prompts))])
    with serving(answer) as server, raises(UserError, f"{turned}:1", "too large: 512", "as the server says"):
        run("sample", turned, "--endpoint", server.url, "-n", "1", "--concurrency", "1")
    assert server.requests[-1]["max_tokens"] == 512
    assert "max_completion_tokens" not in server.requests[-1]
    assert "warning" not in capsys.readouterr().err


def test_settings_that_are_left_out(prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for name in ("seed", "max_tokens", "temperature") for word in ("--leave-out", name)]
    with serving(lambda body: (200, message("Water.", "length"))) as server:
        run("sample", prompts, "--endpoint", server.url, "-n", "1", *words)
        assert [{*body} for body in server.requests] == [{"model", "messages", "top_p", "top_k"}] * 2
    assert [row["left_out"] for row in read(OUT)] == [["max_tokens", "seed", "temperature"]] * 2
    assert capsys.readouterr() == ("out.jsonl: 2 answers, 2 cut\n", "")
    with raises(UserError, "--leave-out", "--endpoint", "seed max_tokens temperature", "leave it out"):
        run("sample", "model", prompts, *words)


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("", "/v1"),
        ("/", "/v1"),
        ("/v1", "/v1"),
        ("/v1/", "/v1"),
        ("/proxy", "/proxy/v1"),
        ("/api/paas/v4", "/api/paas/v4"),
        ("/v1beta/openai/", "/v1beta/openai"),
        ("/v2x.y", "/v2x.y/v1"),
        ("/v1/chat/completions", "/v1"),
        ("/chat/completions/", ""),
    ],
)
def test_the_version_in_a_url(given: str, asked: str) -> None:
    with serving(lambda body: "Water.") as server:
        client = endpoint.Endpoint(url=f"{server.url}{given}", option="--endpoint", concurrency=1)
        assert client.complete([]).text == "Water."
        assert server.paths == [f"{asked}/models", f"{asked}/chat/completions"]


@pytest.mark.parametrize("kind", ["single", "pair"])
def test_verdicts_in_the_replies_of_a_judge(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each reply is about a prompt of its own, with one answer or with two."""
    cases = [case for case in read(DATA / "judge_replies.jsonl") if case["question"] == kind]
    texts, words = (["one"], []) if kind == "single" else (["one", "another"], ["--pairs"])
    file = answers("answers.jsonl", texts * len(cases), each=len(texts), prompt="<{}>")
    first = dict[int, str]()

    def answer(body: dict[str, Any]) -> str:
        asked = body["messages"][1]["content"]
        line = int(asked.partition("<user>\n<")[2].partition(">")[0])
        first[line] = asked.partition("<answer>\n")[2].partition("\n")[0]
        return str(cases[line - 1]["reply"])

    with serving(answer) as server:
        run("label", file, *words, "--judge", server.url, "--rubric", "rubric.txt")
    found = ["no verdict" for _ in cases]
    for row in read(OUT):
        line = row["source"]["line"]
        is_first = row["label"] if kind == "single" else row["chosen"] == first[line]
        found[line - 1] = {"single": ("bad", "good"), "pair": ("B", "A")}[kind][is_first]
    assert [{**case, "right": verdict} for case, verdict in zip(cases, found, strict=True)] == cases
    assert Message(f"{found.count('no verdict')} questions without a verdict") == capsys.readouterr().err


@pytest.mark.parametrize("part", ["good ", "<think>", "not good, ", "is very ", "</think>", "(", "\n"])
def test_a_long_reply_of_a_judge_takes_no_time(part: str) -> None:
    """Seconds of CPU; a quadratic search takes minutes."""
    began = time.process_time()
    assert read_verdict(part * (80_000 // len(part)), ("good", "bad")) in (None, True)
    assert time.process_time() - began < 5


def test_a_judge_without_any_verdict_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(lambda body: (200, message(None, "length", reasoning=THOUGHTS))) as server:
        words = [answers("answers.jsonl", ["a"]), "--judge", server.url, "--rubric", "rubric.txt"]
        with raises(UserError, "the judge", "at least one question", "none on 1 question"):
            run("label", *words)
        assert Message("1 question", "answers.jsonl:1", "thoughts", "--leave-out max_tokens") == capsys.readouterr().err
        assert server.requests[0]["max_tokens"] > 0
        server.answer = lambda body: "good"
        run("label", *words, "--leave-out", "max_tokens")
        assert "max_tokens" not in server.requests[-1]
    assert [row["label"] for row in read(OUT)] == [True]
