"""`nemo-kto compare`: decisions of a function, a judge and a reward model; files that a killed command left; the report."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_kto.artifacts.safetensors_files import INDEX, SINGLE, WRITTEN_BY
from nemo_kto.errors import UserError, show
from nemo_kto.records.run_record import COMPARISONS_FILE, ComparisonResult, read_run, record_comparison
from nemo_kto.tools.inference.reward_model import RewardModel
from nemo_kto.tools.report.report_page import content_of
from nemo_kto.tools.rounds import compare_command as compare
from nemo_kto.tools.rounds import sample_command as sample
from nemo_kto.utils.text import interval_text, percent_text
from tests.helpers.messages import Message, raises
from tests.helpers.openai_server import OpenAIServer, serving
from tests.helpers.run_folders import healthy, write_run
from tests.helpers.tiny_models import make_checkpoint, make_tokenizer, write_rows
from tests.unit.tools.rounds.conftest import read, run_and_kill

OWN = ["A lake is deep.", "Water!", "Yes.", "No."]  # answers to two prompts, two to each
OTHER = ["Water.", "A lake.", "Yes.", "Never"]


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_kto.tools.inference.chat_model.bf16_slowdown", lambda **_: 2.0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    name = f"scores_{os.getpid()}_{time.monotonic_ns()}"
    (tmp_path / f"{name}.py").write_text(
        "def length(prompt, answer):\n    return len(answer) if answer != 'Yes.' else 1 / 0\n"
        "def partly(prompt, answer):\n    return {'Never': 10**400, 'Water!': 'none'}.get(answer, 1)\n"
    )
    monkeypatch.setenv("SCORES", name)
    (tmp_path / "rubric.txt").write_text("Good answers are short.")


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModelForSequenceClassification, LlamaConfig

    tokenizer, folder = make_tokenizer(), tmp_path_factory.mktemp("models") / "reward"
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    config = LlamaConfig(num_labels=1, initializer_range=0.3, max_position_embeddings=256, **sizes, **ids)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def answers(file: str, texts: Sequence[str], *, each: int = 2, prompt: str = "Question {}?", **last: object) -> str:
    """A file of answers, ``each`` to a prompt; ``last``: columns of the last line."""
    keys = [(1 + number // each, number % each) for number in range(len(texts))]
    rows: list[dict[str, Any]] = [
        {"prompt": prompt.format(line), "answer": text, "model": f"model of {file}", "line": line, "index": index}
        for (line, index), text in zip(keys, texts, strict=True)
    ]
    rows[-1].update(last)
    write_rows(Path(file), rows)
    return file


def run(*words: object) -> None:
    given = [os.path.expandvars(str(word)) for word in words]
    compare.main(given if "--out" in given else [*given, "--out", "out.jsonl"])


def test_a_function_decides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [answers("own.jsonl", OWN), answers("other.jsonl", OTHER), "--score", "$SCORES.length"]
    run(*words)
    out, by = tmp_path / "out.jsonl", os.path.expandvars("score $SCORES.length")
    rows = {(row["source"]["line"], row["source"]["index"]): row for row in read(out)}
    assert {key: (row["verdict"], row["scores"]) for key, row in rows.items()} == {
        (1, 0): ("win", [15, 6]),
        (1, 1): ("loss", [6, 7]),
        (2, 0): ("tie", None),  # equal answers, for which the function is not called
        (2, 1): ("loss", [3, 5]),
    }
    source = {"model": "model of own.jsonl", "base": "model of other.jsonl", "line": 2, "index": 1, "by": by}
    assert rows[2, 1] == {
        "prompt": "Question 2?",
        "answers": ["No.", "Never"],
        "verdict": "loss",
        "scores": [3, 5],
        "lengths": [3, 5],
        "source": source,
    }
    shown = capsys.readouterr().out
    assert Message(f"model of own.jsonl against model of other.jsonl, by {by}", "37.5 %", "1 win, 1 tie, 2 losses") == shown
    assert Message("at equal lengths", "7 characters, 6 of BASE") == shown
    whole = out.read_bytes()
    out.write_bytes(whole[:-20])
    run(*words)
    assert out.read_bytes() == whole
    answers("own.jsonl", [*OWN[:3], "None."])
    with raises(
        UserError, "--out", "answers ['No.', 'Never'] instead of ['None.', 'Never']", "out.jsonl:4", "another --out"
    ):
        run(*words)
    with raises(UserError, "--out", "base 'model of other.jsonl' instead of 'model of b.jsonl'", "out.jsonl:1"):
        run("own.jsonl", answers("b.jsonl", OTHER), "--score", "$SCORES.length")
    with raises(UserError, "--out", "decisions of this command", "own.jsonl:1"):
        run(*words, "--out", "own.jsonl")
    assert out.read_bytes() == whole


def test_a_function_without_a_score_for_some_answers(tmp_path: Path) -> None:
    finite = "must return a finite number or a bool"
    with raises(
        UserError, "2 answers", "own.jsonl:2", "'none'", "other.jsonl:4", finite, show(10**400), "correct the function"
    ):
        run(answers("own.jsonl", OWN), answers("other.jsonl", OTHER), "--score", "$SCORES.partly")
    assert [row["scores"] for row in read(tmp_path / "out.jsonl")] == [None, [1, 1]]


def shown_answers(body: dict[str, Any]) -> list[str]:
    """The answers that a judge is asked about, in their order."""
    return [part.partition("\n</answer>")[0] for part in body["messages"][1]["content"].split("<answer>\n")[1:]]


def judging(verdict: Callable[[str, str], str]) -> Any:
    return serving(lambda body: verdict(*shown_answers(body)))


def judge_words(server: OpenAIServer) -> list[str]:
    files = [answers("own.jsonl", OWN), answers("other.jsonl", OTHER)]
    return [*files, "--judge", server.url, "--rubric", "rubric.txt", "--concurrency", "1"]


def test_a_judge_is_asked_in_both_orders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    with judging(lambda first, second: "A" if len(first) < len(second) else "Both" if second == "Water." else "B") as server:
        words = judge_words(server)
        run(*words)
        assert [shown_answers(body) for body in server.requests[2:4]] == [["Water!", "A lake."], ["A lake.", "Water!"]]
        assert len(server.requests) == 6, "equal answers are a tie"
        captured = capsys.readouterr()
        assert Message("1 pair", "own.jsonl:1", "Both", "left out") == captured.err
        assert Message("2 wins, 1 tie, 0 losses") == captured.out
        assert [(row["verdict"], row["scores"]) for row in read(out)] == [("tie", None), ("win", [2, 0]), ("win", [2, 0])]
        server.answer = lambda body: "A"
        run(*words)
        assert len(server.requests) == 8, "only the pair without a decision"
        assert read(out)[-1]["scores"] == [1, 1]
        assert read(out)[-1]["verdict"] == "tie"
        assert {row["source"]["by"] for row in read(out)} == {
            f"judge served, rubric {zlib.crc32(b'Good answers are short.'):08x}"
        }
        (tmp_path / "rubric.txt").write_text("Good answers are long.")
        with raises(UserError, "--out", "rubric", "out.jsonl:1"):
            run(*words)
        server.answer = lambda body: "REFUSED"
        with raises(UserError, "at least one pair", "none of 1 pair"):
            run(answers("a.jsonl", ["a"]), answers("b.jsonl", ["b"]), *words[2:], "--out", "refused.jsonl")


def test_a_killed_command_continues(tmp_path: Path) -> None:
    def shorter(first: str, second: str) -> str:
        return "A" if len(first) < len(second) else "B"

    own, other = ([f"{word} {number}" for number in range(12)] for word in ("one", "another"))
    files = [answers("own.jsonl", own), answers("other.jsonl", other)]
    words = [*files, "--rubric", "rubric.txt", "--model", "large", "--concurrency", "1", "--judge"]
    with judging(shorter) as server:
        run_and_kill(run, *words, server.url, writes=5)
    decided = len(read(tmp_path / "out.jsonl"))
    assert 0 < decided < 12
    with judging(shorter) as server:  # another one, which gets no late request of the killed process
        run(*words, server.url)
        assert len(server.requests) == 2 * (12 - decided)
    assert [row["scores"] for row in read(tmp_path / "out.jsonl")] == [[2, 0]] * 12


def test_scores_of_a_reward_model_are_those_of_transformers(reward_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    reference = AutoModelForSequenceClassification.from_pretrained(reward_model).eval()
    run(answers("own.jsonl", OWN), answers("other.jsonl", OTHER), "--reward-model", reward_model, "--device", "cpu")
    rows = {row["source"]["line"] * 2 + row["source"]["index"] - 2: row for row in read(tmp_path / "out.jsonl")}
    for number in (0, 1, 3):
        expected = []
        for text in (OWN[number], OTHER[number]):
            turns = [{"role": "user", "content": f"Question {1 + number // 2}?"}, {"role": "assistant", "content": text}]
            inputs = tokenizer.apply_chat_template(turns, return_tensors="pt", return_dict=True)
            expected.append(reference(**inputs).logits.item())
        assert rows[number]["scores"] == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert rows[number]["verdict"] == ("win" if expected[0] > expected[1] else "loss")
    assert len({score for number in (0, 1, 3) for score in rows[number]["scores"]}) == 6
    assert rows[2]["scores"] is None

    model = RewardModel(folder=reward_model)
    sequences = [model.encode([{"role": "user", "content": "?" * length}], "!") for length in (1, 30, 7)]
    together, single = model.scores(sequences), [model.scores([each])[0] for each in sequences]
    assert together == pytest.approx(single, rel=1e-4, abs=1e-5)
    model._model.config.pad_token_id = None
    assert model.scores(sequences) == pytest.approx(single, rel=1e-4, abs=1e-5)


def test_answers_that_a_reward_model_cannot_score(reward_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [answers("own.jsonl", ["x" * 300, "a"]), answers("other.jsonl", ["y", "b"])]
    run(*files, "--reward-model", reward_model)
    captured = capsys.readouterr()
    assert Message("1 pair", "own.jsonl:1", "256", str(reward_model)) == captured.err
    assert "0 ties" in captured.out


@pytest.mark.parametrize(("given", "name"), [("--reward-model", "score.weight"), ("MODEL", "lm_head.weight")])
def test_missing_weights_are_refused(
    reward_model: Path, small_model: Path, prompts: Path, tmp_path: Path, given: str, name: str
) -> None:
    source = reward_model if given == "--reward-model" else small_model
    broken = shutil.copytree(source, tmp_path / "broken")
    weights = {each: value for each, value in load_file(source / SINGLE).items() if each != name}
    save_file(weights, broken / SINGLE, metadata={"format": "pt"})
    model, reward = (small_model, broken) if given == "--reward-model" else (broken, reward_model)
    with raises(UserError, given if source == reward_model else "", str(broken), name, "download it again"):
        run(model, small_model, prompts, "--reward-model", reward, "--max-new-tokens", "2")
    assert not Path("out_model.jsonl").exists() or not read(Path("out_model.jsonl")), "nothing is sampled"


def test_what_does_not_fit_is_refused_before_anything_is_drawn(small_model: Path, prompts: Path, tmp_path: Path) -> None:
    words: list[object] = [prompts, "--score", "$SCORES.length", "--max-new-tokens", "2"]
    out = tmp_path / "out.jsonl"
    own = answers("own.jsonl", OWN)
    with raises(UserError, "own.jsonl:2: MODEL has no answer", "options (PROMPTS, -n"):
        run(small_model, own, *words)
    write_rows(out, [{"prompt": "?", "source": {"model": "m", "base": "b", "line": 1, "index": 0, "by": "score s"}}])
    with raises(UserError, "--out", "model 'm' instead of", "base 'b'", "by 'score s'", "out.jsonl:1", "another --out"):
        run(small_model, small_model, *words)
    out.unlink()
    base = tmp_path / "out_base.jsonl"
    write_rows(base, [{"prompt": "?", "answer": "", "model": "m", "line": 1, "index": 0, "settings": {"seed": 9}}])
    with raises(UserError, "--out must have answers of this command", "out_base.jsonl", "model 'm' instead of"):
        run(small_model, small_model, *words)
    base.unlink()
    bare = shutil.copytree(small_model, tmp_path / "bare")
    about = json.loads((bare / "tokenizer_config.json").read_text())
    (bare / "tokenizer_config.json").write_text(json.dumps({**about, "chat_template": None}))
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    with raises(UserError, "prompts must be texts", str(bare), "no chat template"):
        run(small_model, bare, *words)
    assert not read(tmp_path / "out_model.jsonl")


def test_answers_of_other_weights_are_refused(small_model: Path, prompts: Path, tmp_path: Path) -> None:
    model = shutil.copytree(small_model, tmp_path / "model")
    words = [model, small_model, prompts, "--score", "$SCORES.length", "--max-new-tokens", "2"]
    run(*words)
    out = tmp_path / "out_model.jsonl"
    whole, weights = out.read_bytes(), load_file(model / SINGLE)
    save_file({name: value + 1e-3 for name, value in weights.items()}, model / SINGLE, metadata={"format": "pt"})
    with raises(UserError, "out_model.jsonl with weights '", "another --out"):
        run(*words)
    assert out.read_bytes() == whole
    save_file(weights, model / SINGLE, metadata={"format": "pt"})
    rows = read(out)
    run(*words)
    for row in rows:
        del row["settings"]["weights"]
    write_rows(out, rows)  # of an earlier version
    run(*words)


def test_results_are_recorded_by_one_process_at_a_time(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", healthy(3))
    fork = multiprocessing.get_context("fork")
    start = fork.Barrier(2)
    about: dict[str, Any] = {
        "wins": 1,
        "ties": 0,
        "losses": 0,
        "rate": 1,
        "interval": (0, 1),
        "length_controlled": 1,
        "mean_lengths": (1, 1),
    }

    def record(base: str) -> None:
        start.wait()
        for number in range(20):
            record_comparison(folder, ComparisonResult(base=f"{base}{number}", by="score", **about))

    processes = [fork.Process(target=record, args=(base,)) for base in "ab"]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert {each.base for each in read_run(folder).comparisons} == {
        f"{base}{number}" for base in "ab" for number in range(20)
    }


def test_models_are_sampled_and_the_report_of_a_run_shows_the_result(
    small_model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [write_run(tmp_path / "runs" / name, healthy(10)) for name in ("first", "second")]
    export = make_checkpoint(runs[1] / "hf", "llama", seed=1, num_hidden_layers=1, max_position_embeddings=256)
    weight_map = dict.fromkeys(load_file(export / SINGLE), SINGLE)
    (export / INDEX).write_text(json.dumps({"metadata": {"written_by": WRITTEN_BY}, "weight_map": weight_map}))
    drawing = ["-n", "2", "--max-new-tokens", "6", "--seed", "3"]
    for _ in range(2):
        run(runs[1], small_model, prompts, "--score", "$SCORES.length", *drawing)
    assert f"nemo-kto report {runs[1]}" in capsys.readouterr().out
    for name, model in (("model", runs[1]), ("base", small_model)):
        sample.main([str(word) for word in (model, prompts, "--out", f"{name}.jsonl", *drawing)])
        assert Path(f"{name}.jsonl").read_bytes() == Path(f"out_{name}.jsonl").read_bytes()
    verdicts = [row["verdict"] for row in read(tmp_path / "out.jsonl")]
    assert len(verdicts) == 4
    (found,) = read_run(runs[1]).comparisons
    assert (found.base, found.by) == (str(small_model), os.path.expandvars("score $SCORES.length"))
    assert (found.wins, found.ties, found.losses) == tuple(map(verdicts.count, ("win", "tie", "loss")))
    rate, interval = percent_text(found.rate), interval_text(found.interval)
    figure = content_of([read_run(runs[1])])["figures"][0]
    assert (figure.label, figure.value) == ("Win rate", rate)
    assert figure.detail == f"{interval} against {small_model.parent.name}/small by {found.by}"
    (runs[1] / COMPARISONS_FILE).unlink()
    words = ["out_model.jsonl", "out_base.jsonl", "--score", "$SCORES.length"]
    run(*words)
    assert "no report shows it" in capsys.readouterr().out
    assert not read_run(runs[1]).comparisons, "a name in a file of answers may be that of another run"
    with raises(UserError, "--run must be the folder of a run", f"got {export}"):
        run(*words, "--run", export)
    run(*words, "--run", runs[1])
    assert read_run(runs[1]).comparisons == [found]
    header, first, second = content_of([*map(read_run, runs)])["final_figures"]
    assert header[1] == f"win rate against {small_model.parent.name}/small"
    assert header[2] == f"characters (of {small_model.parent.name}/small)"
    own, other = found.mean_lengths
    assert (first[1:3], second[1:3]) == (["", ""], [f"{rate} {interval}", f"{own:.0f} ({other:.0f})"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("own.jsonl gone --rubric r", Message("one of --score, --judge and --reward-model", "none", "--rubric", "PROMPTS")),
        ("own.jsonl other.jsonl --score a.b --judge u", Message("--score and --judge", "--rubric", "a file")),
        (
            "own.jsonl other.jsonl p.txt --score a.b -n 2 --max-new-tokens 7",
            Message("PROMPTS must be left out", "p.txt", "-n must be left out", "2", "--max-new-tokens", "7"),
        ),
        ("gone lost p.txt --score os.name", Message("--score", "os.name", "MODEL must be", "gone", "BASE must be", "lost")),
        (
            "own.jsonl gone p.txt --score a.b --temperature 0 -n 2 --top-p 0.5",
            Message("-n must be 1", "with --temperature 0", "--top-p", "got --temperature 0"),
        ),
        ("own.jsonl few.jsonl --score $SCORES.length", Message("own.jsonl:4", "BASE has no answer", "line 2 and index 1")),
        ("few.jsonl own.jsonl --score $SCORES.length", Message("own.jsonl:4", "MODEL has no answer", "same options")),
        ("own.jsonl asked.jsonl --score $SCORES.length", Message("4 answers", "asked.jsonl:1", "own.jsonl:4")),
        (
            "mixed.jsonl mixed.jsonl --score $SCORES.length",
            Message("MODEL must", "one model", "model of mixed.jsonl in mixed.jsonl:1 and m2 in mixed.jsonl:4", "BASE must"),
        ),
        (
            "own.jsonl thinking.jsonl --score $SCORES.length",
            Message("1 answer", "own.jsonl:4", "chat_template_kwargs", "thinking.jsonl:4"),
        ),
        ("own.jsonl other.jsonl --judge http://x --rubric gone", Message("--rubric", "gone", "correct the path")),
        ("own.jsonl other.jsonl --reward-model {}", Message("--reward-model", "LlamaForCausalLM", "num_labels", "--judge")),
    ],
)  # fmt: skip
def test_mistakes(words: str, message: Message, small_model: Path) -> None:
    answers("own.jsonl", OWN)
    answers("other.jsonl", OTHER)
    answers("few.jsonl", OTHER[:3])
    answers("asked.jsonl", OTHER, prompt="Another {}?")
    answers("mixed.jsonl", OTHER, model="m2")
    answers("thinking.jsonl", OTHER, chat_template_kwargs={"enable_thinking": False})
    Path("p.txt").write_text("Question?\n")
    with raises(UserError, message):
        run(*words.format(small_model).split())
    assert not Path("out.jsonl").exists() or not read(Path("out.jsonl"))
