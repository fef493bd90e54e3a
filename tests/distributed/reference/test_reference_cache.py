"""The cache of reference log-probs: looked up by content, computed once, refused after changes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from nemo_kto.utils import locks
from nemo_kto.utils.locks import locked
from tests.helpers.messages import Message, assert_names, logged
from tests.helpers.rank_pool import RankPool


def make_rows(first: int, count: int) -> Any:
    """Rows of tokens [first], [first, first + 1], ..., padded; the last token of each is the response."""
    from nemo_kto.models.engine.sequences import SequenceBatch

    tokens, labels = torch.zeros(count, count, dtype=torch.int64), torch.full((count, count), -100)
    for row in range(count):
        tokens[row, : row + 1] = torch.arange(row + 1) + first
        labels[row, row] = tokens[row, row]
    return SequenceBatch(tokens_BS=tokens, labels_BS=labels, lengths_B=torch.arange(count) + 1)


def logp(rows: Any) -> torch.Tensor:
    """A number that tells rows apart and that fp32 rounds."""
    return -(rows.tokens_BS.sum(1) + rows.lengths_B / 3).float()


class CacheUser:
    """The operations of a run on its cache; records evaluated sequences and warnings."""

    def __init__(self, folder: Path, model: Path, **settings: Any) -> None:
        from nemo_kto.models.engine import reference

        self.evaluated = 0
        with logged(reference.__name__) as self.warnings:
            cache = reference.ReferenceCache(folder=folder, settings=settings, models=[model])
        self.reference = reference.CachedReference(cache=cache)

    def logprobs(self, sequences: Any) -> torch.Tensor:
        """The result of the engine."""
        self.evaluated += len(sequences)
        return logp(sequences)

    def joined(self, parts: Any) -> Any:
        """No prompts are shared."""
        return parts

    def fill(self, *batches: Any) -> CacheUser:
        engine: Any = self
        self.reference.precompute([(sequences,) for sequences in batches], engine)
        return self


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "config.json").write_text("{}")
    return folder


def on_one_rank(folder: Path) -> dict[str, Any]:
    from nemo_kto.distributed import state

    state.init_distributed(layout=state.Layout(), seed=0)
    model = make_model(folder / "model")
    found: dict[str, Any] = {}
    first = CacheUser(folder, model, precision="32").fill(make_rows(5, 4), make_rows(7, 3), make_rows(5, 4))
    found["evaluated"] = first.evaluated
    again = CacheUser(folder, model, precision="32")
    answers = again.reference.logprobs(make_rows(7, 3), make_rows(5, 4))
    found["equal"] = torch.equal(answers, torch.cat([logp(make_rows(7, 3)), logp(make_rows(5, 4))]))
    found["evaluated again"] = again.evaluated
    found["a few more"] = again.fill(make_rows(5, 4), make_rows(50, 2)).evaluated
    found["rows"] = CacheUser(folder, model, precision="32").reference.cache.size
    found["other settings"] = CacheUser(folder, model, precision="bf16").reference.cache.size
    try:
        again.reference.logprobs(make_rows(90, 3))
    except RuntimeError as error:
        found["error"] = str(error).replace(str(again.reference.cache.folder), "FOLDER")

    kept = again.reference.cache.folder
    found["modes"] = sorted({oct(path.stat().st_mode & 0o777) for path in [kept.parent, kept, *kept.iterdir()]})
    parts = sorted(again.reference.cache.folder.glob("part-*.npy"))
    content = parts[0].read_bytes()
    parts[0].write_bytes(content[:-8])
    parts[1].write_bytes(parts[1].read_bytes()[:-1] + b"?")
    (kept / "part-0.npy").touch()
    (kept / "part-1.npy").write_bytes(b"\x93NUMPY\1\0v\0{'descr': (" + b"9" * 200)
    (kept / "about.json").write_text("")
    damaged = CacheUser(folder, model, precision="32")
    found["warnings"] = [text.replace(str(damaged.reference.cache.folder), "FOLDER") for text in damaged.warnings]
    found["rows left"] = damaged.reference.cache.size
    found["evaluated after damage"] = damaged.fill(make_rows(5, 4)).evaluated

    found["about"] = json.loads((kept / "about.json").read_text())["folders"] == [str(model)]
    return found


def on_other_weights(folder: Path) -> list[int]:
    """The rows found for weights, for others of equal size and time, for the first again, and for those moved elsewhere."""
    from nemo_kto.distributed import state
    from nemo_kto.utils import hashes

    state.init_distributed(layout=state.Layout(), seed=0)
    model = make_model(folder / "model")
    with mock.patch.object(hashes, "MIN_KEPT_BYTES", 0):  # hashes are cached, as those of large files are
        found = [CacheUser(folder, model).fill(make_rows(5, 4)).reference.cache.size]
        weights = model / "model.safetensors"
        before = weights.stat()
        for text in (b"weighty", b"weights"):
            weights.write_bytes(text)
            os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
            assert weights.stat().st_size == before.st_size
            found.append(CacheUser(folder, model).reference.cache.size)
        return [*found, CacheUser(folder, model.rename(folder / "moved")).reference.cache.size]


def model_that_changes(folder: Path) -> list[str]:
    """Errors on reading the reference's weights again: unchanged, changed, and missing."""
    from nemo_kto.distributed import state
    from nemo_kto.errors import UserError

    state.init_distributed(layout=state.Layout(), seed=0)
    model = make_model(folder / "model")
    cache = CacheUser(folder, model).reference.cache
    cache.check_models()
    found = []
    for spoil in (lambda: (model / "model.safetensors").write_bytes(b"weighty"), lambda: model.rename(folder / "moved")):
        spoil()
        try:
            cache.check_models()
        except UserError as error:
            found.append(str(error))
    return found


def test_a_changed_reference_does_not_use_the_cache(ranks: RankPool, tmp_path: Path) -> None:
    ((changed, gone),) = ranks.run(1, model_that_changes, tmp_path)
    for text in (changed, gone):
        assert_names(text, str(tmp_path / "model"), "changed or are missing", "restore", "same command")


def two_jobs(folder: Path) -> dict[str, Any]:
    """Another job computes the rows "a" and holds the lock until this one waits for it."""
    from nemo_kto.distributed import state

    state.init_distributed(layout=state.Layout(), seed=0)
    model = make_model(folder / "model")
    late = CacheUser(folder, model).reference.cache
    other = CacheUser(folder, model)
    found: dict[str, Any] = {"waited": False}
    with late.one_job("a"):
        lock = next(late.folder.parent.glob(".*.lock"))
    (ready, tell), (released, release) = os.pipe(), os.pipe()
    if os.fork() == 0:
        with locked(lock, when_held=lambda who: None):
            os.write(tell, b".")
            os.read(released, 1)
        os._exit(0)
    os.read(ready, 1)
    other.fill(make_rows(5, 4))
    with late.one_job("b"):  # would wait for ever if it waited for the rows "a"
        found["other rows are not waited for"] = not found["waited"]

    def on_wait(*_: object) -> None:
        found["waited"] = True
        os.write(release, b".")

    with (
        mock.patch.object(locks, "_GRACE_SECONDS", 0.0),
        mock.patch.object(locks.logger, "warning", on_wait),
        late.one_job("a"),
    ):
        found["rows"] = late.size
    return found


def test_the_life_of_a_cache(ranks: RankPool, tmp_path: Path) -> None:
    (found,) = ranks.run(1, on_one_rank, tmp_path)
    assert found["evaluated"] == 7, "the third batch is the first one again"
    assert found["equal"]
    assert found["evaluated again"] == 0
    assert found["a few more"] == 2
    assert found["rows"] == 9
    assert found["other settings"] == 0
    assert found["error"] == Message("FOLDER", "3", "run", "start")
    assert found["modes"] == ["0o600", "0o700"], "files and folders are private"
    for text in found["warnings"]:
        assert_names(text, "FOLDER/part-")
        assert_names(text, "again")
    assert len(found["warnings"]) == 4
    assert found["rows left"] == 0
    assert found["evaluated after damage"] == 4
    assert found["about"]


def test_other_weights_of_equal_size_and_time_have_separate_log_probs(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(1, on_other_weights, tmp_path) == [[4, 0, 4, 4]]


def test_two_jobs_do_not_evaluate_the_same_sequences(ranks: RankPool, tmp_path: Path) -> None:
    (found,) = ranks.run(1, two_jobs, tmp_path)
    assert found == {"other rows are not waited for": True, "waited": True, "rows": 4}


def on_a_rank_of_two(folder: Path) -> tuple[int, bool, int]:
    from nemo_kto.distributed import state

    state.init_distributed(layout=state.Layout(), seed=0)
    with state.main_process_first(doing="at work"):
        if state.is_rank_zero():
            make_model(folder / "model")
    mine, theirs = make_rows(10 * state.rank(), 3), make_rows(10 * (1 - state.rank()), 3)
    session = CacheUser(folder, folder / "model").fill(mine)
    return session.evaluated, torch.equal(session.reference.logprobs(theirs), logp(theirs)), session.evaluated


def test_ranks_share_evaluated_log_probs(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, on_a_rank_of_two, tmp_path) == [(3, True, 3)] * 2


def test_cache_keys_depend_on_labels_but_not_on_padding() -> None:
    from nemo_kto.models.engine.reference import sequence_keys

    rows = make_rows(5, 3)
    wider = make_rows(5, 4).take(torch.arange(3))
    assert sequence_keys(rows).tolist() == sequence_keys(wider).tolist()
    wider.labels_BS[1, 0] = wider.tokens_BS[1, 0]
    same = (sequence_keys(rows) == sequence_keys(wider)).all(axis=1)
    assert same.tolist() == [True, False, True]
