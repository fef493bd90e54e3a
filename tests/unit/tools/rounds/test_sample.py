"""`nemo-kto sample`: answers of this machine and of a server, and files that a killed command left."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_kto.errors import UserError
from nemo_kto.tools.rounds.answers import text_of
from nemo_kto.tools.rounds.sample_command import _seed
from tests.helpers.messages import Message, raises
from tests.helpers.openai_server import DROP, OpenAIServer, serving
from tests.helpers.tiny_models import write_rows
from tests.unit.tools.rounds import conftest
from tests.unit.tools.rounds.conftest import read, run_and_kill

OUT = Path("out.jsonl")
SHORT = ["-n", "3", "--max-new-tokens", "8", "--seed", "5"]


def run(*words: object) -> None:
    conftest.run("sample", *words)


def sample(server: OpenAIServer, prompts: Path, *words: object) -> None:
    run(prompts, "--endpoint", server.url, *words)


def test_answers_are_draws_of_transformers_and_a_cut_file_is_continued(
    small_model: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run(small_model, prompts, *SHORT)
    assert capsys.readouterr().out == "out.jsonl: 6 answers, 6 cut at 8 tokens\n"
    rows = read(OUT)
    assert [(row["line"], row["index"]) for row in rows] == [(line, index) for line in (1, 2) for index in range(3)]
    assert rows[0]["prompt"] == [{"role": "user", "content": "What is a lake?"}]
    assert rows[3]["model"] == str(small_model)
    assert len({text_of(row["answer"]) for row in rows}) == 6
    tokenizer, model = AutoTokenizer.from_pretrained(small_model), AutoModelForCausalLM.from_pretrained(small_model)
    inputs = tokenizer.apply_chat_template(
        rows[3]["prompt"], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    torch.manual_seed(_seed(5, 2))
    ids = model.generate(**inputs, do_sample=True, top_k=0, num_return_sequences=3, max_new_tokens=8, min_new_tokens=8)
    texts = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert [text_of(row["answer"]) for row in rows[3:]] == texts

    whole = OUT.read_bytes()
    ends = [place for place, byte in enumerate(whole, start=1) if byte == ord("\n")]
    # within a line, between two answers, without the last line break, and the whole file
    for size, added in ((ends[4] + 7, " (1 new)"), (ends[1], " (4 new)"), (ends[5] - 1, " (0 new)"), (None, " (0 new)")):
        OUT.write_bytes(whole[:size])
        run(small_model, prompts, *SHORT)
        assert capsys.readouterr().out == f"out.jsonl: 6 answers{added}, 6 cut at 8 tokens\n"
        assert OUT.read_bytes() == whole


def test_a_killed_command_continues(small_model: Path) -> None:
    prompts = write_rows(Path("prompts.jsonl"), [{"prompt": f"Question {number}"} for number in range(8)])
    words = [small_model, prompts, "-n", "2", "--max-new-tokens", "24", "--device", "cpu", "--out"]
    run(*words, "whole.jsonl")
    run_and_kill(run, *words, "killed.jsonl", writes=5)
    assert 0 < len(read(Path("killed.jsonl"))) < 16
    run(*words, "killed.jsonl")
    assert Path("killed.jsonl").read_bytes() == Path("whole.jsonl").read_bytes()


def test_a_server_that_fails_at_first(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key-of-a-test")
    with serving(lambda body: f"{body['messages'][-1]['content']} {body['seed']}", [500, DROP, 429]) as server:
        words = [*SHORT, "--system", "Be brief.", "--concurrency", "2"]
        sample(server, prompts, *words)
        assert len(server.requests) == 6
        assert set(server.keys) == {"Bearer key-of-a-test"}
        settings = {"model": "served", "max_tokens": 8, "temperature": 1.0, "top_p": 1.0, "top_k": -1}
        assert {key: server.requests[0][key] for key in settings} == settings
        rows = read(OUT)
        assert len({row["answer"] for row in rows}) == 6, "each has a seed of its own"
        assert all(row["prompt"][0] == {"role": "system", "content": "Be brief."} for row in rows)
        lines = OUT.read_text().splitlines(keepends=True)
        OUT.write_text("".join(lines[:4]))
        sample(server, prompts, *words)
        assert len(server.requests) == 8
        assert sorted(OUT.read_text().splitlines(keepends=True)) == sorted(lines)


@pytest.mark.parametrize(("given", "sent"), [([], [None] * 4), (["--top-k", "9"], [])])
def test_a_server_that_does_not_know_top_k(prompts: Path, given: list[str], sent: list[int | None]) -> None:
    """It draws from all tokens, unless it should not."""
    with serving(lambda body: f"REFUSED top_k is unknown, got {body['top_k']}" if "top_k" in body else "Lake.") as server:
        parts = [f"{prompts}:1", "--endpoint", "400", "top_k is unknown, got 9"]
        with raises(UserError, *parts) if given else contextlib.nullcontext():
            sample(server, prompts, "-n", "2", *given)
        assert [body.get("top_k") for body in server.requests] == sent


@pytest.mark.parametrize(
    ("answer", "count", "is_warned"), [("Water.", 2, True), ("Water {seed}", 2, False), ("Water.", 1, False)]
)
def test_equal_answers_of_a_server_are_a_warning(
    answer: str, count: int, is_warned: bool, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(lambda body: answer.format(**body)) as server:
        sample(server, prompts, "-n", count)
    text = "nemo-kto sample: warning: all answers to each prompt are equal; "
    warning = f"{text}perhaps the server takes the most probable token, whatever it is asked for"
    assert (warning in capsys.readouterr().err.splitlines()) == is_warned


def test_an_error_does_not_wait_for_other_replies(prompts: Path) -> None:
    given, waited = threading.Event(), list[bool]()

    def answer(body: dict[str, Any]) -> str:
        waited.append(given.wait(60))
        return "late"

    with serving(answer, [401]) as server:
        with raises(UserError, "--endpoint", "401", "OPENAI_API_KEY"):
            sample(server, prompts, "--model", "m", "--concurrency", "2")
        assert waited == []
        given.set()


def test_a_refused_prompt_is_reported_after_the_others(prompts: Path) -> None:
    with (
        serving(lambda body: "REFUSED" if "river" in body["messages"][-1]["content"] else "Water.") as server,
        raises(UserError, f"{prompts}:2", "--endpoint", "400", "maximum context length", "as the server says"),
    ):
        sample(server, prompts, "-n", "2")
    assert [(row["line"], row["answer"]) for row in read(OUT)] == [(1, "Water.")] * 2


def test_a_prompt_above_the_context_is_reported_after_the_others(small_model: Path) -> None:
    prompts = write_rows(Path("prompts.jsonl"), [{"prompt": "x" * 300}, {"prompt": "Hello"}])
    with raises(UserError, f"{prompts}:1", "256", "write less"):
        run(small_model, prompts, *SHORT)
    assert [row["line"] for row in read(OUT)] == [2] * 3


def test_a_file_of_another_command_is_refused_with_all_differences(prompts: Path) -> None:
    with serving(lambda body: "Water.") as server:
        sample(server, prompts, *SHORT)
        write_rows(prompts, [{"prompt": "What is a pond?"}])
        server.models = ["other"]
        parts = ("out.jsonl", "temperature 1.0 instead of 0.5", "seed 5 instead of 6", "model 'served' instead of 'other'")
        others = (f"another prompt than {prompts}:1", "prompts of another file", "another --out")
        with raises(UserError, "--out", *parts, *others):
            sample(server, prompts, *SHORT, "--seed", "6", "--temperature", "0.5")


def test_other_arguments_of_the_template_are_another_command() -> None:
    prompts = Path("prompts.jsonl")
    turns = [[{"role": "user", "content": f"{number}?"}] for number in range(9)]
    with serving(lambda body: "Water.") as server:
        write_rows(prompts, [{"messages": each, "chat_template_kwargs": {"thinks": True}} for each in turns])
        sample(server, prompts, *SHORT)
        write_rows(prompts, [{"messages": each, "chat_template_kwargs": {"thinks": False}} for each in turns])
        with raises(UserError, "--out", "another prompt than", f"{prompts}:1", "and 4 more") as error:
            sample(server, prompts, *SHORT)
        assert f"{prompts}:9" not in str(error.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{model}", "{prompts}", "--temperature", "0"], Message("-n", "--temperature 0", "4")),
        (["{prompts}"], Message("RUN|MODEL", "--endpoint", "neither")),
        (["{model}", "{prompts}", "--model", "x"], Message("--model", "--endpoint", "x", "leave it out")),
        (["{model}", "{prompts}", "--system", "\udcff"], Message("--system", "UTF-8")),
        (["{prompts}", "--endpoint", "localhost"], Message("--endpoint", "a URL", "localhost", "http://localhost:8000")),
        (["{prompts}", "--endpoint", "http://127.0.0.1:9"], Message("--endpoint", "127.0.0.1:9", "6 attempts", "start")),
        (["{model}", "{prompts}", "--out", "{prompts}"], Message("--out", "prompts of another file", "another --out")),
        (["{model}", "{tools}"], Message("tools.jsonl:1", "tools", "leave them out")),
        (["{model}", "{tools}", "--system", "x"], Message("tools.jsonl:2", "--system", "leave one out", "tools.jsonl:1")),
    ],
)  # fmt: skip
def test_mistakes(words: list[str], message: Message, small_model: Path, prompts: Path) -> None:
    turns: list[dict[str, Any]] = [{"role": "user", "content": "?"}]
    rows: list[dict[str, Any]] = [
        {"messages": turns, "tools": [{}]},
        {"messages": [{"role": "system", "content": "s"}, *turns]},
    ]
    tools = write_rows(Path("tools.jsonl"), rows)
    with raises(UserError, message):
        run(*(word.format(model=small_model, prompts=prompts, tools=tools) for word in words))


def test_a_server_that_is_none(prompts: Path) -> None:
    with serving(lambda body: "Water.", [401]) as server:
        with raises(UserError, "--endpoint", server.url, "401", "OPENAI_API_KEY"):
            sample(server, prompts, "--concurrency", "1")
        server.models = ["a", "b"]
        with raises(UserError, "--model", "a, b"):
            sample(server, prompts)
        sample(server, prompts, "--model", "b", "-n", "1")
        assert {body["model"] for body in server.requests[-2:]} == {"b"}
