"""What every test may use: tiny Hugging Face checkpoints with a real tokenizer, labelled rows, the quickstart's model."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import gc
import importlib.util
import logging
import signal
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from nemo_kto.device import device
from tests.helpers import messages
from tests.helpers.rank_pool import ensure_forkserver
from tests.helpers.tiny_models import make_checkpoint, make_pairs, make_rows, make_tokenizer, write_rows

REPOSITORY = Path(__file__).resolve().parent.parent
# Its tests need the interpreter of `make test-emulated`.
collect_ignore = [] if "tests.emulated_cuda.start" in sys.modules else ["emulated_cuda"]


def _part(text: str) -> tuple[int, int]:
    """What ``--matrix`` asks for: a part, and how many parts there are; of no parts none is run."""
    if text in (named := {"quick": (0, 0), "full": (0, 1)}):
        return named[text]
    number, _, parts = text.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and int(number) < int(parts)):
        raise argparse.ArgumentTypeError(f"must be quick, full or N/M with N from 0 to M - 1, got {text!r}")
    return int(number), int(parts)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--matrix",
        default="quick",
        type=_part,
        metavar="quick|full|N/M",
        help="which of the combinations marked full to run: none (quick), all (full), or the Nth of M equal parts, from 0",
    )
    parser.addoption(
        "--part", default="full", type=_part, metavar="N/M", help="run only the Nth of M equal parts of the tests, from 0"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose the device, before a test asks for it: the GPU only if just tests/gpu and tests/emulated_cuda run.

    Megatron-core and transformers are imported while tests are collected, with nothing among it to be freed.
    """
    config.pluginmanager.register(messages)
    named = [config.invocation_params.dir / name.split("::")[0] for name in config.args]
    on_gpu = [REPOSITORY / "tests" / folder for folder in ("gpu", "emulated_cuda")]
    if not all(any(path.resolve().is_relative_to(folder) for folder in on_gpu) for path in named):
        device.force_cpu()
    # In the background or under nohup a shell ignores these, and so would every program that a test starts and ends.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    gc.disable()


def pytest_collection_finish() -> None:
    """Enable garbage collection for objects that the tests create."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what --matrix and --part do not ask for; the names of the tests decide their parts."""
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        chosen = [config.getoption("--part"), *([config.getoption("--matrix")] if item.get_closest_marker("full") else [])]
        runs = all(parts and zlib.crc32(item.nodeid.encode()) % parts == number for number, parts in chosen)
        (kept if runs else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


@pytest.fixture(scope="session", autouse=True)
def one_trial() -> Iterator[None]:
    """The process that tries models is started once, and not by each test that opens one; it and others are forked."""
    from nemo_kto.data.tokens import workers
    from nemo_kto.tools.inference import named_models, opening

    start = workers.BoundedProcess.start

    def fork(self: workers.BoundedProcess) -> None:
        ensure_forkserver()
        start(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "_START_METHOD", "forkserver")
        patch.setattr(workers.BoundedProcess, "start", fork)
        patch.setattr(named_models, "trial", SimpleNamespace(start=opening.trial.start, close=lambda: 0))
        yield
    opening.trial.close()


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    """Restore the logging configuration that a command changes."""
    handlers, form, level = logging.root.handlers[:], warnings.formatwarning, logging.getLogger("nemo_kto").level
    yield
    logging.captureWarnings(False)
    logging.root.handlers[:], warnings.formatwarning = handlers, form
    logging.getLogger("nemo_kto").setLevel(level)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_checkpoint(family, **changes) -> folder``; the same call gives the same folder."""
    made: dict[str, Path] = {}

    def get(family: str, **changes: Any) -> Path:
        key = f"{family}{sorted(changes.items())}"
        if key not in made:
            made[key] = make_checkpoint(tmp_path_factory.mktemp(family), family, **changes)
        return made[key]

    return get


@pytest.fixture(scope="session")
def tiny_llama(tiny_checkpoint: Callable[..., Path]) -> Path:
    """Folder of a llama of two layers of random weights: untied embeddings, grouped heads, rope theta 1e5."""
    return tiny_checkpoint("llama", num_hidden_layers=2)


@pytest.fixture(scope="session")
def deep_llama(tiny_checkpoint: Callable[..., Path]) -> Path:
    """The same with four layers, which virtual pipeline stages need."""
    return tiny_checkpoint("llama")


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with only the byte-level ChatML tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def kto_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A jsonl file of 96 unpaired rows."""
    return write_rows(tmp_path_factory.mktemp("rows") / "kto.jsonl", make_rows(96))


@pytest.fixture(scope="session")
def dpo_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A jsonl file of 96 pairs."""
    return write_rows(tmp_path_factory.mktemp("pairs") / "dpo.jsonl", make_pairs(96))


def load_script(path: str) -> ModuleType:
    """Import a file of the repository outside of packages, such as ``examples/quickstart/prepare.py``."""
    file = REPOSITORY / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of the real SmolLM2-135M-Instruct, prepared as the quickstart prepares it (about a minute, once a machine)."""
    prepare = load_script("examples/quickstart/prepare.py")
    try:
        return Path(prepare.prepare_model(prepare.default_cache()))
    except prepare.PackageMissing as error:
        pytest.skip(str(error))
