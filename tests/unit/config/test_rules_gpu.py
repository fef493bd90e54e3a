"""Rules of features that only some GPUs support."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import NamedTuple

import pytest

from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.config.rules.layout_rules import Computes, check_gpu, gpu_rules, model_gpu_rules
from nemo_kto.device import device, environment
from nemo_kto.errors import UserError
from nemo_kto.tools.plan import plan_command as plan
from tests.helpers.messages import Message, raises
from tests.helpers.tiny_models import make_checkpoint
from tests.unit.conftest import FindErrors, Load
from tests.unit.device.test_kernels import RICH, gpu

CPU = Computes(on_gpu=False, engine=None)
GPU = Computes(on_gpu=True, engine=(2, 9))
BARE = Computes(on_gpu=True, engine=None)
OLD = Computes(on_gpu=True, engine=(2, 1))
INSTALL = ("transformer-engine[pytorch]", "docs/gpu/transformer-engine.md")
SHARDED = "model.optim.use_distributed_optimizer"
HOPPER = Computes(on_gpu=True, engine=(2, 9), capability=(9, 0))


class GpuSetting(NamedTuple):
    """An override, its key, the value without it, its own value, and what it needs."""

    override: str
    key: str
    off: str
    got: str
    need: str | None = None  # what it needs beside a GPU and bf16, as an error names it

    def refused(self, *names: str) -> Message:
        return Message(self.key, self.off, self.got, *names)


GPU_SETTINGS = [
    GpuSetting("model.optim.offload_fraction=0.5", "model.optim.offload_fraction", "0", "0.5", need=f"{SHARDED}=false"),
    GpuSetting("model.fp8=hybrid", "model.fp8", "null", "hybrid", need="2.3"),
    GpuSetting("model.logprob_gradient_summands=2", "model.logprob_gradient_summands", "1", "2"),
]


@pytest.fixture(params=GPU_SETTINGS, ids=lambda each: each.key)
def setting(request: pytest.FixtureRequest) -> GpuSetting:
    found: GpuSetting = request.param
    return found


@pytest.mark.parametrize(
    ("overrides", "computes", "names"),
    [
        ([], GPU, None),
        ([], None, None),
        (["trainer.precision=bf16"], GPU, None),
        ([], CPU, ["CPU", "GPU", "leave"]),
        (["trainer.precision=32"], CPU, ["CPU", "GPU", "leave"]),
        (["trainer.precision=fp32"], GPU, ["trainer.precision=32", "trainer.precision=bf16", "GPU"]),
        (["trainer.precision=32"], None, ["trainer.precision=32", "trainer.precision=bf16", "GPU"]),
        ([f"{SHARDED}=false"], GPU, [f"{SHARDED}=false", f"{SHARDED}=true"]),
        ([], BARE, ["2.3", "none", *INSTALL]),
        ([], OLD, ["2.3", "2.1", *INSTALL]),
    ],
)
def test_one_error_per_setting(
    setting: GpuSetting, overrides: list[str], computes: Computes | None, names: list[str] | None, load: Load
) -> None:
    found = [str(mistake) for mistake in gpu_rules(ResolvedRun.of(load(setting.override, *overrides)), computes)]
    other_needs = {"2.3", f"{SHARDED}=false"} - {setting.need}
    nothing = names is None or not other_needs.isdisjoint(names)
    assert found == ([] if nothing else [setting.refused(*(names or ()))])


def test_moments_in_bf16_need_the_distributed_optimizer(load: Load) -> None:
    moments = "model.optim.moments_dtype"
    found = [str(each) for each in gpu_rules(ResolvedRun.of(load(f"{moments}=bf16", f"{SHARDED}=false")), BARE)]
    assert found == [Message(moments, "fp32", f"{SHARDED}=false", "bf16", f"{SHARDED}=true")]


@pytest.mark.parametrize(("precision", "refused"), [("bf16", False), ("auto", False), ("fp32", True)])
def test_gradients_of_a_model_in_fp32_are_not_summed_in_bf16(precision: str, refused: bool, load: Load) -> None:
    reduce = "model.optim.grad_reduce_in_fp32"
    found = [str(each) for each in gpu_rules(ResolvedRun.of(load(f"{reduce}=false", f"trainer.precision={precision}")), CPU)]
    assert found == [Message(reduce, "true", "trainer.precision=32", "false", "trainer.precision=bf16")] * refused


@pytest.mark.parametrize(("capability", "refused"), [((8, 0), True), ((8, 9), False), ((9, 0), False), ((10, 0), False)])
def test_gpus_with_fp8(capability: tuple[int, int], refused: bool, load: Load) -> None:
    computes = Computes(on_gpu=True, engine=(2, 9), capability=capability)
    expected = Message("model.fp8", "null", "GPU", "8.0", "e4m3", "8.9", "leave")
    assert [str(mistake) for mistake in gpu_rules(ResolvedRun.of(load("model.fp8=e4m3")), computes)] == [expected] * refused
    assert list(gpu_rules(ResolvedRun.of(load("model.optim.moments_dtype=bf16")), computes)) == []


def test_sizes_supported_in_fp8(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight heads of eight in four groups, MLPs 96 wide: two ranks have 48 of them, and four have 24."""
    model = make_checkpoint(tmp_path / "small", "llama", intermediate_size=96)
    base = ("model.fp8=hybrid", f"pretrained_checkpoint.restore_from_path={model}")
    tensor = "model.tensor_model_parallel_size={}"
    assert list(model_gpu_rules(ResolvedRun.of(load(*base, tensor.format(2))), HOPPER)) == []
    weight = "decoder.layers.0.mlp.linear_fc2.weight"
    expected = Message("model.fp8", "null", "16", "hybrid", weight, "64 x 24", "model.tensor_model_parallel_size", "4")
    assert [str(mistake) for mistake in model_gpu_rules(ResolvedRun.of(load(*base, tensor.format(4))), HOPPER)] == [expected]
    with pytest.raises(UserError) as error:
        plan.main(["kto", *base, tensor.format(4), "--gpus", "4"])
    assert str(error.value) == expected
    assert plan.main(["kto", *base, tensor.format(2), "--gpus", "2"]) == 0
    assert "precision        bf16, fp8 hybrid" in capsys.readouterr().out
    with raises(UserError, "GPU", "8.0"):
        plan.main(["kto", *base, tensor.format(2), "--gpus", "2", "--gpu", "a100"])
    gpu(monkeypatch, **RICH)  # type: ignore[arg-type]
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.9.0")
    check_gpu(ResolvedRun.of(load(*base, tensor.format(2))))
    with pytest.raises(UserError) as error:
        check_gpu(ResolvedRun.of(load(*base, tensor.format(4))))
    assert str(error.value) == expected


@pytest.mark.parametrize("computes", [HOPPER, BARE, CPU])
@pytest.mark.parametrize(
    ("family", "overrides"), [("mistral", ()), ("mistral", ("model.data.packing=true",)), ("gpt_oss", ())]
)
def test_shared_prompts_are_supported_by_all_layers(
    family: str, overrides: tuple[str, ...], computes: Computes, load: Load, tmp_path: Path
) -> None:
    """Transformer Engine's, with windows too, and those of a model with sinks, which it has no layers for."""
    model = make_checkpoint(tmp_path / "model", family, sliding_window=16)
    given = f"pretrained_checkpoint.restore_from_path={model}", "model.data.share_prompts=true"
    assert list(model_gpu_rules(ResolvedRun.of(load(*given, *overrides)), computes)) == []


def test_a_rank_checks_its_installed_packages(setting: GpuSetting, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.9.0")
    gpu(monkeypatch, **RICH | {"te": False})  # type: ignore[arg-type]
    run = ResolvedRun.of(load(setting.override))
    if setting.need != "2.3":
        check_gpu(run)
        return
    with pytest.raises(UserError) as error:
        check_gpu(run)
    assert str(error.value) == setting.refused("2.3", "none", *INSTALL)


def test_defaults_give_no_error(load: Load) -> None:
    assert list(gpu_rules(ResolvedRun.of(load("trainer.precision=32", f"{SHARDED}=false")), CPU)) == []


def test_errors_on_the_command_line_on_a_rank_and_in_a_plan(
    setting: GpuSetting, find_errors: FindErrors, load: Load, good: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = setting.refused("CPU", "GPU", "leave")
    assert find_errors(setting.override) == [line]
    with pytest.raises(UserError) as of_rank:
        check_gpu(ResolvedRun.of(load(setting.override)))
    assert str(of_rank.value) == line
    with pytest.raises(UserError) as of_plan:
        plan.main(["kto", *good, setting.override])
    assert str(of_plan.value) == line
    monkeypatch.setattr(device, "device_count", lambda: 1)
    without = [] if setting.need != "2.3" else [setting.refused("2.3", "none", *INSTALL)]
    assert find_errors("trainer.accelerator=gpu", setting.override) == without


def test_tensor_parallel_ranks_have_groups_of_heads(load: Load, tmp_path: Path) -> None:
    """Of a model with one group for all heads, as published Granites; attention divides its heads further."""
    model = make_checkpoint(tmp_path / "model", "granitemoehybrid", mamba_n_groups=1)
    attention = make_checkpoint(tmp_path / "attention", "granitemoehybrid", layer_types=["attention"] * 4)
    for folder, tensor, refused in ((model, 1, False), (model, 2, True), (attention, 2, False)):
        sizes = (f"model.tensor_model_parallel_size={tensor}", f"trainer.devices={tensor}")
        run = ResolvedRun.of(load(f"pretrained_checkpoint.restore_from_path={folder}", *sizes))
        expected = Message(
            *("model.tensor_model_parallel_size", "at most 1", "granitemoehybrid", "got 2", "use 1"),
            *("model.pipeline_model_parallel_size", "expert"),
        )
        assert [str(error) for error in model_gpu_rules(run, CPU)] == [expected] * refused


def test_context_parallel_ranks_divide_the_heads_of_delta_nets(load: Load, tmp_path: Path) -> None:
    given = f"pretrained_checkpoint.restore_from_path={make_checkpoint(tmp_path / 'model', 'qwen3_5_text')}"
    layouts = {(1, 2): "", (1, 4): "2 heads", (2, 2): "1 heads"}  # tensor- and context-parallel size: heads of a rank
    for (tensor, context), heads in layouts.items():
        sizes = (f"model.tensor_model_parallel_size={tensor}", f"model.context_parallel_size={context}")
        found = list(model_gpu_rules(ResolvedRun.of(load(given, *sizes, f"trainer.devices={tensor * context}")), CPU))
        expected = Message("model.context_parallel_size", "divide", f"the {heads}", "qwen3_5_text", f"got {context}", "use")
        assert [str(error) for error in found] == [expected] * bool(heads)


DRAWS = ("exp_manager.samples.count=1", "exp_manager.samples.temperature=0.7")


@pytest.mark.parametrize(
    ("family", "overrides", "variables", "computes", "expected"),
    [
        ("llama", (), {}, HOPPER, None),
        ("qwen3_moe", (), {}, BARE, None),  # torch and megatron-core have deterministic sums of the outputs of experts
        ("qwen3_5_text", (), {}, HOPPER, Message("trainer.deterministic", "false", "GPU", "true", "qwen3_5_text")),
        ("nemotron_h", (), {}, BARE, Message("trainer.deterministic", "false", "GPU", "true", "nemotron_h")),
        ("nemotron_h", (), {}, CPU, None),
        ("llama", DRAWS, {}, HOPPER, Message("exp_manager.samples.temperature", "0.0", "trainer.deterministic", "0.7")),
        ("llama", DRAWS[1:], {}, HOPPER, Message("exp_manager.samples.temperature", "0.0", "trainer.deterministic", "0.7")),
        ("llama", ("exp_manager.samples.count=0", *DRAWS[1:]), {}, HOPPER, None),  # no samples are taken
        ("llama", DRAWS, {}, CPU, None),
        ("llama", (), {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}, HOPPER, None),
        (
            "llama",
            (),
            {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"},
            HOPPER,
            Message("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0", "trainer.deterministic", "1", "unset"),
        ),
        (
            "llama",
            (),
            {"CUBLAS_WORKSPACE_CONFIG": ":0:0"},
            HOPPER,
            Message("CUBLAS_WORKSPACE_CONFIG", ":4096:8", ":16:8", "trainer.deterministic", ":0:0", "unset"),
        ),
    ],
)
def test_what_has_no_deterministic_kernel_on_a_gpu_is_refused(
    family: str,
    overrides: tuple[str, ...],
    variables: dict[str, str],
    computes: Computes,
    expected: Message | None,
    load: Load,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in environment.DETERMINISTIC:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    given = f"pretrained_checkpoint.restore_from_path={make_checkpoint(tmp_path / 'model', family)}", *overrides
    found = [str(each) for each in model_gpu_rules(ResolvedRun.of(load(*given, "trainer.deterministic=true")), computes)]
    assert found == ([] if expected is None else [expected])
    assert list(model_gpu_rules(ResolvedRun.of(load(*given)), computes)) == []


def test_a_base_that_cannot_be_quantized_is_refused_before_the_start(load: Load, tmp_path: Path) -> None:
    """Eight heads of eight: the output projection of a rank has 64 columns, and 32 on two ranks."""
    model, lora = make_checkpoint(tmp_path / "small", "llama"), "model.peft.peft_scheme=lora"
    other = make_checkpoint(tmp_path / "other", "llama", seed=1)
    base = ("model.quantize=nf4", f"pretrained_checkpoint.restore_from_path={model}")
    tensor, key = "model.tensor_model_parallel_size=2", "model.quantize"

    def found(*overrides: str) -> list[str]:
        return [str(mistake) for mistake in model_gpu_rules(ResolvedRun.of(load(*base, *overrides)), HOPPER)]

    assert found(lora) == []
    assert found() == [Message(key, "null", "all weights", "nf4", "model.peft.peft_scheme=lora")]
    weight = "model.layers.N.self_attn.o_proj.weight"
    assert found(lora, tensor) == [Message(key, "null", "nf4", "32", weight, "64", "another tensor-parallel size")]
    for mode in ("swap", "cached"):
        reference = (f"model.reference.restore_from_path={other}", f"model.reference.mode={mode}")
        assert found(lora, *reference) == [Message(key, "null", "another model", "nf4", str(other), "leave")]
    assert found(lora, f"model.reference.restore_from_path={model}") == []
    assert found(lora, "model.fp8=hybrid") == [Message("model.fp8", "quantized weights", "llama", "hybrid", "leave")]
    assert found(lora, "model.quantize=fp8") == [Message(key, "fp8", "64", "q_proj.weight", "128")]
