"""A run is resumed, or refused with every difference and without changing its folder."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors.torch import load_file, save_file

from nemo_kto.artifacts.checkpoint_files import find_checkpoints
from tests.helpers.messages import Message, assert_names
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_models import make_checkpoint, make_pairs, make_rows, write_rows
from tests.helpers.training_jobs import train

REMEDY = ("exp_manager.name", "exp_manager.explicit_log_dir")


class Folders(NamedTuple):
    """A model, its rows, and a run of two steps (one epoch) with them."""

    model: Path
    rows: Path
    run: Path


class Told(NamedTuple):
    """Output, error and warnings of a start."""

    printed: str
    error: str
    warnings: list[str]


def started(folders: Folders, overrides: list[str], algorithm: str = "kto") -> Told:
    """On a rank: start the run again."""
    loop = [f"trainer.{algorithm}.{setting}" for setting in ("max_epochs=1", "max_steps=-1", "limit_val_batches=0")]
    printed, warnings, error = io.StringIO(), io.StringIO(), ""
    handler = logging.StreamHandler(warnings)
    about_rows = ("nemo_kto.run.data", "nemo_kto.algorithms.recipes")
    handler.addFilter(lambda record: record.levelno >= logging.WARNING and not record.name.startswith(about_rows))
    logging.getLogger("nemo_kto").addHandler(handler)
    try:
        with contextlib.redirect_stdout(printed):
            given = [*loop, "model.global_batch_size=4", *overrides]
            train(folders.model, folders.rows, folders.run, 1, given, algorithm)
    except ValueError as raised:
        error = f"{type(raised).__name__}: {raised}"
    finally:
        logging.getLogger("nemo_kto").removeHandler(handler)
    return Told(printed.getvalue(), error, warnings.getvalue().splitlines())


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Time and size of every file and folder."""
    states = ((path, path.stat()) for path in folder.rglob("*"))
    return {str(path.relative_to(folder)): (state.st_mtime_ns, state.st_size) for path, state in states}


@pytest.fixture(scope="module")
def first(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("first")
    folders = Folders(make_checkpoint(root / "model", "llama"), write_rows(root / "rows.jsonl", make_rows(8)), root / "run")
    assert ranks.run(1, started, folders, [])[0].error == ""
    return folders


@pytest.fixture
def copied(first: Folders, tmp_path: Path) -> Folders:
    """Copies of the model, the rows and the run in another folder."""
    shutil.copytree(first.run.parent, tmp_path / "moved")
    return Folders(*(tmp_path / "moved" / path.name for path in first))


def change_a_weight(folders: Folders) -> None:
    file = folders.model / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.2.mlp.up_proj.weight"][3, 5] += 1e-3
    save_file(weights, file, metadata={"format": "pt"})


def change_the_template(folders: Folders) -> None:
    (file,) = folders.model.glob("chat_template*")
    file.write_text(file.read_text() + "\n")


def change_a_label(folders: Folders) -> None:
    rows = make_rows(8)
    rows[3].update(preference={"chosen": "rejected"}.get(rows[3]["preference"], "chosen"))
    write_rows(folders.rows, rows)


def test_changed_files_are_detected(first: Folders, copied: Folders, ranks: RankPool) -> None:
    """The hashes of weights, tokenizers and rows are those of tests/unit: content_hashes and fingerprint."""
    label, before = copied._replace(rows=copied.rows.with_name("other.jsonl")), snapshot(copied.run)
    change_a_label(label)
    ((_, of_rows, _),) = ranks.run(1, started, label, [])
    change_a_weight(copied)
    change_the_template(copied)
    ((printed, of_model, _),) = ranks.run(1, started, copied, [])
    model, rows = "pretrained_checkpoint.restore_from_path", ("model.data.data_prefix", "splits_string", "8 rows")
    assert of_rows.splitlines()[1:-1] == [Message(*rows, "training rows"), Message(*rows, "validation rows")]
    assert of_model.splitlines() == [
        Message("UserError", f"{copied.run}", "2"),
        Message(model, f"{copied.model}", f"{first.model}", "weights", "configuration"),
        Message(model, f"{copied.model}", f"{first.model}", "tokenizer", "chat template"),
        Message(*REMEDY),
    ]
    assert printed == ""
    assert snapshot(copied.run) == before


# Settings that must not change, by an override that changes them.
KEYS: dict[str, str] = {
    "model.kto.preference_loss=apo_zero_unpaired": "kto",
    "model.kto.ref_policy_kl_penalty=0.3": "0.2",
    "model.kto.undesirable_loss_weight=2.5": "1.0",
    "model.kto.sft_loss_weight=0.5": "0.0",
    "model.data.seq_length=63": "64",
    "model.data.truncation_mode=keep_start": "keep_end",
    "model.data.reset_attention_mask=true": "false",
    "model.data.eod_mask_loss=true": "false",
    "model.seed=7": "1234",
    "model.optim.use_distributed_optimizer=false": "true",
    "model.reference.sync_interval=2": "0",
    "model.peft.peft_scheme=lora": "none",
}


def test_all_changed_keys_are_named_in_one_error(first: Folders, ranks: RankPool) -> None:
    before = snapshot(first.run)
    ((_, error, _),) = ranks.run(1, started, first, list(KEYS))
    _, *lines, remedy = error.splitlines()
    assert len(lines) == len(KEYS) + 1
    assert Message("model.reference.sync_alpha", "null", "0.6") in lines
    for override, must_stay in KEYS.items():
        assert Message(*override.split("="), must_stay) in lines
    assert remedy == Message(*REMEDY)
    assert snapshot(first.run) == before


def test_a_new_run_rejects_the_folder_of_another_run(first: Folders, ranks: RankPool) -> None:
    ((_, error, _),) = ranks.run(1, started, first, ["exp_manager.resume_if_exists=false"])
    assert error == (
        Message(
            "UserError",
            "folder",
            f"{first.run / 'checkpoints'}",
            "1",
            "last",
            "2",
            "exp_manager.resume_if_exists=true",
            *REMEDY,
        )
    )


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], ["2", "trainer.kto.max_epochs", "train"]),
        (
            ["trainer.kto.max_steps=1", "trainer.kto.max_epochs=2"],
            ["2", "1", "max_steps=1", "trainer.kto.max_steps", "train"],
        ),
    ],
)
def test_a_finished_run_reports_it_and_changes_nothing(
    overrides: list[str], expected: list[str], copied: Folders, ranks: RankPool
) -> None:
    before = snapshot(copied.run)
    ((printed, error, _),) = ranks.run(1, started, copied, overrides)
    assert error == ""
    assert printed == Message("nemo-kto", f"{copied.run}", *expected, *REMEDY)
    assert snapshot(copied.run) == before


def test_only_a_missing_export_is_written(copied: Folders, ranks: RankPool) -> None:
    checkpoints, logged = snapshot(copied.run / "checkpoints"), (copied.run / "metrics.jsonl").read_bytes()
    ((printed, error, _),) = ranks.run(1, started, copied, ["export.enabled=true"])
    assert error == ""
    assert_names(printed, f"{copied.run / 'hf'}", "last", "2")
    assert (snapshot(copied.run / "checkpoints"), (copied.run / "metrics.jsonl").read_bytes()) == (checkpoints, logged)
    before = snapshot(copied.run)
    ((printed, error, _),) = ranks.run(1, started, copied, ["export.enabled=true"])
    assert (error, printed[:26]) == ("", "nemo-kto: already finished")
    assert snapshot(copied.run) == before


def test_an_export_of_an_earlier_step_is_replaced(copied: Folders, ranks: RankPool) -> None:
    """The state is that of a run that was made longer, and killed when it had taken its last step."""
    ranks.run(1, started, copied, ["export.enabled=true"])
    weights = next((copied.run / "hf").glob("*.safetensors")).read_bytes()
    ranks.run(1, started, copied, ["trainer.kto.max_epochs=2"])
    ((printed, error, _),) = ranks.run(1, started, copied, ["trainer.kto.max_epochs=2", "export.enabled=true"])
    assert error == ""
    assert_names(printed, f"{copied.run / 'hf'}", "last", "4")
    assert next((copied.run / "hf").glob("*.safetensors")).read_bytes() != weights


def test_changeable_keys_and_moved_folders(copied: Folders, ranks: RankPool) -> None:
    overrides = [
        *("trainer.kto.max_epochs=2", "trainer.kto.max_steps=9", "model.optim.lr=2e-3", "model.optim.sched.min_lr=1e-3"),
        *("model.micro_batch_size=2", "model.optim.weight_decay=0", "model.optim.sched.name=LinearAnnealing"),
    ]
    ((_, error, warnings),) = ranks.run(1, started, copied, overrides)
    assert error == ""
    assert warnings == [Message("trainer.kto.max_steps", "4", "2", "9", "trainer.kto.max_epochs", "train")]
    rows = [json.loads(line) for line in (copied.run / "metrics.jsonl").read_text().splitlines()]
    assert [row["train/lr"] for row in rows if "train/lr" in row][-1] == pytest.approx(1e-3), "the last step has min_lr"
    facts = [checkpoint.info["run"] for checkpoint in find_checkpoints(copied.run / "checkpoints")]
    hashes = [{key: value["sha256"] if isinstance(value, dict) else value for key, value in fact.items()} for fact in facts]
    assert len(hashes) == 2
    assert hashes[0] == hashes[1]


LORA = [
    "model.peft.peft_scheme=lora",
    "model.peft.lora_tuning.target_modules=attention_qkv",
    "model.peft.lora_tuning.adapter_dim=4",
    "model.reference.mode=auto",
]


@pytest.fixture(scope="module")
def adapted(first: Folders, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A run of adapters, which start from those of another run."""
    root = tmp_path_factory.mktemp("adapted")
    exported = ["export.enabled=true", f"export.adapter_path={root / 'adapter'}", f"export.path={root / 'hf'}"]
    ranks.run(1, started, first._replace(run=root / "before"), [*LORA, *exported])
    folders = first._replace(run=root / "run")
    ((_, error, _),) = ranks.run(1, started, folders, [*LORA, f"model.peft.restore_from_path={root / 'adapter'}"])
    assert error == ""
    return folders


def change_an_adapter(folder: Path) -> None:
    weights = load_file(folder / "adapter_model.safetensors")
    next(iter(weights.values()))[0, 0] += 1
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def test_adapters_must_not_change_in_any_notation(adapted: Folders, ranks: RankPool) -> None:
    before, tuning = adapted._replace(run=adapted.run.parent / "before"), "model.peft.lora_tuning"
    changed = [f"{tuning}.adapter_dim=8", f"{tuning}.target_modules=[q_proj,o_proj]", f"{tuning}.layer_selection=[1,2]"]
    changed += [f"{tuning}.rslora=true", f"{tuning}.dora=true"]
    ((_, error, _),) = ranks.run(1, started, before, [*LORA, *changed])
    assert error.splitlines()[1:-1] == [
        Message(f"{tuning}.adapter_dim", "4", "8"),
        Message(f"{tuning}.alpha", "4.0", "8.0"),
        Message(f"{tuning}.target_modules", "q_proj", "k_proj", "v_proj", "o_proj"),
        Message(f"{tuning}.rslora", "false", "true"),
        Message(f"{tuning}.dora", "false", "true"),
        Message(f"{tuning}.layer_selection", "null", "1", "2"),
    ]
    same = [f"{tuning}.target_modules=[v_proj,q_proj,k_proj]", f"{tuning}.alpha=4", f"{tuning}.adapter_dropout=0.1"]
    ((printed, error, _),) = ranks.run(1, started, before, [*LORA, *same])
    assert error == ""
    assert_names(printed, "nemo-kto", "2")


def test_initial_adapters_are_compared_by_content(adapted: Folders, ranks: RankPool, tmp_path: Path) -> None:
    given = adapted.run.parent / "adapter"
    other = Path(shutil.copytree(given, tmp_path / "other"))
    change_an_adapter(other)
    ((_, error, _),) = ranks.run(1, started, adapted, [*LORA, f"model.peft.restore_from_path={other}"])
    assert error.splitlines()[1:-1] == [
        Message("model.peft.restore_from_path", "adapters", "others", f"{other}", f"{given}")
    ]


def test_reference_adapters_are_compared_by_content(adapted: Folders, ranks: RankPool, tmp_path: Path) -> None:
    given, run = adapted.run.parent / "adapter", adapted._replace(run=tmp_path / "run")
    other = Path(shutil.copytree(given, tmp_path / "other"))
    key = "model.reference.restore_from_path"
    assert ranks.run(1, started, run, [f"{key}={given}"])[0].error == ""
    ((printed, error, _),) = ranks.run(1, started, run, [f"{key}={other}"])
    assert (error, printed[:26]) == ("", "nemo-kto: already finished")
    change_an_adapter(other)
    ((_, error, _),) = ranks.run(1, started, run, [f"{key}={other}"])
    assert error.splitlines()[1:-1] == [Message(f"{key}", "others", f"{other}", f"{given}")]


def test_an_option_set_to_its_default_is_unchanged(first: Folders, ranks: RankPool, tmp_path: Path) -> None:
    pairs = first._replace(rows=write_rows(tmp_path / "pairs.jsonl", make_pairs(8)), run=tmp_path / "run")
    loss = "model.dpo.preference_loss=rpo_sq"
    ((_, error, _),) = ranks.run(1, started, pairs, [loss], "dpo")
    assert error == ""
    defaults = ["model.dpo.gt_reward_scale=1.0", "model.data.default_rejected_reward=0.0"]
    ((printed, error, _),) = ranks.run(1, started, pairs, [loss, *defaults], "dpo")
    assert (error, printed[:26]) == ("", "nemo-kto: already finished")
    others = ["model.dpo.gt_reward_scale=2.0", "model.data.default_chosen_reward=3"]
    ((_, error, _),) = ranks.run(1, started, pairs, [loss, *others], "dpo")
    assert error.splitlines()[1:-1] == [
        Message("model.dpo.gt_reward_scale", "1.0", "2.0"),
        Message("model.data.default_chosen_reward", "1.0", "3.0"),
    ]
    ((_, error, _),) = ranks.run(1, started, first._replace(rows=pairs.rows, run=pairs.run), [])
    assert Message("dpo", "kto") in error.splitlines()
