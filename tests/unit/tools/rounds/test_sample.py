"""`nemo-kto sample`: answers of this machine and of a server, and files that a killed command left."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_kto.errors import UserError
from nemo_kto.tools.rounds import endpoint
from nemo_kto.tools.rounds import sample_command as sample
from nemo_kto.tools.rounds.answers import text_of
from tests.helpers.messages import Message, raises
from tests.helpers.openai_server import DROP, serving
from tests.helpers.tiny_models import write_rows
from tests.unit.tools.rounds.conftest import read, run_and_kill

SHORT = ["-n", "3", "--max-new-tokens", "8", "--seed", "5"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_kto.tools.inference.chat_model.bf16_slowdown", lambda **_: 2.0)
    monkeypatch.setattr(endpoint, "_FIRST_DELAY", 0.01)


def run(*words: object) -> None:
    sample.main([*map(str, words)])


def test_answers_are_draws_of_transformers_and_a_cut_file_is_continued(
    small_model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "answers.jsonl"
    run(small_model, prompts, "--out", out, *SHORT)
    assert f"{out}: 6 answers, 6 cut at 8 tokens" in capsys.readouterr().out
    rows = read(out)
    assert [(row["line"], row["index"]) for row in rows] == [(line, index) for line in (1, 2) for index in range(3)]
    assert rows[0]["prompt"] == [{"role": "user", "content": "What is a lake?"}]
    assert rows[3]["model"] == str(small_model)
    assert len({text_of(row["answer"]) for row in rows}) == 6
    tokenizer, model = AutoTokenizer.from_pretrained(small_model), AutoModelForCausalLM.from_pretrained(small_model)
    inputs = tokenizer.apply_chat_template(
        rows[3]["prompt"], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    torch.manual_seed(sample._seed(5, 2))
    ids = model.generate(**inputs, do_sample=True, top_k=0, num_return_sequences=3, max_new_tokens=8, min_new_tokens=8)
    texts = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert [text_of(row["answer"]) for row in rows[3:]] == texts

    whole = out.read_bytes()
    ends = [place for place, byte in enumerate(whole, start=1) if byte == ord("\n")]
    for size in (ends[4] + 7, ends[1], ends[5] - 1):  # within a line, between two answers, without the last line break
        out.write_bytes(whole[:size])
        run(small_model, prompts, "--out", out, *SHORT)
        assert out.read_bytes() == whole
    run(small_model, prompts, "--out", out, *SHORT)
    assert "(0 new)" in capsys.readouterr().out
    assert out.read_bytes() == whole


def test_a_killed_command_continues(small_model: Path, tmp_path: Path) -> None:
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": f"Question {number}"} for number in range(8)])
    words = [small_model, prompts, "-n", "2", "--max-new-tokens", "24", "--device", "cpu"]
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    run(*words, "--out", whole)
    run_and_kill(run, *words, "--out", killed, writes=5)
    assert 0 < len(read(killed)) < 16
    run(*words, "--out", killed)
    assert killed.read_bytes() == whole.read_bytes()


def test_a_server_that_fails_at_first(prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key-of-a-test")
    out = tmp_path / "answers.jsonl"
    with serving(lambda body: f"{body['messages'][-1]['content']} {body['seed']}", [500, DROP, 429]) as server:
        run(prompts, "--endpoint", f"{server.url}/v1", "--out", out, *SHORT, "--system", "Be brief.", "--concurrency", "2")
        assert len(server.requests) == 6
        assert set(server.keys) == {"Bearer key-of-a-test"}
        settings = {"model": "served", "max_tokens": 8, "temperature": 1.0, "top_p": 1.0, "top_k": -1}
        assert {key: server.requests[0][key] for key in settings} == settings
        rows = read(out)
        assert len({row["answer"] for row in rows}) == 6, "each has a seed of its own"
        assert all(row["prompt"][0] == {"role": "system", "content": "Be brief."} for row in rows)
        lines = out.read_text().splitlines(keepends=True)
        out.write_text("".join(lines[:4]))
        run(prompts, "--endpoint", server.url, "--out", out, *SHORT, "--system", "Be brief.")
        assert len(server.requests) == 8
        assert sorted(out.read_text().splitlines(keepends=True)) == sorted(lines)


@pytest.mark.parametrize(("given", "sent"), [([], [None] * 4), (["--top-k", "9"], [])])
def test_a_server_that_does_not_know_top_k(prompts: Path, tmp_path: Path, given: list[str], sent: list[int | None]) -> None:
    """It draws from all tokens, unless it should not."""
    with serving(lambda body: f"REFUSED top_k is unknown, got {body['top_k']}" if "top_k" in body else "Lake.") as server:
        words = [prompts, "--endpoint", server.url, "--out", tmp_path / "answers.jsonl", "-n", "2", *given]
        if given:
            with raises(UserError, f"{prompts}:1", "--endpoint", "400", "top_k is unknown, got 9"):
                run(*words)
        else:
            run(*words)
        assert [body.get("top_k") for body in server.requests] == sent


def test_equal_answers_of_a_server_are_a_warning(prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers: dict[str, Callable[[dict[str, Any]], str]] = {
        "equal": lambda body: "Water.",
        "different": lambda body: f"Water {body['seed']}",
    }
    for name, answer in answers.items():
        with serving(answer) as server:
            run(prompts, "--endpoint", server.url, "--out", tmp_path / name, "-n", "2")
            run(prompts, "--endpoint", server.url, "--out", tmp_path / f"{name} single", "-n", "1")
        warned = Message("all answers to each prompt are equal", "most probable token") == capsys.readouterr().err
        assert warned == (name == "equal")


def test_an_error_does_not_wait_for_other_replies(prompts: Path, tmp_path: Path) -> None:
    given, waited = threading.Event(), list[bool]()

    def answer(body: dict[str, Any]) -> str:
        waited.append(given.wait(60))
        return "late"

    with serving(answer, [401]) as server:
        with raises(UserError, "--endpoint", "401", "OPENAI_API_KEY"):
            run(prompts, "--endpoint", server.url, "--model", "m", "--out", tmp_path / "answers.jsonl", "--concurrency", "2")
        assert waited == []
        given.set()


def test_a_refused_prompt_is_reported_after_the_others(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    with (
        serving(lambda body: "REFUSED" if "river" in body["messages"][-1]["content"] else "Water.") as server,
        raises(UserError, f"{prompts}:2", "--endpoint", "400", "maximum context length", "as the server says"),
    ):
        run(prompts, "--endpoint", server.url, "--out", out, "-n", "2")
    assert [(row["line"], row["answer"]) for row in read(out)] == [(1, "Water.")] * 2


def test_a_prompt_above_the_context_is_reported_after_the_others(small_model: Path, tmp_path: Path) -> None:
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "x" * 300}, {"prompt": "Hello"}])
    with raises(UserError, f"{prompts}:1", "256", "write less"):
        run(small_model, prompts, "--out", tmp_path / "answers.jsonl", *SHORT)
    assert [row["line"] for row in read(tmp_path / "answers.jsonl")] == [2] * 3


def test_a_file_of_another_command_is_refused_with_all_differences(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    with serving(lambda body: "Water.") as server:
        run(prompts, "--endpoint", server.url, "--out", out, *SHORT)
        write_rows(prompts, [{"prompt": "What is a pond?"}])
        server.models = ["other"]
        parts = (str(out), "temperature 1.0 instead of 0.5", "seed 5 instead of 6", "model 'served' instead of 'other'")
        others = (f"another prompt than {prompts}:1", "prompts of another file", "another --out")
        with raises(UserError, "--out", *parts, *others):
            run(prompts, "--endpoint", server.url, "--out", out, *SHORT, "--seed", "6", "--temperature", "0.5")


def test_other_arguments_of_the_template_are_another_command(tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    with serving(lambda body: "Water.") as server:
        for thinks in (True, False):
            turns = [[{"role": "user", "content": f"{number}?"}] for number in range(9)]
            write_rows(prompts, [{"messages": each, "chat_template_kwargs": {"thinks": thinks}} for each in turns])
            words = (prompts, "--endpoint", server.url, "--out", out, *SHORT)
            if thinks:
                run(*words)
        with raises(UserError, "--out", "another prompt than", f"{prompts}:1", "and 4 more") as error:
            run(*words)
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
def test_mistakes(words: list[str], message: Message, small_model: Path, prompts: Path, tmp_path: Path) -> None:
    turns: list[dict[str, Any]] = [{"role": "user", "content": "?"}]
    rows: list[dict[str, Any]] = [
        {"messages": turns, "tools": [{}]},
        {"messages": [{"role": "system", "content": "s"}, *turns]},
    ]
    tools = write_rows(tmp_path / "tools.jsonl", rows)
    given = [word.format(model=small_model, prompts=prompts, tools=tools) for word in words]
    with raises(UserError, message):
        run(*given, *([] if "--out" in words else ["--out", tmp_path / "answers.jsonl"]))


def test_a_server_that_is_none(prompts: Path, tmp_path: Path) -> None:
    words = [prompts, "--out", tmp_path / "answers.jsonl", "--endpoint"]
    with serving(lambda body: "Water.", [401]) as server:
        with raises(UserError, "--endpoint", server.url, "401", "OPENAI_API_KEY"):
            run(*words, server.url, "--concurrency", "1")
        server.models = ["a", "b"]
        with raises(UserError, "--model", "a, b"):
            run(*words, server.url)
        run(*words, server.url, "--model", "b", "-n", "1")
        assert {body["model"] for body in server.requests[-2:]} == {"b"}
