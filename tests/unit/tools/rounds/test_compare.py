"""`nemo-kto compare`: decisions of a function, a judge and a reward model; files that a killed command left; the report."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_kto.errors import UserError, show
from nemo_kto.model_files.safetensors_files import INDEX, SINGLE, WRITTEN_BY
from nemo_kto.records.run_record import COMPARISONS_FILE, ComparisonResult, read_run, record_comparison
from nemo_kto.tools.inference.reward_model import RewardModel
from nemo_kto.tools.report.report_page import content_of
from tests.helpers.messages import Message, raises
from tests.helpers.openai_server import serving
from tests.helpers.run_folders import healthy, write_run
from tests.helpers.tiny_models import make_checkpoint, make_tokenizer, write_rows
from tests.unit.tools.rounds import conftest
from tests.unit.tools.rounds.conftest import SCORES, answers, read

OWN = ["A lake is deep.", "Water!", "Yes.", "No."]  # answers to two prompts, two to each
OTHER = ["Water.", "A lake.", "Yes.", "Never"]
OUT = Path("out.jsonl")
LENGTH, BY_LENGTH = ["--score", f"{SCORES}.length_unless_equal"], f"score {SCORES}.length_unless_equal"
JUDGE = ["--rubric", "rubric.txt", "--concurrency", "1", "--judge"]


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


def run(*words: object) -> None:
    conftest.run("compare", *words)


def both(own: Sequence[str] = OWN, other: Sequence[str] = OTHER) -> list[str]:
    """MODEL and BASE as files of answers."""
    return [answers("own.jsonl", own), answers("other.jsonl", other)]


def shown_answers(body: dict[str, Any]) -> list[str]:
    """The answers that a judge is asked about, in their order."""
    return [part.partition("\n</answer>")[0] for part in body["messages"][1]["content"].split("<answer>\n")[1:]]


def shorter(body: dict[str, Any]) -> str:
    """Verdict for the shorter answer, except where the second one is "Water."."""
    first, second = shown_answers(body)
    return "A" if len(first) < len(second) else "Both" if second == "Water." else "B"


def summary(by: str, *, rate: str, counts: str, equal: str, lengths: tuple[int, int]) -> str:
    return (
        f"model of own.jsonl against model of other.jsonl, by {by}\n"
        f"  win rate          {rate} (95 % interval): {counts}\n"
        f"  at equal lengths  {equal}\n"
        f"  mean length       {lengths[0]} characters, {lengths[1]} of BASE\n"
        "  no report shows it, because MODEL is no run folder; --run names one\n"
    )


class Decided(NamedTuple):
    """How it is decided, verdicts with scores in the order of the file, what is printed, and the numbers of requests."""

    words: list[str]
    by: str
    decisions: list[tuple[str, list[float] | None]]
    out: str
    err: str = ""
    requests: tuple[int, int, int] = (0, 0, 0)


BY_JUDGE = f"judge served, rubric {zlib.crc32(b'Good answers are short.'):08x}"
DECIDED = {
    "function": Decided(
        LENGTH,
        BY_LENGTH,
        [("tie", None), ("win", [15, 6]), ("loss", [6, 7]), ("loss", [3, 5])],
        summary(
            BY_LENGTH, rate="37.5 % [12.3, 79.3]", counts="1 win, 1 tie, 2 losses", equal="31.5 %", lengths=(7, 6)
        ),
    ),
    "judge": Decided(
        JUDGE,
        BY_JUDGE,
        [("tie", None), ("win", [2, 0]), ("win", [2, 0])],
        summary(BY_JUDGE, rate="83.3 % [26.1, 96.2]", counts="2 wins, 1 tie, 0 losses", equal="68.4 %", lengths=(4, 5)),
        "nemo-kto compare: 1 pair without a verdict, the first at own.jsonl:1: no clear verdict in 'Both'; "
        "they are left out\n",
        (6, 8, 12),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DECIDED)
def test_decisions(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal answers are a tie; the same command continues after a kill, and asks about pairs without a decision."""
    words, by, decisions, out, err, requests = DECIDED[name]
    with serving(shorter) as server:
        given = [*both(), *words, *([server.url] if words == JUDGE else [])]
        run(*given)
        assert [(row["verdict"], row["scores"]) for row in read(OUT)] == decisions
        captured = capsys.readouterr()
        assert (captured.out, captured.err.splitlines(keepends=True)[-1:]) == (out, [err] if err else [])
        if words == JUDGE:  # in both orders
            assert [shown_answers(body) for body in server.requests[2:4]] == [["Water!", "A lake."], ["A lake.", "Water!"]]
        counts, whole = [len(server.requests)], OUT.read_bytes()
        run(*given)
        assert OUT.read_bytes() == whole
        counts.append(len(server.requests))
        OUT.write_bytes(whole[:-20])
        run(*given)
        assert OUT.read_bytes() == whole
        assert (*counts, len(server.requests)) == requests
    source = {"model": "model of own.jsonl", "base": "model of other.jsonl", "line": 2, "index": 1, "by": by}
    shared = {"prompt": "Question 2?", "answers": ["No.", "Never"], "lengths": [3, 5], "source": source}
    assert read(OUT)[-1] == {**shared, "verdict": decisions[-1][0], "scores": decisions[-1][1]}


def test_a_judge_that_prefers_the_first_answer_finds_a_tie() -> None:
    with serving(lambda body: "A") as server:
        run(*both(), *JUDGE, server.url)
    assert [(row["verdict"], row["scores"]) for row in read(OUT)] == [("tie", None), *[("tie", [1, 1])] * 3]


def test_a_function_without_a_score_for_some_answers() -> None:
    parts = ["2 answers", "own.jsonl:2", "'none'", "other.jsonl:4", "must return a finite number or a bool", show(10**400)]
    with raises(UserError, *parts, "correct the function"):
        run(*both(), "--score", f"{SCORES}.partly")
    assert [row["scores"] for row in read(OUT)] == [None, [1, 1]]


def test_a_judge_without_any_verdict() -> None:
    with serving(lambda body: "REFUSED") as server, raises(UserError, "at least one pair", "none of 1 pair"):
        run(*both(["a"], ["b"]), *JUDGE, server.url)


def changed_rubric() -> None:
    Path("rubric.txt").write_text("Good answers are long.")


@pytest.mark.parametrize(
    ("change", "decider", "words", "parts"),
    [
        (
            lambda: answers("own.jsonl", [*OWN[:3], "None."]), LENGTH, [],
            ["answers ['No.', 'Never'] instead of ['None.', 'Never']", "out.jsonl:4", "another --out"],
        ),
        (
            lambda: Path("other.jsonl").write_text(Path("other.jsonl").read_text().replace("model of other", "b of other")),
            LENGTH, [], ["base 'model of other.jsonl' instead of 'b of other.jsonl'", "out.jsonl:1"],
        ),
        (lambda: None, LENGTH, ["--out", "own.jsonl"], ["decisions of this command", "own.jsonl:1"]),
        (changed_rubric, JUDGE, [], ["rubric", "out.jsonl:1"]),
    ],
    ids=["answer", "base", "file", "rubric"],
)  # fmt: skip
def test_decisions_of_another_command_are_refused(
    change: Callable[[], object], decider: list[str], words: list[str], parts: list[str]
) -> None:
    with serving(shorter) as server:
        given = [*decider, *([server.url] if decider == JUDGE else [])]
        run(*both(), *given)
        whole = OUT.read_bytes()
        change()
        with raises(UserError, "--out", *parts):
            run("own.jsonl", "other.jsonl", *given, *words)
    assert OUT.read_bytes() == whole


def test_scores_of_a_reward_model_are_those_of_transformers(reward_model: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    reference = AutoModelForSequenceClassification.from_pretrained(reward_model).eval()
    run(*both(), "--reward-model", reward_model, "--device", "cpu")
    rows = {row["source"]["line"] * 2 + row["source"]["index"] - 2: row for row in read(OUT)}
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


def test_a_reward_model_scores_a_batch_as_single_sequences(reward_model: Path) -> None:
    model = RewardModel(folder=reward_model)
    sequences = [model.encode([{"role": "user", "content": "?" * length}], "!") for length in (1, 30, 7)]
    single = [model.scores([each])[0] for each in sequences]
    assert model.scores(sequences) == pytest.approx(single, rel=1e-4, abs=1e-5)
    model._model.config.pad_token_id = None
    assert model.scores(sequences) == pytest.approx(single, rel=1e-4, abs=1e-5)


def test_answers_that_a_reward_model_cannot_score(reward_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(*both(["x" * 300, "a"], ["y", "b"]), "--reward-model", reward_model)
    captured = capsys.readouterr()
    assert Message("1 pair", "own.jsonl:1", "256", str(reward_model)) == captured.err
    assert "0 ties" in captured.out


@pytest.mark.parametrize(("given", "name"), [("--reward-model", "score.weight"), ("MODEL", "lm_head.weight")])
def test_missing_weights_are_refused(reward_model: Path, small_model: Path, prompts: Path, given: str, name: str) -> None:
    source = reward_model if given == "--reward-model" else small_model
    broken = shutil.copytree(source, Path("broken"))
    weights = {each: value for each, value in load_file(source / SINGLE).items() if each != name}
    save_file(weights, broken / SINGLE, metadata={"format": "pt"})
    model, reward = (small_model, broken) if given == "--reward-model" else (broken, reward_model)
    with raises(UserError, given if source == reward_model else "", str(broken), name, "download it again"):
        run(model, small_model, prompts, "--reward-model", reward, "--max-new-tokens", "2")
    assert not Path("out_model.jsonl").exists() or not read(Path("out_model.jsonl")), "nothing is sampled"


def earlier_answer() -> None:
    row = {"prompt": "?", "answer": "", "model": "m", "line": 1, "index": 0, "settings": {"seed": 9}}
    write_rows(Path("out_base.jsonl"), [row])


def model_without_template(small_model: Path) -> None:
    about = json.loads((small_model / "tokenizer_config.json").read_text())
    bare = shutil.copytree(small_model, Path("bare"))
    (bare / "tokenizer_config.json").write_text(json.dumps({**about, "chat_template": None}))
    (bare / "chat_template.jinja").unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("make", "base", "parts"),
    [
        (lambda _: both(), "own.jsonl", ["own.jsonl:2: MODEL has no answer", "options (PROMPTS, -n"]),
        (
            lambda _: write_rows(
                OUT, [{"prompt": "?", "source": {"model": "m", "base": "b", "line": 1, "index": 0, "by": "score s"}}]
            ),
            "", ["--out", "model 'm' instead of", "base 'b'", "by 'score s'", "out.jsonl:1", "another --out"],
        ),
        (
            lambda _: earlier_answer(), "",
            ["--out must have answers of this command", "out_base.jsonl", "model 'm' instead of"],
        ),
        (model_without_template, "bare", ["prompts must be texts", "bare", "no chat template"]),
    ],
    ids=["answers", "decisions", "drawn answers", "template"],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_anything_is_drawn(
    make: Callable[[Path], object], base: str, parts: list[str], small_model: Path, prompts: Path
) -> None:
    make(small_model)
    with raises(UserError, *parts):
        run(small_model, base or small_model, prompts, *LENGTH, "--max-new-tokens", "2")
    assert not Path("out_model.jsonl").exists() or not read(Path("out_model.jsonl"))


def test_answers_of_other_weights_are_refused(small_model: Path, prompts: Path) -> None:
    model, out = shutil.copytree(small_model, Path("model")), Path("out_model.jsonl")
    words = [model, small_model, prompts, *LENGTH, "--max-new-tokens", "2"]
    run(*words)
    whole, weights = out.read_bytes(), load_file(model / SINGLE)
    save_file({name: value + 1e-3 for name, value in weights.items()}, model / SINGLE, metadata={"format": "pt"})
    with raises(UserError, "out_model.jsonl with weights '", "another --out"):
        run(*words)
    assert out.read_bytes() == whole
    rows = read(out)
    for row in rows:
        del row["settings"]["weights"]
    write_rows(out, rows)  # of an earlier version
    run(*words)


def test_results_are_recorded_by_one_process_at_a_time(tmp_path: Path) -> None:
    folder, fork = write_run(tmp_path / "run", healthy(3)), multiprocessing.get_context("fork")
    start = fork.Barrier(2)
    counts: dict[str, Any] = {"wins": 1, "ties": 0, "losses": 0, "rate": 1, "interval": (0, 1)}

    def record(base: str) -> None:
        start.wait()
        for number in range(20):
            about = {**counts, "length_controlled": 1, "mean_lengths": (1, 1)}
            record_comparison(folder, ComparisonResult(base=f"{base}{number}", by="score", **about))

    processes = [fork.Process(target=record, args=(base,)) for base in "ab"]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    found = {each.base for each in read_run(folder).comparisons}
    assert found == {f"{base}{number}" for base in "ab" for number in range(20)}


def test_models_are_sampled_as_by_sample_and_the_result_is_recorded(
    small_model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "runs" / "second", healthy(10))
    export = make_checkpoint(folder / "hf", "llama", seed=1, num_hidden_layers=1, max_position_embeddings=256)
    weight_map = dict.fromkeys(load_file(export / SINGLE), SINGLE)
    (export / INDEX).write_text(json.dumps({"metadata": {"written_by": WRITTEN_BY}, "weight_map": weight_map}))
    drawing = ["-n", "2", "--max-new-tokens", "6", "--seed", "3"]
    for _ in range(2):
        run(folder, small_model, prompts, *LENGTH, *drawing)
    assert capsys.readouterr().out.endswith(f"  nemo-kto report {folder} shows it\n")
    for name, model in (("model", folder), ("base", small_model)):
        conftest.run("sample", model, prompts, "--out", f"{name}.jsonl", *drawing)
        assert Path(f"{name}.jsonl").read_bytes() == Path(f"out_{name}.jsonl").read_bytes()
    verdicts = [row["verdict"] for row in read(OUT)]
    assert len(verdicts) == 4
    (found,) = read_run(folder).comparisons
    assert (found.base, found.by) == (str(small_model), BY_LENGTH)
    assert (found.wins, found.ties, found.losses) == tuple(map(verdicts.count, ("win", "tie", "loss")))


def test_the_report_of_a_run_shows_the_result(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "runs" / name, healthy(10)) for name in ("first", "second")]
    run(*both(), *LENGTH)
    assert not (runs[1] / COMPARISONS_FILE).exists(), "a name in a file of answers may be that of another run"
    with raises(UserError, "--run must be the folder of a run", f"got {tmp_path}"):
        run(*both(), *LENGTH, "--run", tmp_path)
    run(*both(), *LENGTH, "--run", runs[1])
    figure = content_of([read_run(runs[1])])["figures"][0]
    assert (figure.label, figure.value) == ("Win rate", "37.5 %")
    assert figure.detail == f"[12.3, 79.3] against model of other.jsonl by {BY_LENGTH}"
    header, first, second = content_of([*map(read_run, runs)])["final_figures"]
    assert header[1:3] == ["win rate against model of other.jsonl", "characters (of model of other.jsonl)"]
    assert (first[1:3], second[1:3]) == (["", ""], ["37.5 % [12.3, 79.3]", "7 (6)"])


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
        ("own.jsonl few.jsonl {length}", Message("own.jsonl:4", "BASE has no answer", "line 2 and index 1")),
        ("few.jsonl own.jsonl {length}", Message("own.jsonl:4", "MODEL has no answer", "same options")),
        ("own.jsonl asked.jsonl {length}", Message("4 answers", "asked.jsonl:1", "own.jsonl:4")),
        (
            "mixed.jsonl mixed.jsonl {length}",
            Message("MODEL must", "one model", "model of mixed.jsonl in mixed.jsonl:1 and m2 in mixed.jsonl:4", "BASE must"),
        ),
        (
            "own.jsonl thinking.jsonl {length}",
            Message("1 answer", "own.jsonl:4", "chat_template_kwargs", "thinking.jsonl:4"),
        ),
        ("own.jsonl other.jsonl --judge http://x --rubric gone", Message("--rubric", "gone", "correct the path")),
        ("own.jsonl other.jsonl --reward-model {}", Message("--reward-model", "LlamaForCausalLM", "num_labels", "--judge")),
    ],
)  # fmt: skip
def test_mistakes(words: str, message: Message, small_model: Path) -> None:
    both()
    answers("few.jsonl", OTHER[:3])
    answers("asked.jsonl", OTHER, prompt="Another {}?")
    answers("mixed.jsonl", OTHER, model="m2")
    answers("thinking.jsonl", OTHER, chat_template_kwargs={"enable_thinking": False})
    Path("p.txt").write_text("Question?\n")
    with raises(UserError, message):
        run(*words.format(small_model, length=" ".join(LENGTH)).split())
    assert not OUT.exists() or not read(OUT)
