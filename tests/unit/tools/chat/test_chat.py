"""Answers of `nemo-kto chat`: those of transformers, with the model's template and settings; histories and messages."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import select
import shutil
import sys
import termios
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_kto.errors import UserError
from nemo_kto.model_files.safetensors_files import INDEX, WRITTEN_BY
from nemo_kto.tools.chat.chat_command import main
from nemo_kto.tools.chat.session import Collector
from nemo_kto.tools.inference.chat_model import ChatModel, Sampling
from nemo_kto.tools.inference.named_models import find_model
from nemo_kto.tools.inference.row_output import open_rows
from nemo_kto.tools.rounds.answers import text_of
from tests.helpers.messages import Message, raises
from tests.helpers.run_folders import write_run
from tests.helpers.tiny_models import CHATML, EOS, TURN_END, TURN_START, make_checkpoint, make_tokenizer

SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 256}
LENGTH = ["--max-new-tokens", "12"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of random weights."""
    folder = tmp_path_factory.mktemp("models")
    return make_checkpoint(folder / "a", "llama", **SMALL), make_checkpoint(folder / "b", "llama", seed=1, **SMALL)


@pytest.fixture(autouse=True)
def fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_kto.tools.inference.chat_model.bf16_slowdown", lambda **_: 2.0)


def answers(capsys: pytest.CaptureFixture[str], words: Sequence[object]) -> list[dict[str, Any]]:
    """Objects that the command prints with --json."""
    main([*map(str, words), "--json"])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def generated_ids(folder: Path, messages: list[dict[str, str]], length: int = 12, **settings: Any) -> list[int]:
    """The tokens of transformers' generate."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**inputs, max_new_tokens=length, **settings)
    return list(ids[0, inputs["input_ids"].shape[1] :].tolist())


def generated(folder: Path, messages: list[dict[str, str]], length: int = 12, **settings: Any) -> str:
    """The answer of transformers' generate, without the token that ends it."""
    from transformers import AutoTokenizer

    ids = generated_ids(folder, messages, length, **settings)
    return str(AutoTokenizer.from_pretrained(folder).decode(ids).removesuffix(TURN_END))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_answers_are_those_of_transformers(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    first, second = folders
    system = {"role": "system", "content": "Be brief."}
    words = [first, "--against", second, "-p", "Hello", "-p", "Why?", "--system", "Be brief.", *LENGTH]
    found = answers(capsys, words)
    expected = [(folder, prompt) for prompt in ("Hello", "Why?") for folder in folders]
    assert [(line["model"], line["prompt"]) for line in found] == [(str(folder), prompt) for folder, prompt in expected]
    assert [line["answer"] for line in found] == [generated(folder, [system, user(text)]) for folder, text in expected]
    assert found[0]["answer"] != found[1]["answer"]
    assert [line["tokens"] for line in found] == [12] * 4
    assert {line["finish"] for line in found} == {"length"}


def test_lines_of_stdin_are_one_conversation_with_a_history_for_each_model(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = "Hello\n\nAnd then?\n/system Be brief.\nHello\n/reset\nHello\n/system\nHello\n/quit\nnever\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    found = answers(capsys, [folders[0], "--against", folders[1], *LENGTH])
    assert [line["prompt"] for line in found[::2]] == ["Hello", "And then?", "Hello", "Hello", "Hello"]
    for number, folder in enumerate(folders):
        own = [line["answer"] for line in found[number::2]]
        history = [user("Hello"), {"role": "assistant", "content": own[0]}, user("And then?")]
        assert own[1] == generated(folder, history)
        brief = generated(folder, [{"role": "system", "content": "Be brief."}, user("Hello")])
        assert own[2:] == [brief, brief, own[0]]  # /reset keeps the system message, /system without a text removes it


def changed(model: Path, folder: Path, **settings: Any) -> Path:
    """A copy of a model with other values in generation_config.json."""
    shutil.copytree(model, folder)
    file = folder / "generation_config.json"
    content = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(content | settings))
    return folder


def test_settings_are_those_of_the_model_and_then_those_of_the_command(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    drawing = changed(folders[0], tmp_path / "drawing", do_sample=True, temperature=2.0, max_new_tokens=9)
    same, again = (answers(capsys, [drawing, "-p", "Hello", "--seed", "3"])[0] for _ in range(2))
    torch.manual_seed(3)
    expected = generated(folders[0], [user("Hello")], 9, do_sample=True, temperature=2.0, top_k=0)
    assert same["answer"] == again["answer"] == expected
    greedy = generated(folders[0], [user("Hello")], 12)
    assert expected != greedy
    assert answers(capsys, [drawing, "-p", "Hello", "--temperature", "0", *LENGTH])[0]["answer"] == greedy
    torch.manual_seed(4)
    nucleus = generated(folders[0], [user("Hello")], 12, do_sample=True, temperature=0.7, top_p=0.5, top_k=0)
    words = [folders[0], "-p", "Hello", "--temperature", "0.7", "--top-p", "0.5", "--seed", "4", *LENGTH]
    assert answers(capsys, words)[0]["answer"] == nucleus
    narrow = changed(folders[0], tmp_path / "narrow", do_sample=True, top_k=2)
    for top_k, given in ((2, []), (3, ["--top-k", "3"])):
        torch.manual_seed(4)
        drawn = generated(folders[0], [user("Hello")], 12, do_sample=True, top_k=top_k)
        assert answers(capsys, [narrow, "-p", "Hello", "--seed", "4", *given, *LENGTH])[0]["answer"] == drawn


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_p": 0.8, "top_k": 70}], ids=["all", "narrowed"])
def test_answers_are_drawn_from_the_documented_distribution(
    folders: tuple[Path, Path], tmp_path: Path, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither settings of the model nor defaults of transformers count."""
    monkeypatch.setattr(ChatModel, "_read", lambda *_: None)  # the text of 4,000 answers
    own = changed(folders[0], tmp_path / "own", do_sample=True, top_k=3, top_p=0.5, repetition_penalty=5.0, min_p=0.4)
    model, draws = ChatModel(label="", folder=own, dtype=torch.float32), 4000
    settings = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, **sampling}
    drawn = model.draw([user("?")], Sampling(max_new_tokens=1, seed=1, **settings), count=draws, variables={})
    ids = make_tokenizer().apply_chat_template([user("?")], add_generation_prompt=True)["input_ids"]
    with torch.inference_mode():
        probs_V = (model._model(torch.tensor([ids])).logits[0, -1].double() / settings["temperature"]).softmax(0)
    most_probable = sorted(range(len(probs_V)), key=lambda token: -probs_V[token])[: settings["top_k"] or None]
    kept, total = dict[int, float](), sum(float(probs_V[token]) for token in most_probable)
    for token in most_probable:
        if sum(kept.values()) < settings["top_p"]:
            kept[token] = float(probs_V[token]) / total
    counts = Counter(token for answer in drawn for token in answer.ids)
    assert counts.keys() <= kept.keys()
    expected = {token: draws * share / sum(kept.values()) for token, share in kept.items()}
    chi_square = sum((counts[token] - number) ** 2 / number for token, number in expected.items())
    freedom = len(expected) - 1
    assert freedom > 35
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5


def test_an_answer_ends_at_the_end_of_a_turn(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    ids = generated_ids(folders[0], [user("Hello")])
    ending = changed(folders[0], tmp_path / "ending", eos_token_id=[ids[2]])
    (answer,) = answers(capsys, [ending, "-p", "Hello", *LENGTH])
    assert answer["finish"] == "stop"
    count = ids.index(ids[2]) + 1
    assert answer["tokens"] == count
    assert answer["answer"] == AutoTokenizer.from_pretrained(ending).decode(ids[: count - 1])


def test_an_answer_ends_at_a_token_of_the_template_before_the_eos(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Phi-3 without its generation_config.json has such a template."""
    ending = changed(folders[0], tmp_path / "ending")
    end = "{% if not add_generation_prompt %}" + EOS + "{% endif %}"
    (ending / "chat_template.jinja").write_text(CHATML.replace(TURN_END, TURN_START) + end)
    (ending / "generation_config.json").unlink()
    model = ChatModel(label="", folder=ending, dtype=torch.float32)
    ids = make_tokenizer().convert_tokens_to_ids([EOS, TURN_START, TURN_END])
    assert model.stop_ids == sorted(ids), "that of config.json is TURN_END"


def test_a_template_of_models_with_images_gets_parts(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without them the prompt would lack the text of the message."""
    model = changed(folders[0], tmp_path / "parts")
    turn = "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    (model / "chat_template.jinja").write_text("{% for message in messages %}" + turn + TURN_END + "{% endfor %}")
    (answer,) = answers(capsys, [model, "-p", "hello", "--temperature", "0", *LENGTH])
    message: Any = {"role": "user", "content": [{"type": "text", "text": "hello"}]}
    assert answer["answer"] == generated(model, [message], do_sample=False)


def test_an_interrupt_ends_the_answer_and_keeps_its_text(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo_kto.tools.inference.chat_model import _Stream

    put: Callable[..., None] = _Stream.put

    def stopping(stream: Any, ids: torch.Tensor) -> None:
        put(stream, ids)
        if len(stream.ids) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(_Stream, "put", stopping)
    with pytest.raises(KeyboardInterrupt):
        main([str(folders[0]), "--against", str(folders[1]), "-p", "Hello", "-p", "Why?", "--json", *LENGTH])
    (line,) = capsys.readouterr().out.splitlines()
    answer = json.loads(line)
    assert (answer["finish"], answer["tokens"]) == ("interrupted", 5)
    assert generated(folders[0], [user("Hello")]).startswith(answer["answer"].rstrip("\N{REPLACEMENT CHARACTER}"))


def test_a_model_without_a_template_completes_text(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    plain = tmp_path / "plain"
    shutil.copytree(folders[0], plain)
    (plain / "chat_template.jinja").unlink()
    tokenizer, model = AutoTokenizer.from_pretrained(plain), AutoModelForCausalLM.from_pretrained(plain)
    ids = tokenizer("Once upon", return_tensors="pt")["input_ids"]
    expected = tokenizer.decode(model.generate(ids, max_new_tokens=12)[0, ids.shape[1] :], skip_special_tokens=True)
    main([str(plain), "-p", "Once upon", "-p", "Once upon", "--json", *LENGTH])
    captured = capsys.readouterr()
    assert [json.loads(line)["answer"] for line in captured.out.splitlines()] == [expected] * 2
    assert captured.err.count("no chat template") == 1
    with raises(UserError, "--system", str(plain), "chat template"):
        main([str(plain), "--system", "Be brief.", "-p", "Hello"])


def test_a_copied_run_does_not_answer_with_the_export_of_the_original(folders: tuple[Path, Path], tmp_path: Path) -> None:
    out, run = tmp_path / "out", tmp_path / "run"
    shutil.copytree(folders[0], out)
    (out / INDEX).write_text(json.dumps({"metadata": {"written_by": WRITTEN_BY}}))
    write_run(run, [], exp_manager__explicit_log_dir=str(run), export__path=str(out))
    assert find_model("MODEL", str(run)) == out
    shutil.copytree(run, tmp_path / "copy")
    with raises(UserError, "MODEL", "checkpoint or an export", str(tmp_path / "copy"), "saved a checkpoint"):
        find_model("MODEL", str(tmp_path / "copy"))


def test_thumbs_of_a_chat_are_rows_with_the_conversation_so_far(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, keys = tmp_path / "thumbs.jsonl", iter("gsbg")
    monkeypatch.setattr("nemo_kto.tools.chat.session.read_key", lambda known: next(keys))
    monkeypatch.setattr("nemo_kto.tools.chat.chat_command.require_terminal", lambda *_, **__: None)
    out.write_text('{"prompt": "p", "response": "r", "label": true}\n{"pro')  # of an earlier chat, which was killed
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\nAnd then?\nWhy?\n"))
    main([str(folders[0]), "--collect", str(out), "--system", "Be brief.", *LENGTH])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["label"] for row in rows] == [True, True, False]
    system = {"role": "system", "content": "Be brief."}
    assert rows[1]["prompt"] == [system, user("Hello")]
    assert text_of(rows[1]["response"]) == generated(folders[0], rows[1]["prompt"])
    assert [turn["content"] for turn in rows[2]["prompt"][1::2]] == ["Hello", "And then?", "Why?"]
    assert rows[2]["source"] == {"model": str(folders[0]), "labeller": "person"}


def test_a_thumb_is_one_key_on_a_terminal(tmp_path: Path) -> None:
    """x, Down, Insert and Alt+B are none, and keys pressed before the question do not count; Ctrl-D skips."""
    process, terminal = pty.fork()
    if process == 0:
        try:
            sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
            print("answering", flush=True)
            select.select([0], [], [], 60)  # a key is pressed during the answer
            with open_rows(tmp_path / "rows.jsonl", option="--collect") as file:
                for number in range(3):
                    Collector(file=file)("m", f"question {number}", "a")
        finally:
            os._exit(0)
    shown, keys = "", ["b\n", "x\x1b[B\x1b[2~\x1bOB\x1bbg", "\x04", "b"]
    with contextlib.suppress(OSError):  # at the end of the process
        while True:
            shown += os.read(terminal, 4096).decode()
            if keys and shown.endswith(("answering\r\n", "[s]kip ")):
                while "answering" not in shown[-12:] and termios.tcgetattr(terminal)[3] & termios.ICANON:
                    time.sleep(0.01)  # until single keys are read
                os.write(terminal, keys.pop(0).encode())
    os.waitpid(process, 0)
    os.close(terminal)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["prompt"], row["label"]) for row in rows] == [("question 0", True), ("question 2", False)]
    assert [line.rpartition("]kip ")[2] for line in shown.splitlines()[-3:]] == ["g", "q", "b"]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["nowhere", "-p", "x"], ("MODEL", "nowhere", "hf:ORGANISATION/NAME")),
        (["{model}", "--against"], ("--against", "belongs to no run", "hf:ORGANISATION/NAME")),
        (["{model}", "--against", "{model}"], ("--against", "another model")),
        (["{model}", "--temperature", "0", "--top-p", "0.5"], ("--top-p", "--temperature 0")),
        (["{model}", "--temperature", "0", "--top-k", "5"], ("--top-k", "--temperature 0")),
        (["{model}", "--collect", "thumbs.jsonl"], ("--collect", "terminal", "nemo-kto label")),
        (["hf:org/absent", "-p", "x"], ("MODEL", "hf:org/absent", "HF_HUB_OFFLINE=1")),
    ],
)
def test_mistakes(words: list[str], parts: tuple[str, ...], folders: tuple[Path, Path], tmp_path: Path) -> None:
    with raises(UserError, Message(*parts)):
        main([word.format(model=folders[0], empty=tmp_path) for word in words])


@pytest.mark.parametrize(("typed", "words"), [(b"caf\xe9\n", ["-p", "-"]), (b"/system caf\xe9\n", [])])
def test_bytes_on_stdin_that_are_not_utf8(
    folders: tuple[Path, Path], typed: bytes, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(typed), encoding="utf-8"))
    with raises(UserError, "UTF-8", "'\\udce9'"):
        main([str(folders[0]), *words])
