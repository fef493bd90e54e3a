"""A run is resumed, or refused with every difference or the job that uses its folder, which is not changed."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file, save_file

from nemo_kto.architecture.lora import LoRASettings
from nemo_kto.errors import UserError
from nemo_kto.model_files.checkpoint_files import find_checkpoints
from nemo_kto.run.prepare import Start, prepare
from nemo_kto.run.resume import Facts, differences, facts_of_run
from nemo_kto.utils import locks
from nemo_kto.utils.locks import locked, owner_file, this_process
from tests.helpers import hf_models
from tests.helpers.job_cache import CHECKPOINTS
from tests.helpers.messages import Message, assert_names
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_models import make_rows, write_rows
from tests.helpers.training_jobs import resolved, train

REMEDY = ("exp_manager.name", "exp_manager.explicit_log_dir")
EXPORT = "export.enabled=true"


class Folders(NamedTuple):
    """A model, its rows, and a finished run of three steps with them."""

    model: Path
    rows: Path
    run: Path

    def start(self, *overrides: str) -> Start:
        """Up to the checks of the run's folder."""
        return prepare(resolved(*self, 1, [*CHECKPOINTS, *overrides]), data_parallel=(0, 1))

    def refusal(self, *overrides: str) -> str:
        before = snapshot(self.run)
        with pytest.raises(UserError) as error:
            self.start(*overrides)
        assert snapshot(self.run) == before
        return str(error.value)


class Told(NamedTuple):
    """Output, error and warnings of a start."""

    printed: str
    error: str
    warnings: list[str]


def started(folders: Folders, *overrides: str) -> Told:
    """On a rank: start the run again."""
    printed, warnings, error = io.StringIO(), io.StringIO(), ""
    handler = logging.StreamHandler(warnings)
    about_rows = ("nemo_kto.run.data", "nemo_kto.algorithms.recipes")
    handler.addFilter(lambda record: record.levelno >= logging.WARNING and not record.name.startswith(about_rows))
    logging.getLogger("nemo_kto").addHandler(handler)
    try:
        with contextlib.redirect_stdout(printed):
            train(*folders, 1, [*CHECKPOINTS, *overrides])
    except ValueError as raised:
        error = f"{type(raised).__name__}: {raised}"
    finally:
        logging.getLogger("nemo_kto").removeHandler(handler)
    return Told(printed.getvalue(), error, warnings.getvalue().splitlines())


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Time and size of every file and folder."""
    states = ((path, path.stat()) for path in folder.rglob("*"))
    return {str(path.relative_to(folder)): (state.st_mtime_ns, state.st_size) for path, state in states}


@pytest.fixture
def first(tiny_llama: Path, kto_rows: Path, saved_run: Path) -> Folders:
    return Folders(tiny_llama, kto_rows, saved_run)


@pytest.fixture
def copied(first: Folders, tmp_path: Path) -> Folders:
    """The finished run in another folder."""
    return first._replace(run=Path(shutil.copytree(first.run, tmp_path / "run")))


def change(folder: Path, name: str, tensor: str | None = None) -> None:
    weights = load_file(folder / name)
    weights[tensor or min(weights)][0, 0] += 1e-3
    save_file(weights, folder / name, metadata={"format": "pt"})


def test_changed_files_are_detected(first: Folders, ranks: RankPool, tmp_path: Path) -> None:
    """The hashes of weights, tokenizers and rows are those of tests/unit: test_model_folders.py and test_fingerprint.py."""
    rows = make_rows(96)
    rows[3].update(preference={"chosen": "rejected"}.get(rows[3]["preference"], "chosen"))
    of_rows = first._replace(rows=write_rows(tmp_path / "rows.jsonl", rows)).refusal()
    model, before = Path(shutil.copytree(first.model, tmp_path / "model")), snapshot(first.run)
    change(model, "model.safetensors", "model.layers.1.mlp.up_proj.weight")
    (template,) = model.glob("chat_template*")
    template.write_text(template.read_text() + "\n")
    ((printed, of_model, _),) = ranks.run(1, started, first._replace(model=model))
    key, of_data = "pretrained_checkpoint.restore_from_path", ("model.data.data_prefix", "splits_string", "96 rows")
    assert of_rows.splitlines()[1:-1] == [Message(*of_data, "training rows"), Message(*of_data, "validation rows")]
    was = json.loads((first.run / "checkpoints/step_000003/trainer.json").read_text())["run"][key]["from"]
    assert of_model.splitlines() == [
        Message("UserError", f"{first.run}", "2"),
        Message(key, f"{model}", was, "weights", "configuration"),
        Message(key, f"{model}", was, "tokenizer", "chat template"),
        Message(*REMEDY),
    ]
    assert printed == ""
    assert snapshot(first.run) == before


# Settings that must not change, by an override that changes them.
KEYS: dict[str, str] = {
    "model.kto.preference_loss=apo_zero_unpaired": "kto",
    "model.kto.ref_policy_kl_penalty=0.3": "0.2",
    "model.kto.undesirable_loss_weight=2.5": "1.0",
    "model.kto.sft_loss_weight=0.5": "0.0",
    "model.data.seq_length=63": "64",
    "model.data.truncation_mode=keep_start": "keep_end",
    "model.seed=7": "1234",
    "model.optim.use_distributed_optimizer=false": "true",
    "model.reference.sync_interval=2": "0",
    "model.peft.peft_scheme=lora": "none",
}


def test_all_changed_keys_are_named_in_one_error(first: Folders) -> None:
    _, *lines, remedy = first.refusal(*KEYS).splitlines()
    assert len(lines) == len(KEYS) + 1
    assert Message("model.reference.sync_alpha", "null", "0.6") in lines
    for override, must_stay in KEYS.items():
        assert Message(*override.split("="), must_stay) in lines
    assert remedy == Message(*REMEDY)


def test_a_new_run_rejects_the_folder_of_another_run(first: Folders) -> None:
    names = ("folder", f"{first.run / 'checkpoints'}", "3", "last", "exp_manager.resume_if_exists=true", *REMEDY)
    assert first.refusal("exp_manager.resume_if_exists=false") == Message(*names)


def test_a_finished_run_reports_it_and_changes_nothing(first: Folders, ranks: RankPool) -> None:
    before, names = snapshot(first.run), ("3", "max_steps=3", "trainer.kto.max_steps", "train", *REMEDY)
    ((printed, error, _),) = ranks.run(1, started, first)
    assert error == ""
    assert printed == Message("nemo-kto", f"{first.run}", *names)
    shorter = first.start("trainer.kto.max_steps=1").resumption.finished
    assert shorter == Message(f"{first.run}", "3", "1", "max_steps=1", "trainer.kto.max_steps", "train", *REMEDY)
    other = first.start("model.optim.lr=0.5", "export.which=best").resumption.finished
    export = ("export.which", "last", "best", f"nemo-kto export {first.run} FOLDER --best")
    assert other == Message(f"{first.run}", "model.optim.lr", "0.5", *export, "trainer.kto.max_steps", *REMEDY)
    assert snapshot(first.run) == before


def test_an_export_is_written_if_it_is_missing_or_of_an_earlier_step(copied: Folders, ranks: RankPool) -> None:
    last, hf = copied.run / "checkpoints/step_000003", copied.run / "hf"
    before = snapshot(copied.run / "checkpoints"), (copied.run / "metrics.jsonl").read_bytes()
    ((printed, error, _),) = ranks.run(1, started, copied, EXPORT)
    assert error == ""
    assert_names(printed, f"{hf}", "last", "3")
    assert (snapshot(copied.run / "checkpoints"), (copied.run / "metrics.jsonl").read_bytes()) == before
    finished = copied.start(EXPORT).resumption.finished
    assert finished is not None
    assert finished.startswith("already finished")
    (hf / "of an earlier step").touch()
    later = hf.stat().st_mtime_ns + 1
    os.utime(last / "trainer.json", ns=(later, later))
    assert copied.start(EXPORT).resumption.finished is None
    ((printed, error, _),) = ranks.run(1, started, copied, EXPORT)
    assert error == ""
    assert not (hf / "of an earlier step").exists()


def test_changeable_keys_and_moved_folders(copied: Folders, ranks: RankPool) -> None:
    overrides = [
        *("trainer.kto.max_epochs=2", "trainer.kto.max_steps=9", "model.optim.lr=2e-3", "model.optim.sched.min_lr=1e-3"),
        *("model.micro_batch_size=2", "model.optim.weight_decay=0", "model.optim.sched.name=LinearAnnealing"),
    ]
    ((_, error, warnings),) = ranks.run(1, started, copied, *overrides)
    assert error == ""
    assert warnings == [Message("trainer.kto.max_steps", "4", "2", "9", "trainer.kto.max_epochs", "train")]
    rows = [json.loads(line) for line in (copied.run / "metrics.jsonl").read_text().splitlines()]
    assert [row["train/lr"] for row in rows if "train/lr" in row][-1] == pytest.approx(1e-3), "the last step has min_lr"
    facts = [checkpoint.info["run"] for checkpoint in find_checkpoints(copied.run / "checkpoints")]
    hashes = [{key: value["sha256"] if isinstance(value, dict) else value for key, value in fact.items()} for fact in facts]
    assert hashes == 4 * [hashes[0]]


class Compared:
    """Differences between settings of a new run."""

    def __init__(self, model: Path, rows: Path, folder: Path, algorithm: str = "kto") -> None:
        self.of = (model, rows, folder, 1), algorithm
        self.data = prepare(self.run(), data_parallel=(0, 1)).data

    def run(self, *overrides: str) -> Any:
        return resolved(*self.of[0], list(overrides), self.of[1])

    def facts(self, *overrides: str) -> Facts:
        return facts_of_run(self.run(*overrides), self.data)


LORA, TUNING = ("model.peft.peft_scheme=lora", "model.reference.mode=auto"), "model.peft.lora_tuning"
BEFORE = (*LORA, f"{TUNING}.target_modules=attention_qkv", f"{TUNING}.adapter_dim=4")


@pytest.fixture(scope="module")
def compared(tiny_llama: Path, kto_rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Compared:
    return Compared(tiny_llama, kto_rows, tmp_path_factory.mktemp("compared"))


def test_adapters_must_not_change_in_any_notation(compared: Compared) -> None:
    before = compared.facts(*BEFORE)
    changed = ("adapter_dim=8", "target_modules=[q_proj,o_proj]", "layer_selection=[1,2]", "rslora=true", "dora=true")
    assert differences(before, compared.facts(*BEFORE, *(f"{TUNING}.{each}" for each in changed))) == [
        Message(f"{TUNING}.adapter_dim", "4", "8"),
        Message(f"{TUNING}.alpha", "4.0", "8.0"),
        Message(f"{TUNING}.target_modules", "q_proj", "k_proj", "v_proj", "o_proj"),
        Message(f"{TUNING}.rslora", "false", "true"),
        Message(f"{TUNING}.dora", "false", "true"),
        Message(f"{TUNING}.layer_selection", "null", "1", "2"),
    ]
    same = ("target_modules=[v_proj,q_proj,k_proj]", "alpha=4", "adapter_dropout=0.1")
    assert differences(before, compared.facts(*BEFORE, *(f"{TUNING}.{each}" for each in same))) == []


@pytest.mark.parametrize("key", ["model.peft.restore_from_path", "model.reference.restore_from_path"])
def test_adapters_are_compared_by_content(key: str, compared: Compared, tiny_llama: Path, tmp_path: Path) -> None:
    given, other = tmp_path / "given", tmp_path / "other"
    hf_models.write_adapters(tiny_llama, given, LoRASettings(rank=4, alpha=4, target_modules=("attention_qkv",)))
    shutil.copytree(given, other)
    settings = LORA if "peft" in key else ()
    before = compared.facts(*settings, f"{key}={given}")
    assert differences(before, compared.facts(*settings, f"{key}={other}")) == []
    change(other, "adapter_model.safetensors")
    (line,) = differences(before, compared.facts(*settings, f"{key}={other}"))
    assert line == Message(key, "others", f"{other}", f"{given}")


def test_an_option_set_to_its_default_is_unchanged(
    compared: Compared, tiny_llama: Path, dpo_rows: Path, tmp_path: Path
) -> None:
    pairs, loss = Compared(tiny_llama, dpo_rows, tmp_path, "dpo"), "model.dpo.preference_loss=rpo_sq"
    before = pairs.facts(loss)
    defaults = ("model.dpo.gt_reward_scale=1.0", "model.data.default_rejected_reward=0.0")
    assert differences(before, pairs.facts(loss, *defaults)) == []
    others = ("model.dpo.gt_reward_scale=2.0", "model.data.default_chosen_reward=3")
    assert differences(before, pairs.facts(loss, *others)) == [
        Message("model.dpo.gt_reward_scale", "1.0", "2.0"),
        Message("model.data.default_chosen_reward", "1.0", "3.0"),
    ]
    assert Message("dpo", "kto") in differences(before, compared.facts())


def refusal(model: Path, rows: Path, folder: Path) -> str:
    from nemo_kto.errors import UserError

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(locks, "_GRACE_SECONDS", 0.1)
            train(model, rows, folder, 2, [])
    except UserError as error:
        return str(error)
    return "it was let in"


def half_done(folder: Path) -> dict[str, str]:
    """The contents of a run folder in the middle of a checkpoint."""
    files = {"metrics.jsonl": '{"step": 1}\n', "config.yaml": "a: 1\n"}
    files["checkpoints/.writing-step_000002/state/common.pt"] = "half"
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return files


def test_a_second_job_is_refused_with_the_owner_of_the_folder(ranks: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    files = half_done(folder)

    def must_not_be_called(who: str) -> None:
        raise AssertionError(who)

    with locked(folder / ".lock", when_held=must_not_be_called):
        told = ranks.run(2, refusal, tmp_path / "no model", tmp_path / "no rows", folder)
    (since,) = {text.split(" since ")[1][:23] for text in told}
    keys = ("exp_manager.name", "exp_manager.explicit_log_dir")
    assert told == [Message(f"{folder}", f"{os.getpid()}", this_process().host, since, "folder", *keys)] * 2
    found = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert found == files


def blocks(folder: Path) -> list[list[str]]:
    """Contents of the folder during and after each block."""
    from nemo_kto.distributed import state
    from nemo_kto.run.lifecycle import hold_run_folder

    found = []
    for writes in (False, True):
        with hold_run_folder(folder):
            if writes and state.is_rank_zero():
                (folder / "metrics.jsonl").touch()
            state.raise_together(None, "{}")  # waits for every rank, as the others below
            found.append(sorted(path.name for path in folder.iterdir()))
            state.raise_together(None, "{}")
        state.raise_together(None, "{}")
        found.append(sorted(path.name for path in folder.parent.iterdir()) if folder.parent.exists() else ["nothing"])
        state.raise_together(None, "{}")
    return found


def test_an_empty_run_folder_is_removed(ranks: RankPool, tmp_path: Path) -> None:
    results = ranks.run(2, blocks, tmp_path / "results" / "run")
    held = [".lock", ".lock.owner"]
    assert results == [[held, ["nothing"], [*held, "metrics.jsonl"], ["run"]]] * 2
    assert not owner_file(tmp_path / "results" / "run" / ".lock").exists()


def cleared(folder: Path) -> list[str]:
    """Contents of the locked folder."""
    from nemo_kto.run.lifecycle import hold_run_folder

    with hold_run_folder(folder):
        return sorted(path.name for path in folder.iterdir())


def test_partial_files_of_killed_jobs_are_removed(ranks: RankPool, tmp_path: Path) -> None:
    for name in (f".config.yaml-{'a0' * 16}", ".config.yaml-mine", "metrics.jsonl", f".{'b' * 32}"):
        (tmp_path / name).touch()
    assert ranks.run(1, cleared, tmp_path) == [
        [f".{'b' * 32}", ".config.yaml-mine", ".lock", ".lock.owner", "metrics.jsonl"]
    ]
