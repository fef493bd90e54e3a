"""`nemo-kto check` and `nemo-kto data tokenise` before a run, and the run that reads what they prepared."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.helpers.commands import CLI, TRAINING, environment, run
from tests.helpers.messages import assert_names
from tests.helpers.outputs import assert_output
from tests.helpers.tiny_models import make_checkpoint, make_pairs, make_rows, write_rows

PRELOAD = (*TRAINING, "nemo_kto.tools.plan.check_command", "nemo_kto.tools.inspect.preview_command")


class Login:
    """A folder with a model and 40 rows, in which commands are run."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.rows = folder, write_rows(folder / "rows.jsonl", make_rows(40))
        self.given = [str(model), "rows.jsonl"]
        self.given += ["model.data.cache_dir=cache", "model.data.seq_length=64", "model.global_batch_size=16"]

    def __call__(self, *words: str) -> tuple[int, dict[str, str], str]:
        """Exit status, lines of the table by label, and stderr."""
        done = run([*CLI, *words], cwd=self.folder, env=environment(), preload=PRELOAD)
        self.output = done.stdout
        lines = (re.split(r" {2,}", line.strip(), maxsplit=1) for line in done.stdout.splitlines()[1:])
        return done.returncode, {words[0]: words[1] for words in lines if len(words) == 2}, done.stderr

    def cached(self) -> dict[str, int]:
        """Name of each file of the cache -> its modification time."""
        return {path.name: path.stat().st_mtime_ns for path in (self.folder / "cache").rglob("*") if path.is_file()}


@pytest.fixture
def login(tmp_path: Path, tiny_llama: Path) -> Login:
    return Login(tmp_path, tiny_llama)


def without_free_space(output: str) -> str:
    return re.sub(r"[\d.]+ [GM]B(?= free)", "N", output)


def test_a_training_after_tokenise_and_check_tokenises_nothing(login: Login) -> None:
    status, shown, said = login("data", "tokenise", "kto", *login.given)
    assert status == 0, said
    assert "tokenised 40 rows of rows.jsonl" in said
    rows = shown["train"]
    assert rows.startswith("40 rows (")
    assert shown["cache"] == "cache"
    filled = login.cached()
    assert len(filled) == 2
    machines = ["--nodes", "2", "--gpus-per-node", "2", "--gpu", "a100"]
    status, shown, said = login("check", "kto", *login.given, *machines, "recipe=auto")
    assert status == 0, said
    assert "tokenis" not in said
    assert shown["train"] == rows
    assert_output("check/auto", without_free_space(login.output), MODEL=login.given[0], FOLDER=login.folder)
    # the size of micro-batches follows from the counted rows, as in the run, and not from the assumption of a plan
    status, shown, said = login("check", "kto", *login.given, *machines, "model.pipeline_model_parallel_size=2")
    assert status == 0, said
    assert_output("check/pipeline", without_free_space(login.output), MODEL=login.given[0], FOLDER=login.folder)
    assert not (login.folder / "results").exists(), "a check must write nothing but caches"
    words = ["hardware=cpu", "trainer.kto.max_steps=1", "export.enabled=false"]
    status, shown, said = login("kto", *login.given, *words)
    assert status == 0, said
    assert "tokenis" not in said
    assert shown["train"] == rows
    assert {name: changed for name, changed in login.cached().items() if name in filled} == filled
    # the same key as in the training decides whether the run is resumed or finished
    status, shown, said = login("check", "kto", *login.given, *words)
    assert (status, "already finished at step 1 of 1" in shown["run folder"]) == (0, True), said


def test_every_mistake_is_reported_before_the_run(login: Login) -> None:
    machines = ["--nodes", "2", "--gpus-per-node", "8"]
    wrong = ["model.optim.lr=-1", "model.tensor_model_parallel_size=3", "trainer.num_nodes=2"]
    status, _, said = login("check", "kto", *login.given, *wrong, *machines)
    assert status == 2
    assert_names(said, "check", "model.optim.lr", "-1", "model.tensor_model_parallel_size", "trainer.num_nodes", "--nodes")
    assert login.cached() == {}, "nothing is tokenised before the configuration is right"
    status, _, said = login("check", "kto", *login.given, "--gpu", "h200")
    assert status == 2
    assert_names(said, "--gpu", "--gpus-per-node", "h200")
    # the data-parallel size of the other machines determines the largest batch
    status, _, said = login("check", "kto", *login.given[:-1], "model.micro_batch_size=1", *machines)
    assert status == 2
    assert_names(said, "model.global_batch_size=32", "64", "40", "model.data.data_prefix")


def test_every_row_is_checked(login: Login) -> None:
    with login.rows.open("a") as file:
        file.write('{"prompt": "p", "response": "r", "preference": "maybe"}\n{"prompt": "p"}\n')
    for command in (["check", "kto"], ["data", "tokenise", "kto"]):
        status, _, said = login(*command, *login.given)
        assert status == 2
        assert_names(said, "rows.jsonl:41", "rows.jsonl:42", "maybe", "prompt")
        assert login.cached() == {}


def test_weights_of_another_class_are_listed_before_any_row_is_read(login: Login) -> None:
    """A Gemma 3 text model that was saved from the class with images."""
    model = make_checkpoint(login.folder / "windows", "gemma3_text", hidden_size=32, num_hidden_layers=2)
    file = model / "model.safetensors"
    save_file({f"language_model.{name}": each for name, each in load_file(file).items()}, file)
    for command in (["check", "kto"], ["kto", "hardware=cpu"]):
        status, _, said = login(*command, str(model), *login.given[1:])
        assert status == 2
        assert_names(
            said, str(model), "missing: model.embed_tokens.weight", "unexpected: language_model.model.embed_tokens.weight"
        )
        assert login.cached() == {}


def test_a_run_that_does_not_fit(login: Login) -> None:
    status, shown, said = login("check", "dpo", *login.given, "--memory", "0.001", "hardware=cpu")
    assert status == 2
    assert_names(said, "rows.jsonl:1", "chosen", "rejected")
    status, shown, said = login("check", "kto", *login.given, "--memory", "0.001", "hardware=cpu")
    assert status == 1, said
    assert shown["verdict"].startswith("does not fit: ")


def test_the_shared_prompts_of_a_check_are_those_of_the_run(login: Login) -> None:
    """Two steps are all that the check measures, in the same order; with two ranks it would see the share of one."""
    write_rows(login.folder / "rows.jsonl", make_pairs(32))
    words = [*login.given, "model.data.splits_string=null", "hardware=cpu", "trainer.precision=32", "export.enabled=false"]
    words += ["trainer.dpo.max_epochs=1", "exp_manager.explicit_log_dir=run", "exp_manager.create_tensorboard_logger=false"]
    status, shown, said = login("check", "dpo", *words)
    assert status == 0, said
    found = re.fullmatch(r"save ([\d.]+)% of the tokens and ([\d.]+)% of the FLOPs of 32 examples", shown["shared prompts"])
    assert found is not None, shown["shared prompts"]
    tokens = int(shown["train"].split(" tokens")[0].rsplit(" ")[-1].replace(",", ""))
    width = -(-tokens // (2 * 32))  # of a sequence, of which a pair has two; the batch is half of the 32 pairs
    assert shown["step"].endswith(f"{32 * width:,} tokens in sequences of {width} tokens, the mean of the training rows")
    assert re.search(r"a step, \S+ \S+ for all steps \(", shown["expected"])
    status, _, said = login("dpo", *words)
    assert status == 0, said
    lines = [json.loads(line) for line in (login.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line["perf/shared_fraction"] for line in lines if "perf/shared_fraction" in line]
    assert len(steps) == 2
    assert min(steps) * 100 - 0.05 <= float(found[2]) <= max(steps) * 100 + 0.05
