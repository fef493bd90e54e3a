"""What only some GPUs can do: what is said where it is asked for and cannot be done."""

from __future__ import annotations

import importlib.metadata
from typing import NamedTuple

import pytest

from nemo_kto.errors import UserError
from nemo_kto.launch import plan
from nemo_kto.launch.packages import transformer_engine_version
from nemo_kto.launch.rules_gpu import Computes, check_gpu, gpu_rules
from nemo_kto.parallel import device
from tests.unit.launch.conftest import Load, Said

CPU = Computes(on_gpu=False, engine=None)
GPU = Computes(on_gpu=True, engine=(2, 9))
BARE = Computes(on_gpu=True, engine=None)
OLD = Computes(on_gpu=True, engine=(2, 1))
INSTALL = "install transformer-engine[pytorch] (docs/gpu/README.md)"
SHARDED = "model.optim.use_distributed_optimizer"


class Asked(NamedTuple):
    """An override, its key, and how a refusal begins and what it found."""

    override: str
    key: str
    off: str
    got: str

    def refused(self, where: str, remedy: str) -> str:
        return f"{self.key} must be {self.off} {where}, got {self.got}; {remedy}"


ASKED = [
    Asked("model.optim.moments_dtype=bf16", "model.optim.moments_dtype", "fp32", "bf16"),
    Asked("model.optim.offload_fraction=0.5", "model.optim.offload_fraction", "0", "0.5"),
]


@pytest.fixture(params=ASKED, ids=lambda each: each.key)
def asked(request: pytest.FixtureRequest) -> Asked:
    found: Asked = request.param
    return found


@pytest.mark.parametrize(
    ("overrides", "computes", "where", "remedy"),
    [
        ([], GPU, None, None),
        ([], None, None, None),
        (["trainer.precision=bf16"], GPU, None, None),
        ([], CPU, "on the CPU", "use a GPU, or leave it out"),
        (["trainer.precision=32"], CPU, "on the CPU", "use a GPU, or leave it out"),
        (["trainer.precision=fp32"], GPU, "with trainer.precision=32", "use trainer.precision=bf16, on a GPU that has it"),
        (["trainer.precision=32"], None, "with trainer.precision=32", "use trainer.precision=bf16, on a GPU that has it"),
        ([f"{SHARDED}=false"], GPU, f"with {SHARDED}=false", f"set {SHARDED}=true"),
        ([], BARE, "without Transformer Engine 2.3 or newer (here: none)", INSTALL),
        ([], OLD, "without Transformer Engine 2.3 or newer (here: 2.1)", INSTALL),
    ],
)
def test_one_line_each(
    asked: Asked, overrides: list[str], computes: Computes | None, where: str | None, remedy: str | None, load: Load
) -> None:
    found = [str(mistake) for mistake in gpu_rules(load(asked.override, *overrides), computes)]
    assert found == ([] if where is None or remedy is None else [asked.refused(where, remedy)])


def test_what_is_on_the_host_is_in_fp32(load: Load) -> None:
    cfg = load("model.optim.moments_dtype=bf16", "model.optim.offload_fraction=1")
    told = "model.optim.moments_dtype must be fp32 with model.optim.offload_fraction above 0, got bf16; set one or the other"
    assert [str(mistake) for mistake in gpu_rules(cfg, GPU)] == [told]


def test_nothing_is_said_of_defaults(load: Load) -> None:
    assert list(gpu_rules(load("trainer.precision=32", f"{SHARDED}=false"), CPU)) == []


def test_a_command_line_a_rank_and_a_plan_are_refused(
    asked: Asked, said: Said, load: Load, good: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = asked.refused("on the CPU", "use a GPU, or leave it out")
    assert said(asked.override) == [line]
    with pytest.raises(UserError) as of_rank:
        check_gpu(load(asked.override))
    assert str(of_rank.value) == f"nothing was started:\n  {line}"
    with pytest.raises(UserError) as of_plan:
        plan.main(["kto", *good, asked.override])
    assert str(of_plan.value) == f"nothing can be planned:\n  {line}"
    monkeypatch.setattr(device, "device_count", lambda: 1)
    without = asked.refused("without Transformer Engine 2.3 or newer (here: none)", INSTALL)
    assert said("trainer.accelerator=gpu", asked.override) == [without]


@pytest.mark.parametrize(("text", "version"), [("2.9.0+cu12", (2, 9)), ("1.13.0", (1, 13)), ("unknown", None)])
def test_the_version_of_transformer_engine(
    text: str, version: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert transformer_engine_version() is None, "it is not installed where these tests run"
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"transformer-engine": text}[name])
    assert transformer_engine_version() == version
