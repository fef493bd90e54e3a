"""An export is complete or absent: failures at every stage, kills, special files, non-finite weights."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors.torch

from nemo_kto.distributed import state
from nemo_kto.errors import UserError
from nemo_kto.huggingface import export_folder
from nemo_kto.huggingface.hf_weights import export, load_weights
from nemo_kto.model_files.safetensors_files import is_our_model
from tests.helpers import hf_jobs
from tests.helpers.hf_models import weights
from tests.helpers.messages import Message, logged
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_models import make_checkpoint
from tests.helpers.training_jobs import train

SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


class Exporter:
    """One rank with a model that can be exported."""

    def __init__(self, folder: Path) -> None:
        state.init_distributed(layout=state.Layout(), seed=0)
        self.folder, (self.gpt, self.architecture) = folder, hf_jobs.build(folder, state.Layout())
        load_weights([self.gpt], self.architecture, folder)

    def __call__(self, out: Path) -> str:
        """The error; empty if there is none."""
        job = partial(export, source=self.folder, out=out, max_shard_bytes=20_000)
        return hf_jobs.message_of(lambda: job([self.gpt], self.architecture))


class Stage(NamedTuple):
    """A call that fails: of the function ``name`` of ``owner``, where its first argument's name ends like this."""

    owner: Any
    name: str
    ending: str = ""
    after: int = 0  # calls that succeed


def stages() -> dict[str, Stage]:
    return {
        "the lock": Stage(export_folder, "one_writer"),
        "the new folder": Stage(Path, "mkdir", ".out.export-"),
        "the first file of weights": Stage(safetensors.torch, "save_file"),
        "a later file of weights": Stage(safetensors.torch, "save_file", after=2),
        "the names of the weight files": Stage(Path, "rename", "part-1"),
        "the index": Stage(Path, "write_text", "index.json"),
        "the configuration": Stage(Path, "write_text", "config.json"),
        "the tokenizer": Stage(Path, "write_bytes", "tokenizer.json"),
        "the first flush": Stage(export_folder, "flush"),
        "a later flush": Stage(export_folder, "flush", after=5),
        "the new name": Stage(Path, "rename", ".out.export-"),
    }


@contextlib.contextmanager
def failing(stage: Stage) -> Iterator[None]:
    original, calls = getattr(stage.owner, stage.name), []

    def fail(*arguments: Any, **settings: Any) -> Any:
        name = Path(arguments[0]).name if arguments and isinstance(arguments[0], str | Path) else ""
        hit = name.endswith(stage.ending) or (stage.ending.endswith("-") and name.startswith(stage.ending))
        calls.extend([name] * hit)
        if hit and len(calls) == stage.after + 1:
            raise OSError(28, os.strerror(28))
        return original(*arguments, **settings)

    setattr(stage.owner, stage.name, fail)
    try:
        yield
    finally:
        setattr(stage.owner, stage.name, original)


def failures(model: Path, folder: Path) -> dict[str, tuple[str, list[str], bool, bool]]:
    """For each stage: the error, files left in a new folder, and whether an earlier export is complete."""
    exporter, found = Exporter(model), {}
    for name, stage in stages().items():
        new, old = folder / name / "new", folder / name / "old"
        old.mkdir(parents=True)
        new.mkdir()
        assert exporter(old / "out") == ""
        (old / "out" / "of the first").touch()
        with failing(stage):
            error = exporter(new / "out").replace(str(new), "FOLDER")
        with failing(stage):
            assert exporter(old / "out").replace(str(old), "FOLDER") == error
        left = [path.name for path in new.iterdir()]
        kept = [path.name for path in old.iterdir()] == ["out"] and (old / "out" / "of the first").exists()
        whole = weights(old / "out").keys() == weights(model).keys() and exporter(old / "out") == ""
        found[name] = error, left, kept, whole and not (old / "out" / "of the first").exists()
    return found


def test_a_failure_at_any_stage_keeps_the_earlier_export(ranks: RankPool, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", "llama", **SMALL)
    (found,) = ranks.run(1, failures, tmp_path / "model", tmp_path / "out")
    expected = Message("RuntimeError", "OSError: [Errno 28] No space left on device")
    later = Message("RuntimeError", "OSError: [Errno 28] No space left on device", "FOLDER/out")
    at_start = ("the lock", "the new folder")
    assert found == {name: (expected if name in at_start else later, [], True, True) for name in stages()}


def bad_weights(model: Path, out: Path) -> list[str]:
    exporter = Exporter(model)
    found = []
    for value in (float("nan"), float("inf"), 3e38):
        weight = exporter.gpt.decoder.layers[1].mlp.linear_fc2.weight.data
        weight[3, 5:7] = value
        found.append(exporter(out / "model"))
    return found


def test_weights_that_are_not_finite_are_not_exported(ranks: RankPool, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", "llama", **SMALL)
    (tmp_path / "out").mkdir()
    (found,) = ranks.run(1, bad_weights, tmp_path / "model", tmp_path / "out")
    weight = "model.layers.1.mlp.down_proj.weight"
    expected = Message("UserError", weight, "2", "2048", "checkpoint", "learning rate", f"{tmp_path / 'out' / 'model'}")
    assert found == [expected, expected, ""], "the sum of the last two overflows, and each is finite"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"]


def odd_files(model: Path, out: Path) -> tuple[str, str, list[str]]:
    """Exports of a folder with a link that leads outside, and with a pipe and a file that only its owner can read."""
    exporter = Exporter(model)
    for name in ("merges.txt", "vocab.json", "special_tokens_map.json", "generation_config.json"):
        (model / name).unlink(missing_ok=True)
    (model.parent / "secret").write_text("of someone else")
    (model / "merges.txt").symlink_to(model.parent / "secret")
    with logged("nemo_kto") as warnings:
        outside = exporter(out)
    (model / "merges.txt").unlink()
    os.mkfifo(model / "vocab.json")
    (model / "special_tokens_map.json").mkdir()
    (model / "generation_config.json").symlink_to("nowhere")
    templates = model / "additional_chat_templates"
    templates.mkdir()
    (templates / "tools.jinja").write_text("{{ tools }}")
    (model / "tokenizer.json").chmod(0o400)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    (model / "chat_template.jinja").symlink_to("tokenizer_config.json")
    before = os.umask(0o022)
    try:
        with logged("nemo_kto") as later:
            return outside, exporter(out), warnings + later
    finally:
        os.umask(before)


def test_special_files_in_the_model_folder(ranks: RankPool, tmp_path: Path) -> None:
    model, out = make_checkpoint(tmp_path / "model", "llama", **SMALL), tmp_path / "out"
    ((outside, error, warnings),) = ranks.run(1, odd_files, model, out)
    names = (f"{model}/merges.txt", "file", "folder", "link", f"{tmp_path}/secret", "nothing", f"{out}")
    assert outside == Message("UserError", "failed", *names)
    assert error == ""
    left_out = {"generation_config.json": "No such file or directory", "vocab.json": "FIFO"}
    assert sorted(warnings) == [Message(f"{model / name}", why) for name, why in left_out.items()]
    assert not [name for name in left_out if os.path.lexists(out / name)]
    assert (out / "additional_chat_templates/tools.jinja").read_text() == "{{ tools }}"
    assert (out / "chat_template.jinja").read_bytes() == (model / "tokenizer_config.json").read_bytes()
    assert not (out / "chat_template.jinja").is_symlink()
    assert {path.stat().st_mode & 0o777 for path in out.rglob("*") if path.is_file()} == {0o644}


def killed(action: Callable[[], None]) -> None:
    """Run it in a process that kills itself."""
    if (pid := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            action()
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def write(target: Path, text: str, *, kill_at: str = "") -> None:
    """Export with a kill at the given stage: "a": while it is written, ..."""

    def maybe(stage: str) -> None:
        if stage == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    folder = export_folder.NewFolder(target=target)
    renamed, removed = Path.rename, shutil.rmtree

    def rename(self: Path, to: Path) -> Path:
        maybe("before the new name" if self == folder.path else "before the earlier one is moved away")
        return renamed(self, to)

    def remove(path: Path, **settings: Any) -> None:
        maybe("before the earlier one is removed")
        removed(path, **settings)

    folder.start()
    (folder.path / "half").write_text(text)
    maybe("while it is written")
    (folder.path / "whole").write_text(text)
    if kill_at:
        Path.rename, shutil.rmtree = rename, remove  # type: ignore[method-assign,assignment]
    folder.publish()
    folder.discard()


# Content of the folder after a kill at this stage of the second export; none between the two renames.
KILLS = {
    "while it is written": "first",
    "before the earlier one is moved away": "first",
    "before the new name": None,
    "before the earlier one is removed": "second",
}


@pytest.mark.parametrize("stage", KILLS)
def test_a_kill_leaves_a_complete_folder_or_none_and_the_next_export_cleans_up(stage: str, tmp_path: Path) -> None:
    target = tmp_path / "out"
    for others in (".writing-out", "out.partial", ".out.export-mine"):
        (tmp_path / others).mkdir()
    write(target, "first")
    killed(lambda: write(target, "second", kill_at=stage))
    found = {path.name: path.read_text() for path in target.iterdir()} if target.exists() else None
    whole = KILLS[stage]
    assert found == (None if whole is None else {"half": whole, "whole": whole})
    write(target, "third")
    assert {path.read_text() for path in target.iterdir()} == {"third"}
    assert {path.name for path in tmp_path.iterdir()} == {"out", ".writing-out", "out.partial", ".out.export-mine"}


def refusal(*arguments: Any) -> str:
    return hf_jobs.message_of(lambda: train(*arguments))


@pytest.mark.parametrize("key", ["path", "adapter_path"])
def test_a_run_with_a_conflicting_export_folder_does_not_start(
    key: str, ranks: RankPool, kto_rows: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").touch()
    overrides = ["export.enabled=true", f"export.{key}={mine}", "model.peft.peft_scheme=lora"]
    model = make_checkpoint(tmp_path / "model", "llama", **SMALL)
    (found,) = ranks.run(1, refusal, model, kto_rows, tmp_path / "run", 1, overrides)
    assert found == Message("UserError", f"export.{key}", "used", f"{mine}", "folder", "export.enabled=false")
    assert not (tmp_path / "run").exists()


def test_an_export_follows_a_link(tmp_path: Path) -> None:
    (tmp_path / "large disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "large disk" / "out")
    for text in ("first", "second"):
        write(tmp_path / "out", text)
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "large disk" / "out" / "whole").read_text() == "second"
    assert [path.name for path in (tmp_path / "large disk").iterdir()] == ["out"]


def test_targets_are_checked_before_the_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def expected(target: Path, need: int = 0) -> str:
        with pytest.raises(UserError) as raised:
            export_folder.check_target(target, is_ours=is_our_model, need=need)
        return str(raised.value)

    (tmp_path / "mine").mkdir()
    export_folder.check_target(tmp_path / "mine", is_ours=is_our_model)
    export_folder.check_target(tmp_path / "a" / "b", is_ours=is_our_model, need=1)
    (tmp_path / "mine" / "thesis.tex").touch()
    assert expected(tmp_path / "mine") == Message(f"{tmp_path / 'mine'}", "folder")
    file = tmp_path / "mine" / "thesis.tex"
    assert expected(file / "out") == Message(f"{file / 'out'}", "created", "folder")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**12, 10**12, 10**9))
    assert expected(tmp_path / "a" / "b", need=14 * 10**9) == Message(f"{tmp_path}", "14.0", "GB", "1.0", "folder")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["mine", "thesis.tex"], "no files are left"
