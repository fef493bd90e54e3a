"""The script of examples/rounds: killed in any phase and started again, it continues; the model learns from its thumbs."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_kto.tools.inference.chat_model import Answer, ChatModel
from nemo_kto.tools.rounds import compare_command as compare
from nemo_kto.tools.rounds import label_command as label
from nemo_kto.tools.rounds import sample_command as sample
from tests.helpers.commands import environment, is_alive
from tests.helpers.messages import Message

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "rounds" / "run.py"
TINY = ["hardware=cpu", "trainer.kto.max_steps=2", "model.global_batch_size=8", "export.report=false"]
REAL = [
    "hardware=cpu",
    "trainer.kto.max_epochs=2",
    "model.global_batch_size=8",
    "model.optim.lr=1e-5",
    "model.kto.auto_balance=true",
    "export.report=false",
]
PROMPTS = """\
What is the capital of France? Answer with one word.
What colour is grass? Answer with one word.
Say hello.
What is two plus three? Answer with a number.
Name one animal of the sea.
How many days are in a week? Answer briefly.
Say yes or no: is fire cold?
What do bees make? One word.
Name a yellow fruit.
Who wrote Hamlet?
Write a greeting for a friend.
Name a month of the year.
What is the opposite of hot?
Give me a synonym of big.
Thank me.
What is your name?
"""


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def lines(file: Path) -> int:
    """Whole lines of a file that may not exist yet."""
    return file.read_bytes().count(b"\n") if file.is_file() else 0


@contextlib.contextmanager
def started(command: list[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run the script until the block ends, which kills it with all its processes."""
    with subprocess.Popen(
        command, cwd=folder, env=environment(folder), stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as script:
        try:
            yield script
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(script.pid, signal.SIGKILL)


def run_and_kill(command: list[str], folder: Path, until: Callable[[], object]) -> None:
    """Start the script, and kill it as soon as ``until`` is true."""
    with started(command, folder) as script:
        while not until():
            assert script.poll() is None
            time.sleep(0.05)


def run(command: list[str], folder: Path) -> str:
    """What the script prints."""
    with started(command, folder) as script:
        output, _ = script.communicate()
        assert script.returncode == 0, output
        return output


def assert_complete(rounds: Path, *, answers: int, output: str) -> list[float]:
    """Each answer is drawn and labelled once; return the shares of good answers, which the script has printed."""
    shares = []
    for folder in (rounds / "1", rounds / "2", rounds / "3"):
        sampled, thumbs = rows(folder / "answers.jsonl"), rows(folder / "thumbs.jsonl")
        keys = {(row["line"], row["index"]) for row in sampled}
        assert len(sampled) == len(thumbs) == len(keys) == answers
        assert {(row["source"]["line"], row["source"]["index"]) for row in thumbs} == keys
        shares.append(sum(row["label"] is True for row in thumbs) / answers)
    for number, share in enumerate(shares):
        assert f"{number:11}  {share:.1%}" in output
    return shares


SERVER = """
import os, socket, sys, time
with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as listener:
    open("pid", "w").write(str(os.getpid()))
    while True:
        connection, _ = listener.accept()
        connection.sendall(b"SSH-2.0-none\\r\\n")
        connection.close()
"""


def with_server(folder: Path, serve: str, endpoint: str, *words: str) -> list[str]:
    """The command whose server is no server of models."""
    (folder / "serve.py").write_text(SERVER)
    (folder / "prompts.txt").write_text("?")
    given = ["m", "prompts.txt", "--score", "mine.f", "--serve", serve, "--endpoint", endpoint, *words]
    return [sys.executable, str(SCRIPT), *given]


@pytest.fixture
def port() -> int:
    """A free port outside the range that the system gives to other processes meanwhile."""
    for number in random.sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", number)):
            return number
    raise AssertionError("no free port")


@pytest.mark.parametrize(
    ("serve", "endpoint", "parts"),
    [
        ("", "http://localhost:1", ["--serve", "a command", "got nothing", "vllm serve"]),
        ("'open", "http://localhost:1", ["--serve", "'open", "close the quote"]),
        ("gone-command {model}", "http://localhost:1", ["--serve", "gone-command", "correct it"]),
        ("false", "http://localhost:1", ["--serve", "status 1", "correct it"]),
        ("x", "", ["--endpoint", "a URL", "got nothing", "http://localhost:8000"]),
        ("x", "http://[", ["--endpoint", "a URL", "http://["]),
        ("x", "http://a..b", ["--endpoint", "a URL", "http://a..b"]),
        ("x", "ftp://me:pass1word@host", ["--endpoint", "a URL", "ftp://***@host"]),
        ("{python} serve.py {port}", "http://127.0.0.1:{port}", ["--serve", "ready within 0.03 minutes", "--ready-minutes"]),
        ("{python} serve.py {port} the-secret-key", "http://u:the-secret-key@127.0.0.1:{port}", ["--serve", "://***@"]),
    ],
)  # fmt: skip
def test_a_server_that_cannot_be_used_is_one_error(
    serve: str, endpoint: str, parts: list[str], port: int, tmp_path: Path
) -> None:
    names = {"{python}": sys.executable, "{port}": str(port)}
    for name, value in names.items():
        serve, endpoint = serve.replace(name, value), endpoint.replace(name, value)
    given = {**environment(tmp_path), "OPENAI_API_KEY": "the-secret-key"}
    command = with_server(tmp_path, serve, endpoint, "--ready-minutes", "0.03")
    done = subprocess.run(command, cwd=tmp_path, env=given, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert Message(*parts) == done.stderr
    assert "Traceback" not in done.stderr
    assert "the-secret-key" not in done.stdout + done.stderr
    assert "pass1word" not in done.stdout + done.stderr
    if (tmp_path / "pid").exists():
        assert not is_alive(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_the_server_ends_with_the_script(ending: signal.Signals, port: int, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    command = with_server(tmp_path, f"{sys.executable} serve.py {port}", f"http://127.0.0.1:{port}")
    with subprocess.Popen(command, cwd=tmp_path, env=environment(tmp_path), stderr=subprocess.DEVNULL) as script:
        while not (pid.exists() and pid.read_text()):
            assert script.poll() is None
            time.sleep(0.05)
        server = int(pid.read_text())
        assert is_alive(server)
        script.send_signal(ending)
        script.wait(20)
    deadline = time.monotonic() + 20
    while is_alive(server) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(server)


def test_a_script_under_nohup_outlives_its_terminal(port: int, tmp_path: Path) -> None:
    command = ["nohup", *with_server(tmp_path, f"{sys.executable} serve.py {port}", f"http://127.0.0.1:{port}")]
    with subprocess.Popen(command, cwd=tmp_path, env=environment(tmp_path), stderr=subprocess.DEVNULL) as script:
        while not (tmp_path / "pid").exists():
            assert script.poll() is None
            time.sleep(0.05)
        script.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            script.wait(2)
        script.terminate()


@pytest.mark.slow
def test_rounds_continue_where_they_were_killed(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("".join(f"question {number}\n" for number in range(6)))
    (tmp_path / "mine.py").write_text("def even(prompt, answer):\n    return len(answer) % 2 == 0\n")
    given = [str(tiny_llama), "prompts.txt", "--score", "mine.even", "--rounds", "2", "--reference", "first"]
    command = [sys.executable, str(SCRIPT), *given, "--sample", "-n 4 --max-new-tokens 8 --temperature 1", *TINY]
    rounds = tmp_path / "runs" / "rounds"
    run_and_kill(command, tmp_path, (rounds / "1" / "run" / "metrics.jsonl").is_file)
    labelled = (rounds / "1" / "thumbs.jsonl").read_bytes()
    output = run(command, tmp_path)
    assert (rounds / "1" / "thumbs.jsonl").read_bytes() == labelled
    assert_complete(rounds, answers=24, output=output)
    for folder in (rounds / "1" / "run", rounds / "2" / "run"):
        assert len(rows(folder / "metrics.jsonl")) >= 2
        assert (folder / "hf" / "config.json").is_file()
        (comparison,) = rows(folder / "comparisons.jsonl")
        assert comparison["base"] == str(tiny_llama)
    assert {row["model"] for row in rows(rounds / "2" / "answers.jsonl")} == {"runs/rounds/1/run/hf"}
    config = (rounds / "2" / "run" / "config.yaml").read_text(encoding="utf-8")
    assert f"restore_from_path: {tiny_llama}" in config, "the reference of the second round"
    assert "win rate against" in (rounds / "report.html").read_text(encoding="utf-8")
    again = run(command, tmp_path)
    assert "step 2/2  loss" not in again, "a finished round changes nothing"


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_rounds_with_a_server_raise_the_share_of_short_answers(smollm2: Path, tmp_path: Path) -> None:
    """SmolLM2-135M, served by transformers, and killed in each phase."""
    pytest.importorskip("openai", reason="transformers serve needs it")
    model = tmp_path / "smollm2"
    shutil.copytree(smollm2, model)
    settings = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps({**settings, "do_sample": True}))
    (tmp_path / "prompts.txt").write_text(PROMPTS)
    (tmp_path / "mine.py").write_text("def short(prompt, answer):\n    return len(answer) <= 70\n")
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    serve = f"{Path(sys.executable).with_name('transformers')} serve {{model}} --port {port} --dtype float32 --device cpu"
    given = ["smollm2", "prompts.txt", "--score", "mine.short", "--rounds", "2", "--serve", serve]
    given += ["--endpoint", f"http://localhost:{port}", "--sample", "-n 2 --max-new-tokens 32 --concurrency 1"]
    command = [sys.executable, str(SCRIPT), *given, *REAL]
    rounds = tmp_path / "runs" / "rounds"
    first, run_folder = rounds / "1", rounds / "1" / "run"
    phases: list[Callable[[], object]] = [
        lambda: lines(first / "answers.jsonl") >= 5,
        (first / "thumbs.jsonl").is_file,
        lambda: lines(run_folder / "metrics.jsonl") >= 2,
        lambda: any(run_folder.glob("hf*")),
        lambda: lines(rounds / "2" / "answers.jsonl") >= 5,
    ]
    for until in phases:
        run_and_kill(command, tmp_path, until)
    shares = assert_complete(rounds, answers=32, output=run(command, tmp_path))
    assert shares[0] < 0.6
    assert shares[2] > shares[0] + 0.2
    (comparison,) = rows(rounds / "2" / "run" / "comparisons.jsonl")
    assert comparison["rate"] > 0.5
    own, other = comparison["mean_lengths"]
    assert own < other


@pytest.mark.slow
def test_a_run_trains_the_tokens_that_a_real_model_has_drawn(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SmolLM2-135M at temperature 1 writes texts that its tokenizer divides otherwise."""
    from datasets import Dataset

    draw, drawn = ChatModel.draw, list[Any]()

    def noted(*arguments: Any, **named: Any) -> list[Answer]:
        drawn.extend(answers := draw(*arguments, **named))
        return answers

    monkeypatch.setattr(ChatModel, "draw", noted)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS.splitlines()[:4]))
    (tmp_path / "half.py").write_text("def good(prompt, answer):\n    return len(answer) % 2 == 0\n")
    sample.main([str(smollm2), "prompts.txt", "--out", "answers.jsonl", "-n", "4", "--max-new-tokens", "48"])
    label.main(["answers.jsonl", "--out", "thumbs.jsonl", "--score", "half.good"])
    compare.main(["answers.jsonl", "answers.jsonl", "--out", "compared.jsonl", "--score", "half.good"])
    assert "other tokens" not in capsys.readouterr().err
    thumbs = rows(tmp_path / "thumbs.jsonl")
    assert sum(isinstance(row["response"], list) for row in thumbs) > 0
    assert [row["verdict"] for row in rows(tmp_path / "compared.jsonl")] == ["tie"] * 16
    words = [str(smollm2), "thumbs.jsonl", *TINY, "trainer.kto.max_steps=1", "model.data.splits_string=null"]
    words += ["trainer.kto.limit_val_batches=0", "export.enabled=false", "exp_manager.explicit_log_dir=run"]
    words.append("model.data.cache_dir=cache")
    subprocess.run([sys.executable, "-m", "nemo_kto.cli.main", "kto", *words], env=environment(), check=True)
    (cache,) = (tmp_path / "cache").rglob("kto-*.arrow")
    trained = [list(ids) for ids in Dataset.from_file(str(cache))["response_ids"]]
    assert [ids[: len(answer.ids)] for ids, answer in zip(trained, drawn, strict=True)] == [each.ids for each in drawn]
