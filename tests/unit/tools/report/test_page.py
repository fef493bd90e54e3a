"""The page and the text of a report: complete, safe, and small."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from email.message import Message
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from docs.site.pages import DOCS
from nemo_kto.cli import job
from nemo_kto.distributed import state
from nemo_kto.errors import UserError
from nemo_kto.records.run_record import FINISHED, RUN_FILE, RUNNING, RunRecord, begin_run, end_run, read_run
from nemo_kto.run import lifecycle
from nemo_kto.telemetry.evaluations import RewardHistogram
from nemo_kto.tools.report import report_command as report
from nemo_kto.tools.report.facts import answers, headline, next_steps
from nemo_kto.tools.report.histograms import common_bins
from nemo_kto.tools.report.report_page import content_of, html
from nemo_kto.utils.locks import this_process
from nemo_kto.utils.text import MINUS
from tests.helpers.outputs import assert_output
from tests.helpers.run_folders import changed, data_of, healthy, write_extras, write_run


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with everything that a report shows."""
    return write_extras(write_run(tmp_path_factory.mktemp("runs") / "complete", healthy(), data=data_of(cut=30)))


def html_of(*runs: RunRecord) -> str:
    return html(content_of(runs) | {"refresh": None})


def shown_text(page: str, folder: Path) -> str:
    """The text of a page, one line for each element, without drawings and the keys that were not set."""
    body = re.sub(r"<(svg|style|head)\b.*?</\1>", "", page, flags=re.DOTALL)
    body = re.sub(r"<summary>(?:The other|All) \d+ keys</summary>.*?</details>", "", body, flags=re.DOTALL)
    body = re.sub(r"(?<=Written by nemo-kto )\S+ on [^<]*", "VERSION", body)
    rows = re.sub(r"\s*</t[hd]>\s*<t[hd][^>]*>", " | ", re.sub(r"</dt>\s*<dd[^>]*>", ": ", body))
    lines = re.sub(r"</?(?:span|b|i|em|strong|code|a)\b[^>]*>", "", rows).replace("<", "\n<")
    text = unescape(re.sub(r"<[^>]*>", "", lines)).replace(str(folder), "FOLDER")
    return "\n".join(line.strip() for line in text.splitlines() if line.strip()) + "\n"


def test_a_page_shows_everything_and_loads_nothing(complete: Path) -> None:
    html = html_of(read_run(complete))
    assert [link for link in re.findall(r'(?:src|href)="([^"]*)"', html) if not link.startswith(("data:", "#"))] == []
    assert "<script" not in html
    assert "url(" not in html.replace("url(#", "")
    drawings = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    colours = [colour for drawing in drawings for colour in re.findall(r"#[0-9a-f]{6}\b", drawing)]
    assert colours == [], "colours are the page's"
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html, "texts are escaped"
    settings = html[html.index("Settings</h2>") :]
    assert "<dl" not in re.sub(r"<details.*?</details>", "", settings, flags=re.DOTALL), "settings are folded"
    assert_output("report/run", shown_text(html, complete.parent))


def labels(html: str, title: str) -> list[list[str]]:
    """The labels of each drawing whose title begins so: those of the horizontal axis, then those of the vertical one."""
    drawings = re.findall(rf"<h3>{title}[^<]*</h3>(?:(?!</svg>).)*</svg>", html, re.DOTALL)
    return [re.findall(r"<text[^>]*>([^<]*)</text>", drawing) for drawing in drawings]


def test_axes(tmp_path: Path) -> None:
    """Curves have one range of steps, histograms before and after one scale; counts have ticks at integers only."""
    lines = [line for line in healthy() if "val/loss" not in line or line["step"] <= 40]
    folder = write_extras(write_run(tmp_path / "short", lines, data=data_of()))
    html = html_of(read_run(folder))
    steps = ["0", "50", "100", "150", "200"]
    assert [each[:5] for title in ("Rewards in validation", "AUC", "Learning rate") for each in labels(html, title)] == [
        steps
    ] * 3
    rewards = [
        *(f"{MINUS}{size}" for size in (2, 1.5, 1, 0.5)),
        "0",
        "0.5",
        "reward",
        "0",
        "20",
        "40",
        "60",
        "80",
        "answers",
    ]
    assert labels(html, "Step ") == [rewards, rewards]
    lengths = ["0", "5", "10", "15", "tokens", "0", "2", "4", "6", "8"]
    assert labels(html, "Lengths of ") == [[*lengths, "prompts"], [*lengths, "answers"]]
    assert labels(html, "Peak memory, GB") == [[*steps, "3"]]
    assert html.index("</span>undesirable</li>", html.index("Lengths of answers"))


def test_captions_lead_to_pages_of_the_documentation(
    complete: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = re.findall(r'<span class="page">([^<]+)</span>', html_of(read_run(complete)))
    assert len(shown) > 12
    assert [page for page in {*shown} if not (DOCS.parent / page.partition("#")[0]).is_file()] == []
    described = Message()
    described["Project-URL"] = "Repository, https://host/owner/nemo_kto"
    monkeypatch.setattr("nemo_kto.tools.report.report_page.metadata", {"nemo-kto": described}.__getitem__)
    html = html_of(read_run(complete))
    link = "https://host/owner/nemo_kto/blob/main/docs/reference/metrics.md"
    assert f'<a href="{link}">docs/reference/metrics.md</a>' in html


CHATML = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nA <b>\n\n2?<|im_end|>\n<|im_start|>assistant\n"
LLAMA3 = (
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHot?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
ASKED = [{"role": "user", "content": "Hot?"}, {"role": "assistant", "content": "No."}, {"role": "user", "content": "Why?"}]


def test_a_finished_run_that_was_killed_before_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "is_rank_zero", lambda: True)
    folder = write_run(tmp_path / "run", healthy(), data=data_of(cut=30))
    begin_run(folder, run=json.loads((folder / RUN_FILE).read_text()), data={})
    end_run(folder, RUNNING)
    left = folder / f".report.html-{'0' * 32}"
    left.touch()
    lifecycle.complete_record(folder, job.write_report)
    assert (read_run(folder).state.word, left.exists()) == (FINISHED, False)
    written = (folder / "report.html").stat().st_mtime_ns
    lifecycle.complete_record(folder, job.write_report)
    assert (folder / "report.html").stat().st_mtime_ns == written, "once"


@pytest.mark.parametrize(
    ("prompt", "messages", "shown"),
    [
        ("Why?", ASKED, [("user", "Hot?"), ("assistant", "No."), ("user", "Why?")]),
        (CHATML, None, [("system", "Be brief."), ("user", "A <b>\n\n2?")]),
        (LLAMA3, None, [("user", "Hot?")]),
        ("<bos><start_of_turn>user\nHot?<end_of_turn>\n<start_of_turn>model\n", None, [("user", "Hot?")]),
        (f"Translate: {CHATML}", None, [("", f"Translate: {CHATML}")]),
        ("2 + 2 =", None, [("", "2 + 2 =")]),
    ],
)
def test_prompts_are_shown_as_messages(
    complete: Path, prompt: str, messages: list[Mapping[str, Any]] | None, shown: list[tuple[str, str]]
) -> None:
    run = read_run(complete)
    samples = [dataclasses.replace(sample, prompt=prompt, messages=messages) for sample in run.samples]
    assert next(answers(dataclasses.replace(run, samples=samples))).prompt == shown


def test_a_comparison_of_runs(complete: Path, tmp_path: Path) -> None:
    failed = {"state": "failed", "text": "no memory"}
    other = write_run(tmp_path / "other", healthy(100, seed=1), model__optim__lr=3e-6, run=failed)
    html = html_of(read_run(complete), read_run(other))
    assert_output("report/comparison", shown_text(html, tmp_path))


def test_runs_are_compared_where_they_can_be(tmp_path: Path) -> None:
    """The best value is marked, names are short, and different data are named by their files."""
    rows = {"sha256": "a" * 64, "from": "96 rows"}
    runs = []
    for name, lr, loss in (("low", 1e-6, 0.3), ("high", 3e-6, 0.4)):
        facts = {"facts": {"model.data.data_prefix": rows, "validation rows": rows}}
        lines = changed(healthy(100), val_loss=lambda step, loss=loss: loss)
        data = f"data/{'b' * 8}/{name}.jsonl"
        folder = tmp_path / f"sweep_lr_{name}"
        runs.append(read_run(write_run(folder, lines, run=facts, model__optim__lr=lr, model__data__data_prefix=data)))
    html = html_of(*runs)
    assert re.findall(r'class="best">([^<]*)<', html) == ["0.3"], "equal values are not marked"
    assert_output("report/equal_rows", shown_text(html, tmp_path))  # in other files
    others = {"validation rows": {"sha256": "b" * 64, "from": "9 rows"}}
    html = html_of(runs[0], dataclasses.replace(runs[1], run={**runs[1].run, "facts": others}))
    assert 'class="best">' not in html, "on other validation rows"
    assert_output("report/other_rows", shown_text(html, tmp_path))


def test_histograms_get_common_bins() -> None:
    fine = RewardHistogram(
        set_name="", width=0.125, first=-3, counts={"chosen": [1, 2, 3, 4, 5, 6], "rejected": [0, 0, 0, 0, 0, 7]}
    )
    coarse = RewardHistogram(set_name="", width=0.5, first=0, counts={"chosen": [8], "rejected": [9]})
    edges, (first, last) = common_bins([fine, coarse])
    assert edges.tolist() == [-0.5, 0.0, 0.5]
    assert first["chosen"].tolist() == [6.0, 15.0]
    assert first["rejected"].tolist() == [0.0, 7.0]
    assert last["chosen"].tolist() == [0.0, 8.0]


@pytest.mark.parametrize(("rows", "auc"), [(200, "held-out, 200 rows, 95 % in 0.82 to 0.92"), (19, "")])
def test_the_headline_has_an_auc_with_its_interval(rows: int, auc: str, tmp_path: Path) -> None:
    data = data_of()
    data["sets"]["validation"] = data["sets"]["train"]
    lines = changed(healthy(), val_rows=lambda step: float(rows), val_auc=lambda step: 0.875)
    details = {figure.label: figure.detail for figure in headline(read_run(write_run(tmp_path / "run", lines, data=data)))}
    assert details.get("AUC", "").startswith(auc)
    assert details["Loss"].startswith("held-out" if auc else "training batches")


def test_commands_to_use_the_model(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a run", healthy(), export__path=str(tmp_path / 'o"ut')))
    assert next_steps(run) == {}
    (tmp_path / 'o"ut').mkdir()
    folder = f"'{tmp_path}/a run'"
    steps = next_steps(run)
    assert steps["talk with it"] == f"nemo-kto chat {folder} --against"
    assert steps["vLLM"] == f"vllm serve '{tmp_path}/o\"ut'"
    assert steps["publish"] == f"nemo-kto export {folder} --push hf:USER/NAME"
    compile(steps["transformers"], "loader", "exec")
    page = html_of(run)
    assert "docs/results/chat.md" in page
    assert "vllm serve" in page


def test_a_run_in_progress_is_watched_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is written again, and a browser loads it again, as long as the run goes on."""
    folder = write_run(tmp_path / "run", healthy(10), run={"state": RUNNING, "total_steps": 20})
    (folder / ".lock.owner").write_text(json.dumps(vars(this_process())))
    seen = []

    def sleep(seconds: float) -> None:
        seen.append((seconds, "refresh" in (folder / "report.html").read_text()))
        if len(seen) == 2:
            end_run(folder, FINISHED)

    monkeypatch.setattr("nemo_kto.tools.report.report_command.time.sleep", sleep)
    report.main([str(folder), "--watch", "5"])
    assert seen == [(5, True)] * 2
    assert "refresh" not in (folder / "report.html").read_text()
    report.main([str(folder), "--watch"])
    assert len(seen) == 2, "the run has ended"


def test_the_command(complete: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report.main([str(complete)])
    assert capsys.readouterr().out.splitlines() == [str(complete / "report.html")]
    assert json.loads((complete / "run.json").read_text())["state"] == "finished"
    for out in (tmp_path / "a.pdf", tmp_path / "absent" / "a.html"):
        with pytest.raises(UserError) as raised:
            report.main([str(complete), "--out", str(out)])
        assert str(out) in str(raised.value)
        assert "--out" in str(raised.value)
