"""The complete output of commands, also where it is full or closed, and the export of the best checkpoint."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.helpers.commands import CLI, GOOD, REPOSITORY, TRAINING, environment, run, start, stub_training
from tests.helpers.messages import Message, assert_names
from tests.helpers.outputs import assert_output
from tests.helpers.tiny_models import make_pairs, make_rows, write_rows

SECONDS = re.compile(r"\d+(?:\.\d+)? s\b")


def command(model: Path, name: str, *given: str) -> list[str]:
    """A job of six steps."""
    return [
        *CLI,
        name,
        f"pretrained_checkpoint.restore_from_path={model}",
        "model.data.data_prefix=rows.jsonl",
        'model.data.splits_string="80,20"',
        "model.data.cache_dir=cache",
        "hardware=cpu",
        f"trainer.{name}.val_check_interval=2",
        f"trainer.{name}.save_interval=2",
        "model.global_batch_size=8",
        "model.micro_batch_size=4",
        "model.data.seq_length=64",
        "model.reference.mode=swap",
        "model.optim.lr=1e-3",
        "model.optim.sched.warmup_steps=2",
        "export.which=best",
        "export.path=best",
        *given,
    ]


def train(folder: Path, model: Path, name: str, *given: str) -> tuple[list[str], list[str]]:
    """The lines of stdout and of stderr of the job, in which the time it took is N s."""
    done = run(command(model, name, *given), cwd=folder, env=environment(), preload=TRAINING, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [SECONDS.sub("N s", text).splitlines() for text in (done.stdout, done.stderr)]
    return lines[0], lines[1]


def first_and_last(folder: Path, name: str) -> str:
    """The printed first and last value of a metric."""
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    series = [(line["step"], line[name]) for line in logged if name in line]
    (first, start), (last, end) = series[0], series[-1]
    return f"{start:.4f} -> {end:.4f} (steps {first} and {last})"


def best_of(folder: Path, metric: str) -> tuple[int, float]:
    """Step and value of the lowest of a metric among the checkpoints of a run."""
    infos = {file.parent: json.loads(file.read_text()) for file in (folder / "checkpoints").glob("*/trainer.json")}
    return min(
        ((info["trainer"]["step"], info["metrics"][metric]) for info in infos.values()),
        key=lambda found: (found[1], -found[0]),
    )


def text_shown() -> list[str]:
    """The output that the documents show."""
    text = (REPOSITORY / "docs/results/output.md").read_text(encoding="utf-8")
    return ["nemo-kto dpo", *text.split("```text\nnemo-kto dpo\n")[1].split("```")[0].splitlines()]


def without_figures(lines: Iterable[str]) -> list[str]:
    """The lines without what depends on the machine: its name, losses, seconds, and the step that was the best."""
    others = re.compile(
        r"-?\d+\.\d{4}|(?<=step_00000)\d|(?<=checkpoint, step )\d|\d+(?= tokens/s)|(?<=eta )[\d:]+|\d+\.\d+(?= s/step)"
        r"|[\d.]+ [GM]B(?= free)"
    )
    return [others.sub("N", re.sub(r"CPU, .*, 1 thread", "CPU, 1 thread", SECONDS.sub("N s", line))) for line in lines]


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture(scope="module")
def stopped_and_resumed(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[str]]]:
    """A run that reaches max_time after one step and is resumed; the output of both starts."""
    folder = tmp_path_factory.mktemp("output")
    write_rows(folder / "rows.jsonl", make_rows(64))
    without = "export.report=false"
    stopped = train(
        folder, tiny_llama, "kto", without, "trainer.max_time=00:00:00:00", "trainer.kto.val_before_training=true"
    )
    resumed = train(folder, tiny_llama, "kto", without)
    return folder, [*stopped, *resumed]


def test_a_run_that_reaches_max_time(stopped_and_resumed: tuple[Path, list[list[str]]], tiny_llama: Path) -> None:
    folder, (out, errors, _, _) = stopped_and_resumed
    assert_output("run_stopped", "\n".join([*without_figures(out), ""]), MODEL=tiny_llama)
    before = json.loads((folder / "results/gpt_kto/metrics.jsonl").read_text().splitlines()[0])
    assert "  train loss         0.5000 (step 1)" in out
    assert [line for line in out if line.startswith(f"  validation loss    {before['val/loss']:.4f} -> ")]
    assert [line for line in errors if not line.startswith(("warning:", "step "))] == errors[:2]
    assert errors[:2] == ["tokenising rows.jsonl into cache", "tokenised 64 rows of rows.jsonl"]


def test_a_resumed_run_that_finishes(stopped_and_resumed: tuple[Path, list[list[str]]], tiny_llama: Path) -> None:
    folder, (_, _, out, errors) = stopped_and_resumed
    assert_output("run_resumed", "\n".join([*without_figures(out), ""]), MODEL=tiny_llama)
    results = folder / "results/gpt_kto"
    step, value = best_of(results, "val_loss")
    last = json.loads((results / "checkpoints/step_000006/trainer.json").read_text())["metrics"]["val_loss"]
    figures: list[object] = [
        f"  train loss         {first_and_last(results, 'train/loss')}",
        f"  validation loss    {first_and_last(results, 'val/loss')}",
        f"  validation kl      {first_and_last(results, 'val/kl')}",
        f"  validation auc     {first_and_last(results, 'val/auc')}",
        f"  validation margin  {first_and_last(results, 'val/rewards_margin')}",
        f"  best checkpoint    {results.relative_to(folder)}/checkpoints/step_{step:06} (val_loss {value:.4f}, "
        "lowest of 4 kept checkpoints)",
        f"  last checkpoint    {results.relative_to(folder)}/checkpoints/step_000006 (val_loss {last:.4f}, "
        "written by nemo-kto export results/gpt_kto FOLDER)",
        Message("best", f"{step}"),
    ]
    assert [line for line in figures if line not in out] == []
    warnings = [line for line in errors if line.startswith("warning:")]
    assert warnings == [
        Message("warning", "model.optim.lr=0.001", "destroy", "docs/guides/settings.md#learning-rate"),
        Message("warning", "validation", "13 rows", "20", "model.data.splits_string"),
        Message("warning", "train", "prompt", "16", "51", "model.data.seq_length=64"),
        Message("warning", "validation", "prompt", "6", "13", "model.data.seq_length=64"),
    ]
    assert "estimated time: N s (N s a step)" in errors


def test_the_best_checkpoint_is_exported(stopped_and_resumed: tuple[Path, list[list[str]]]) -> None:
    folder, _ = stopped_and_resumed
    step, _ = best_of(folder / "results/gpt_kto", "val_loss")
    assert step < 6, "not the last checkpoint"
    checkpoint = f"results/gpt_kto/checkpoints/step_{step:06}"
    done = run([*CLI, "export", checkpoint, "again"], cwd=folder, env=environment(), preload=TRAINING)
    assert done.stdout.splitlines() == [
        Message("export", f"{checkpoint}"),
        "  exported model  again",
        Message('transformers.AutoModelForCausalLM.from_pretrained("again")'),
    ]
    assert files_of(folder / "best") == files_of(folder / "again")


def test_the_best_checkpoint_needs_a_validation(tiny_llama: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", make_rows(20))
    words = command(tiny_llama, "kto", 'model.data.splits_string="98,1,1"')
    done = run(words, cwd=tmp_path, env=environment(), preload=TRAINING)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == (
        Message(
            "nemo-kto",
            "model.data.splits_string",
            "validation",
            "export.which=best",
            "none",
            "98,1,1",
            "90,10",
            "export.which=last",
        )
    )
    assert not (tmp_path / "results").exists(), "nothing is written"


@pytest.mark.full
def test_the_best_adapters_of_two_ranks_are_exported(tiny_llama: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", make_pairs(64))
    (tmp_path / "model").symlink_to(tiny_llama)
    layout = ["trainer.devices=2", "model.tensor_model_parallel_size=2", "model.sequence_parallel=true"]
    adapters = [
        "model.peft.peft_scheme=lora",
        "model.peft.lora_tuning.target_modules=attention_qkv",
        "model.reference.mode=auto",
        "export.adapter_path=best_adapter",
    ]
    out, errors = train(tmp_path, Path("model"), "dpo", *layout, *adapters, "model.optim.lr=1e-2")
    step, _ = best_of(tmp_path / "results/gpt_dpo", "val_loss")
    assert step < 6, "not the last checkpoint"
    shown = text_shown()
    assert without_figures(out) == without_figures(line for line in shown if not line.startswith(("step", "estimated")))
    assert_names(out, "best", f"{step}", "adapters")
    assert {line for line in without_figures(shown) if line.startswith(("step", "estimated"))} <= {*without_figures(errors)}
    assert_the_report_of(tmp_path / "results/gpt_dpo")
    checkpoint = f"results/gpt_dpo/checkpoints/step_{step:06}"
    for again, flags in (("again", []), ("again_adapter", ["--adapter"])):
        done = run([*CLI, "export", *flags, checkpoint, again], cwd=tmp_path, env=environment(), preload=TRAINING)
        assert done.returncode == 0, done.stderr
        assert files_of(tmp_path / again.replace("again", "best")) == files_of(tmp_path / again)


def test_adapters_that_peft_refuses(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """A warning at the start; nothing suggests to load them with peft, and they are not exported on demand."""
    write_rows(tmp_path / "rows.jsonl", make_pairs(24))
    (tmp_path / "model").symlink_to(tiny_checkpoint("nemotron_h"))
    given = ["model.peft.peft_scheme=lora", "model.peft.lora_tuning.target_modules=[all,out_proj]", "export.which=last"]
    out, errors = train(tmp_path, Path("model"), "dpo", *given, "model.reference.mode=auto", "trainer.dpo.max_steps=1")
    folder, refusal = "results/gpt_dpo/adapter", ("peft", "out_proj", "nemotron_h")
    assert Message("warning", *refusal, "export.adapter_path", "merged", "target_modules=[all-linear]") in errors
    assert [line for line in out if folder in line] == [Message("exported adapters", folder, *refusal)]
    card = (tmp_path / folder / "README.md").read_text()
    assert_names(card, *refusal, "merged")
    assert "from_pretrained" not in card
    for words, parts in {
        ("export", "--adapter", "results/gpt_dpo", "again"): ("step_000001", *refusal, "omit --adapter"),
        ("chat", folder): (folder, "peft", "out_proj", "name the run"),
    }.items():
        done = run([*CLI, *words], cwd=tmp_path, env=environment(), preload=TRAINING)
        assert (done.returncode, done.stderr.splitlines()[-1]) == (2, Message(*parts))
    assert not (tmp_path / "again").exists()


def assert_the_report_of(folder: Path) -> None:
    """The folder of a finished run has the records of the run, and the report that shows them."""
    run = json.loads((folder / "run.json").read_text())
    assert (run["state"], run["total_steps"], run["resumed_step"]) == ("finished", 6, None)
    assert run["settings"]["model.optim.lr"] == 1e-2
    # neither defaults, nor what follows from the user's values
    assert not {"model.optim.sched.min_lr", "model.optim.betas", "exp_manager.name"} & set(run["settings"])
    assert run["summary"]["lr"] == "0.01 (model.optim.lr)"
    data = json.loads((folder / "data.json").read_text())
    assert {name: counts["rows"] for name, counts in data["sets"].items()} == {"train": 51, "validation": 13}
    lengths = data["sets"]["train"]["lengths"]
    assert {part: sum(of_part["counts"]) for part, of_part in lengths.items()} == dict.fromkeys(lengths, 51)
    assert list(lengths) == ["prompt", "chosen", "rejected"]
    page = (folder / "report.html").read_text()
    for fact in ("Accuracy", "Lengths of answers", "0.01 (model.optim.lr)", "sha256", "step_000006"):
        assert fact in page, fact
    assert re.search(r"<td>validation</td>\s*<td>13</td>", page)


def test_logged_steps_and_warnings(tmp_path: Path) -> None:
    """Each job of a sweep prints its own warnings; within a job nothing is repeated, and libraries print only warnings."""
    body = """
import logging, warnings
for _ in range(2):
    logging.getLogger("nemo_kto.run").warning("mine")
    warnings.warn("old", FutureWarning)
logging.getLogger("nemo_kto.run").info("told in job %s", cfg.model.seed)
logging.getLogger("library").info("not told")
"""
    env = stub_training(tmp_path, body)
    done = run([*CLI, "kto", *GOOD, "--multirun", "model.seed=1,2"], cwd=tmp_path, env=env)
    assert done.returncode == 0
    lines = [re.sub(r" \(FutureWarning, .*job\.py:\d+\)", " (FutureWarning)", line) for line in done.stderr.splitlines()]
    first = ["warning: mine", "warning: old (FutureWarning)", "told in job 1"]
    assert lines[:3] == first
    assert lines[-1] == "told in job 2"
    assert lines[3:-1] == first[:2]


def run_closed(command: list[str], folder: Path, env: dict[str, str], *, full: bool) -> tuple[int, str]:
    """Status and stderr of a command whose standard output is full, or a pipe without reader."""
    if full:
        output = os.open("/dev/full", os.O_WRONLY)
    else:
        read, output = os.pipe()
        os.close(read)
    with (folder / "errors").open("w") as errors:
        status = start(command, cwd=folder, env=env, output=output, errors=errors.fileno()).wait(100)
    os.close(output)
    return status, (folder / "errors").read_text()


def test_a_run_is_finished(tmp_path: Path) -> None:
    body = "print('started', flush=True)\nopen(f'finished{rank}', 'w').close()\nprint('finished', flush=True)"
    env = stub_training(tmp_path, body)
    status, message = run_closed([*CLI, "kto", *GOOD, "trainer.devices=2"], tmp_path, env, full=True)
    assert status == 0, message
    assert "Traceback" not in message
    assert_names(message, "nemo-kto: standard output", "No space left on device")
    assert len(list(tmp_path.glob("finished*"))) == 2


@pytest.mark.parametrize("words", [["kto", "--help"], ["checkpoint", "ls", "results"]], ids=" ".join)
def test_closed_output_of_a_printing_command(tmp_path: Path, words: list[str]) -> None:
    """A command ends without a traceback; its status is an error only if its output is lost."""
    env = stub_training(tmp_path, "")
    (tmp_path / "results/checkpoints/step_000001").mkdir(parents=True)
    status, message = run_closed([*CLI, *words], tmp_path, env, full=True)
    assert status == 1, message
    assert_names(message, "nemo-kto: standard output", "No space left on device")
    assert "Traceback" not in message
    assert run_closed([*CLI, *words], tmp_path, env, full=False) == (0, "")


@pytest.mark.full
def test_forty_rows_are_enough_for_the_defaults(tiny_llama: Path, tmp_path: Path) -> None:
    rows = [{**row, "id": number, "source": "web"} for number, row in enumerate(make_rows(40))]
    rows[0]["response"] = "long " * 20
    file = write_rows(tmp_path / "rows.jsonl", rows)
    words = [f"pretrained_checkpoint.restore_from_path={tiny_llama}", f"model.data.data_prefix={file}", "hardware=cpu"]
    words += [f"model.data.cache_dir={tmp_path / 'cache'}", "model.data.seq_length=64", "export.enabled=false"]
    words += ["exp_manager.create_tensorboard_logger=false", "export.report=false", "trainer.kto.limit_train_batches=2"]
    done = run([*CLI, "kto", *words], cwd=tmp_path, env=environment(), preload=TRAINING, timeout=300)
    assert done.returncode == 2, done.stderr
    assert_names(
        done.stderr,
        "nemo-kto",
        "model.global_batch_size",
        "number",
        "40",
        "64",
        "model.global_batch_size=40",
        "train",
        "model.data.data_prefix",
    )
    assert not (tmp_path / "results").exists()

    done = run(
        [*CLI, "kto", *words, "model.global_batch_size=16"], cwd=tmp_path, env=environment(), preload=TRAINING, timeout=300
    )
    assert done.returncode == 0, done.stderr
    logged = [json.loads(line) for line in (tmp_path / "results/gpt_kto/metrics.jsonl").read_text().splitlines()]
    assert [line["train/rows"] for line in logged if "train/loss" in line] == [16, 16]
    assert not any("val/loss" in line for line in logged)
    cache = tmp_path / "cache"
    assert [path for path in [cache, *cache.rglob("*")] if path.stat().st_mode & 0o077] == [], "rows may be private"
    expected = [
        Message(f"{file}", "used", "id", "40"),
        Message("validation", "40", "all", 'model.data.splits_string="50,50"', "null"),
        Message("train", "answer", "1", "40", "model.data.seq_length=64"),
    ]
    assert [text for text in expected if text not in done.stderr.splitlines()] == []
    assert "16 rows a step" in done.stdout
    assert "each epoch omits 8 rows" in done.stdout
