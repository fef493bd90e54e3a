"""An installed Transformer Engine that cannot be imported gives a message, not megatron-core's traceback."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nemo_kto.config.rules.layout_rules import check_transformer_engine
from nemo_kto.device import device
from nemo_kto.errors import UserError
from tests.helpers.commands import environment, run
from tests.helpers.messages import Message

# As transformer_engine/common/__init__.py of 2.20 raises it where only the package without CUDA and torch is installed.
EMPTY = """
raise RuntimeError(
    "Found empty `transformer-engine` meta package installed. Install `transformer-engine` with framework extensions via"
    "'pip3 install --no-build-isolation transformer-engine[pytorch,jax]==VERSION'"
)
"""
SAID = (
    "Transformer Engine",
    "RuntimeError: Found empty `transformer-engine` meta package installed",
    "pip uninstall transformer-engine",
    "pip install --no-build-isolation 'nemo-kto[gpu]'",
)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The package's __init__.py in a separate folder."""
    folder = tmp_path / "modules" / "transformer_engine"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(EMPTY)
    return folder / "__init__.py"


def test_an_empty_package_on_a_gpu(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    monkeypatch.syspath_prepend(package.parents[1])
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)  # megatron-core's import marks it as absent
    with pytest.raises(UserError) as error:
        check_transformer_engine()
    assert str(error.value) == Message(*SAID)
    package.write_text("raise ImportError('libtransformer_engine.so: cannot open shared object file')")
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    check_transformer_engine()


def test_an_empty_package_does_no_harm_on_the_cpu(package: Path, tmp_path: Path) -> None:
    """megatron-core would show its traceback."""
    code = "import nemo_kto.models.gpt; from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE; print(HAVE_TE)"
    done = run([sys.executable, "-c", code], cwd=tmp_path, env=environment(package.parents[1]))
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
