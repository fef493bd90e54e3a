"""Start of the ranks: rendezvous, gloo groups, equal layouts, and the precision that rank 0 chooses."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml

from nemo_kto.device import device
from nemo_kto.device.precision import Bf16Support
from nemo_kto.distributed import state
from nemo_kto.errors import UserError
from nemo_kto.model_files.checkpoint_files import info_text
from nemo_kto.processes import rendezvous
from nemo_kto.run import prepare
from tests.distributed.processes.test_hangs import Ranks, free_port
from tests.helpers.consumed_rows import train_and_record
from tests.helpers.hf_jobs import message_of
from tests.helpers.job_cache import CHECKPOINTS, JobCache
from tests.helpers.messages import Message, raises
from tests.helpers.rank_pool import RankPool
from tests.helpers.training_jobs import resolved, shards, train, trajectory
from tests.unit.model_files.test_checkpoint_files import make_checkpoint

SLOW, FAST = "bf16 is slow here", "bf16 is fast here"


def support(has: bool) -> Bf16Support:
    return Bf16Support(native=has, why=FAST if has else SLOW)


def started(*arguments: Any) -> str:
    """Output of a rank of a job, where only rank 0 has bf16."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(prepare, "bf16_support", lambda: support(state.rank() == 0))
        train(*arguments)
    return printed.getvalue()


def test_rank_0_decides_the_precision(ranks: RankPool, tiny_llama: Path, kto_rows: Path, tmp_path: Path) -> None:
    short = ["trainer.precision=auto", "trainer.kto.max_steps=1", "trainer.kto.limit_val_batches=0"]
    first, second = ranks.run(2, started, tiny_llama, kto_rows, tmp_path, 2, short)
    assert f"  precision   bf16 ({FAST})" in first.splitlines()
    assert "precision" not in second, "only rank 0 prints"
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["trainer"]["precision"] == "bf16"
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    assert json.loads((checkpoint / "trainer.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("dtype", "native", "precision"),
    [(None, True, "bf16"), (None, False, "32"), ("bfloat16", False, "bf16"), ("float32", True, "32")],
)
def test_a_resumed_run_keeps_its_precision(
    dtype: str | None,
    native: bool,
    precision: str,
    tiny_llama: Path,
    kto_rows: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if dtype is not None:
        file = make_checkpoint(tmp_path / "checkpoints", 1) / "trainer.json"
        file.write_text(info_text({**json.loads(file.read_text()), "dtype": dtype}))
    monkeypatch.setattr(prepare, "bf16_support", lambda: support(native))
    run = prepare.agree_between_ranks(resolved(tiny_llama, kto_rows, tmp_path, 1, ["trainer.precision=auto"]))
    assert run.cfg.trainer.precision == precision
    warning = Message("trainer.precision", "bf16", SLOW, "trainer.precision=32", "folder")
    assert caplog.messages == [warning] * ((precision, native) == ("bf16", False))


@pytest.mark.parametrize(("given", "saved"), [("bf16", None), ("bf16-mixed", None), ("auto", "bfloat16")])
def test_bf16_on_a_cpu_that_is_too_slow(
    given: str, saved: str | None, tiny_llama: Path, kto_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a run that is resumed from another machine, unless it is forced."""
    if saved is not None:
        file = make_checkpoint(tmp_path / "checkpoints", 1) / "trainer.json"
        file.write_text(info_text({**json.loads(file.read_text()), "dtype": saved}))
    monkeypatch.setattr(prepare, "bf16_support", lambda: replace(support(False), too_slow=True))

    def resolve(precision: str) -> str:
        run = resolved(tiny_llama, kto_rows, tmp_path, 1, [f"trainer.precision={precision}"])
        return str(prepare.agree_between_ranks(run).cfg.trainer.precision)

    remedy = "trainer.precision=32" if saved else "auto or 32"
    with raises(UserError, "trainer.precision", "10 times", "bf16", SLOW, remedy, "trainer.precision=bf16-forced"):
        resolve(given)
    assert (resolve("bf16-forced"), resolve("32")) == ("bf16", "32")


NAME = socket.gethostname()


@pytest.fixture
def taken() -> Iterator[int]:
    """Port of some other program, which listens and says nothing."""
    with socket.create_server(("", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("rank", "address", "is_taken", "names"),
    [
        (0, "no-such-node.invalid", False, ["MASTER_ADDR", "'no-such-node.invalid'", "rank 0 of 2", "set it to"]),
        (1, "127.0.0.1", False, ["0.3 s", "127.0.0.1:", "MASTER_ADDR:MASTER_PORT", "rank 1 of 2", "firewall"]),
        (0, "192.0.2.1", False, ["MASTER_ADDR", "machine of rank 0", "192.0.2.1", "0.3 s"]),  # an unused address
        (0, "127.0.0.1", True, ["MASTER_PORT", "free port", "rank 0 of 2", "choose another port"]),
        (1, "127.0.0.1", True, ["rank 0 must answer", "MASTER_ADDR:MASTER_PORT", "something else", "127.0.0.1:"]),
    ],
    ids=["unknown address", "no listener", "another machine", "port in use", "another program"],
)
def test_ranks_that_cannot_meet(rank: int, address: str, is_taken: bool, names: list[str], taken: int) -> None:
    port = taken if is_taken else free_port()
    with raises(UserError, *names, str(port), NAME):
        rendezvous._connect(address, port, rank=rank, size=2, seconds=0.3)


def test_consecutive_jobs_use_the_same_port(tmp_path: Path) -> None:
    with Ranks(tmp_path, "[steps(2, lambda: None) for _ in range(2)]", size=2) as ranks:
        assert ranks.ended(0, 1) == [(0, ""), (0, "")]


def groups_of_a_run(*arguments: Any) -> list[str | None]:
    """Backends of the groups that a run without gloo groups makes."""
    backends: list[str | None] = []
    new_group = dist.new_group

    def recorded(*arguments: Any, **options: Any) -> Any:
        backends.append(options.get("backend"))
        return new_group(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", recorded)
        patch.setattr(state, "uses_gloo_groups", lambda: False)
        train(*arguments)
    return backends


def test_a_run_without_gloo_groups_is_the_same(
    jobs: JobCache, ranks: RankPool, tiny_llama: Path, kto_rows: Path, tmp_path: Path
) -> None:
    """It loads a checkpoint of a run that has them, and saves others."""
    whole, run = jobs("kto", overrides=CHECKPOINTS, world_size=2, run=train_and_record), tmp_path / "run"
    shutil.copytree(whole, run, ignore=shutil.ignore_patterns("step_000002", "step_000003"))
    made = ranks.run(2, groups_of_a_run, tiny_llama, kto_rows, run, 2, list(CHECKPOINTS))
    assert all(backends and "gloo" not in backends for backends in made)
    assert trajectory(run) == trajectory(whole)
    assert len(shards(run, step=3)) == 2
    assert shards(run, step=3) == shards(whole, step=3)


def test_where_gloo_groups_are_created(monkeypatch: pytest.MonkeyPatch) -> None:
    assert state.uses_gloo_groups()
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    assert not state.uses_gloo_groups()


def start_with_own_layout(model: Path, rows: Path, folder: Path) -> str:
    """Error of this rank in a job, in which rank 1 has another layout."""
    from nemo_kto.distributed import state
    from tests.helpers.training_jobs import train

    own = [["model.pipeline_model_parallel_size=1"], ["model.pipeline_model_parallel_size=2", "model.micro_batch_tokens=64"]]
    return message_of(lambda: train(model, rows, folder, 2, ["model.micro_batch_size=null", *own[state.rank()]]))


def test_a_layout_that_differs_between_ranks(ranks: RankPool, tiny_llama: Path, kto_rows: Path, tmp_path: Path) -> None:
    pipeline, tokens = "model.pipeline_model_parallel_size", "model.micro_batch_tokens"
    found = ranks.run(2, start_with_own_layout, tiny_llama, kto_rows, tmp_path)
    assert found == 2 * [
        Message(
            "UserError",
            f"{pipeline}, {tokens} must be the same on all ranks",
            f"{pipeline}=1 {tokens}=null on rank 0 and {pipeline}=2 {tokens}=64 on rank 1",
            "set these keys on the command line",
        )
    ]
    assert not any(tmp_path.iterdir())
