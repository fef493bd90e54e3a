"""Rules of the layout: mixture-of-experts models, and pipelines whose size does not divide the layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_kto.config.resolved import ResolvedRun
from tests.helpers.messages import Message, raises
from tests.helpers.tiny_models import write_stub_model
from tests.unit.conftest import FindErrors, Load

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "intermediate_size": 7}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": ("GptOssForCausalLM", {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 12}),
    "llama": ("LlamaForCausalLM", {}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 12}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", EXPERTS),
    "half_dense": (
        "Qwen3MoeForCausalLM",
        {**EXPERTS, "model_type": "qwen3_moe", "num_hidden_layers": 4, "mlp_only_layers": [0, 1]},
    ),
    "every_other": (
        "Qwen3MoeForCausalLM",
        {**EXPERTS, "model_type": "qwen3_moe", "num_hidden_layers": 4, "decoder_sparse_step": 2},
    ),
}
FAMILIES["llama4_text"] = (
    "Llama4ForCausalLM",
    {"num_local_experts": 6, "intermediate_size": 12, "num_hidden_layers": 4, "interleave_moe_layer_step": 4},
)
FAMILIES["llama4_last_two"] = (
    "Llama4ForCausalLM",
    {**FAMILIES["llama4_text"][1], "model_type": "llama4_text", "moe_layers": [2, 3]},
)
FAMILIES["deepseek_v3"] = ("DeepseekV3ForCausalLM", {"n_routed_experts": 6, "q_lora_rank": 4, "num_hidden_layers": 4})
KEY, SHARDS = "model.expert_model_parallel_size", "model.expert_tensor_parallel_size"
INSTANCES = "model.optim.num_distributed_optimizer_instances"
TENSOR, SEQUENCE = "model.tensor_model_parallel_size", "model.sequence_parallel"
LORA, TARGETS = "model.peft.peft_scheme=lora", "model.peft.lora_tuning.target_modules"
DORA, SELECTED = "model.peft.lora_tuning.dora", "model.peft.lora_tuning.layer_selection"
BATCH = "model.global_batch_size=16"
ONE_BY_ONE = "model.micro_batch_size=1"


def model(folder: Path, name: str, **changes: object) -> Path:
    architecture, config = FAMILIES[name]
    write_stub_model(folder)
    config = {"architectures": [architecture], "model_type": name, **config, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("family", "overrides", "ranks"),
    [
        ("mixtral", [f"{KEY}=2", "model.moe_aux_loss_coeff=0.01"], 2),
        ("gpt_oss", [LORA, f"{TARGETS}=[attention]", f"{DORA}=true", f"{KEY}=2"], 2),
        ("qwen3_moe", [f"{TENSOR}=2", f"{SEQUENCE}=true", f"{KEY}=2", f"{SHARDS}=1"], 2),
        ("qwen3_moe", [LORA, f"{TARGETS}=[attention]", f"{TENSOR}=2", f"{SEQUENCE}=true"], 2),
        ("mixtral", [LORA, f"{TARGETS}=[all,mlp]", f"{TENSOR}=2", f"{SEQUENCE}=true", f"{SHARDS}=1", f"{KEY}=2"], 2),
        # which leaves the experts out, so that they may be sharded, and on some stages only
        ("mixtral", [LORA, f"{TENSOR}=2", f"{SEQUENCE}=true"], 2),
        ("half_dense", [LORA, f"{TARGETS}=[all]", "model.pipeline_model_parallel_size=2"], 2),
        ("qwen3_moe", [LORA, f"{TARGETS}=[mlp_fc2]"], 1),
        ("gpt_oss", [LORA], 1),
        ("gpt_oss", [LORA, f"{DORA}=true", f"{TARGETS}=all-linear"], 1),
        # whose experts have no adapters
        ("llama4_text", [LORA, f"{TARGETS}=[all]", f"{TENSOR}=2", f"{SEQUENCE}=true"], 2),
        ("llama4_text", [LORA, f"{TARGETS}=[gate_proj]", f"{DORA}=true"], 1),
        ("llama4_text", [LORA, f"{TARGETS}=[all]", "model.pipeline_model_parallel_size=2"], 2),
        ("qwen3_moe", [LORA, f"{TARGETS}=[attention]", f"{DORA}=true"], 1),
        ("deepseek_v3", [LORA, f"{TARGETS}=[attention_qkv,attention_dense]"], 1),
        ("deepseek_v3", [LORA, f"{TARGETS}=[q_a_proj,kv_b_proj]"], 1),
        ("half_dense", [LORA, f"{TARGETS}=[attention]", "model.pipeline_model_parallel_size=2"], 2),
        ("every_other", [LORA, f"{TARGETS}=[mlp]", "model.pipeline_model_parallel_size=2"], 2),
        ("half_dense", ["model.pipeline_model_parallel_size=2", "model.num_layers_in_first_pipeline_stage=3"], 2),
        ("half_dense", ["model.pipeline_model_parallel_size=2", "model.virtual_pipeline_model_parallel_size=2"], 2),
    ],
)
def test_valid_gpu_settings_give_no_error(
    find_errors: FindErrors, tmp_path: Path, family: str, overrides: list[str], ranks: int
) -> None:
    folder = model(tmp_path / "mixture", family)
    given = [f"pretrained_checkpoint.restore_from_path={folder}", BATCH, ONE_BY_ONE, *overrides]
    assert find_errors(*given, ranks=ranks) == []


@pytest.mark.parametrize(
    ("family", "targets", "experts"),
    [
        ("qwen3_moe", "[all-linear]", False),
        ("qwen3_moe", "[all,attention]", False),
        ("qwen3_moe", "[all-linear,mlp]", True),
        ("qwen3_moe", "[mlp_fc2]", True),
        ("llama", "[all-linear]", True),  # without experts the settings are those of earlier versions
        ("gpt_oss", "[all-linear]", True),
    ],
)
def test_all_linear_leaves_experts_out(family: str, targets: str, experts: bool, tmp_path: Path, load: Load) -> None:
    folder = model(tmp_path / "mixture", family)
    run = ResolvedRun.of(load(f"pretrained_checkpoint.restore_from_path={folder}", LORA, f"{TARGETS}={targets}"))
    assert run.adapters is not None
    assert run.adapters.experts == experts


def test_queries_of_latent_attention_have_other_projections(find_errors: FindErrors, tmp_path: Path) -> None:
    """They are projected from latents, or with q_lora_rank null from hidden states."""
    for rank, lacks, has in ((4, "q_proj", "q_a_proj, q_b_proj"), (None, "q_b_proj", "q_proj")):
        folder = model(tmp_path / lacks, "deepseek_v3", q_lora_rank=rank)
        given = [f"pretrained_checkpoint.restore_from_path={folder}", BATCH, ONE_BY_ONE, LORA, f"{TARGETS}=[{lacks}]"]
        (error,) = find_errors(*given, ranks=1)
        assert error == Message(TARGETS, "deepseek_v3", f"got {lacks}", has, "kv_b_proj", "none")
    (error,) = find_errors(*given[:-1], f"{TARGETS}=[k_proj]", ranks=1)
    assert error == Message(TARGETS, "deepseek_v3", "got k_proj", "none")


@pytest.mark.parametrize(
    ("family", "changes", "names"),
    [
        ("mixtral", {"num_experts_per_tok": 7}, ["num_experts_per_tok", "number", "6", "7"]),
        ("gpt_oss", {"num_experts_per_tok": 1}, ["num_experts_per_tok", "2"]),
        ("mixtral", {"num_experts_per_tok": 1}, ["num_experts_per_tok", "2"]),
        ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": True}, ["num_experts_per_tok", "2"]),
        ("qwen3_moe", {"mlp_only_layers": [-1]}, ["mlp_only_layers", "list", "0", "[-1]"]),
        ("qwen3_moe", {"decoder_sparse_step": 0}, ["decoder_sparse_step", "integer", "1"]),
        ("qwen3_moe", {"num_experts": 0}, ["num_experts", "integer", "1", "10000", "0"]),
    ],
)
def test_invalid_gpu_settings(tmp_path: Path, family: str, changes: dict[str, object], names: list[str]) -> None:
    from nemo_kto.architecture.config_file import read_config_file
    from nemo_kto.errors import UserError

    with raises(UserError, "config.json", *names):
        read_config_file(model(tmp_path / "mixture", family, **changes))
    one = {"num_experts_per_tok": 1, "norm_topk_prob": False, "mlp_only_layers": None}
    read_config_file(model(tmp_path / "right", "qwen3_moe", **one))


STAGES, CHUNKS = "model.pipeline_model_parallel_size", "model.virtual_pipeline_model_parallel_size"
FIRST, LAST = (f"model.num_layers_in_{end}_pipeline_stage" for end in ("first", "last"))
EMBEDDING, LOSS = (f"model.account_for_{part}_in_pipeline_split" for part in ("embedding", "loss"))
FULL = [f"model.activations_checkpoint_{key}" for key in ("granularity=full", "method=uniform")]
GROUP = "model.activations_checkpoint_num_layers"


def layers(folder: Path, number: int) -> str:
    """Set the model's number of layers. Returns its folder."""
    file = folder / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_hidden_layers": number}))
    return str(folder / "model")


@pytest.mark.parametrize(
    ("number", "overrides", "expected"),
    [
        (5, [f"{STAGES}=2"], Message(STAGES, "5", "MODEL", "2", "1", f"{LAST}=2")),
        (9, [f"{STAGES}=8"], Message(STAGES, "9", "MODEL", "8", "3", f"{LAST}=2")),
        (3, [f"{STAGES}=4"], Message(STAGES, "3", "MODEL", "4", "use")),
        (6, [f"{STAGES}=3", f"{LOSS}=true"], Message(STAGES, "6", "MODEL", "3", f"{LOSS}=false")),
        (8, [f"{STAGES}=4", f"{EMBEDDING}=true", f"{LOSS}=true"], Message(STAGES, "8", "MODEL", "4", "2")),
        (24, [f"{STAGES}=4", f"{CHUNKS}=4"], Message(CHUNKS, "6", "24", "MODEL", "4", "3")),
        (4, [f"{STAGES}=4", f"{CHUNKS}=2"], Message(CHUNKS, "1", "4", "MODEL", "2", "null")),
        (14, [f"{STAGES}=4", f"{CHUNKS}=2", f"{FIRST}=3"], Message(FIRST, "14", "MODEL", "3", "2", "8")),
        (32, [f"{STAGES}=4", f"{FIRST}=7", f"{LAST}=6"], Message(FIRST, "32", "MODEL", "7", "6", "8")),
        (32, [f"{STAGES}=4", f"{LAST}=30"], Message(LAST, "32", "MODEL", "30", "29")),
        (5, [f"{STAGES}=2", f"{FIRST}=1", f"{LAST}=3"], Message(FIRST, "3", "last", "5", "MODEL", "1", "2")),
        (7, [f"{STAGES}=2", f"{CHUNKS}=3", f"{FIRST}=4"], Message(CHUNKS, "3", "4", "7", "MODEL", "null")),
        (4, [*FULL, f"{GROUP}=3"], Message(GROUP, "4", "3", "2")),
        (8, [f"{STAGES}=2", f"{CHUNKS}=2", *FULL, f"{GROUP}=4"], Message(GROUP, "2", "4", "use")),
        (5, [f"{STAGES}=2", f"{LAST}=2", *FULL, f"{GROUP}=2"], Message(GROUP, "2", "3", "1")),
    ],
)
def test_uneven_layers_that_are_refused(
    find_errors: FindErrors, tmp_path: Path, number: int, overrides: list[str], expected: str
) -> None:
    model = layers(tmp_path, number)
    assert find_errors(*overrides, ranks=8 if f"{STAGES}=3" not in overrides else 6, torchrun=True)[-1:] == [
        expected.replace("MODEL", model)
    ]


@pytest.mark.parametrize(
    ("number", "overrides"),
    [
        (5, [f"{STAGES}=2", f"{LAST}=2"]),
        (6, [f"{STAGES}=4", f"{EMBEDDING}=true", f"{LOSS}=true"]),
        (14, [f"{STAGES}=4", f"{CHUNKS}=2", f"{FIRST}=2", f"{LAST}=4"]),
        (12, [f"{STAGES}=2", f"{CHUNKS}=3", *FULL, f"{GROUP}=2"]),
    ],
)
def test_uneven_layers_that_are_accepted(find_errors: FindErrors, tmp_path: Path, number: int, overrides: list[str]) -> None:
    layers(tmp_path, number)
    assert find_errors(*overrides, ranks=4) == []


def test_impossible_pipeline_sizes(find_errors: FindErrors) -> None:
    assert find_errors(f"{STAGES}=2", f"{CHUNKS}=1", f"{FIRST}=0", ranks=2) == [
        Message(CHUNKS, "2", "1", "null"),
        Message(FIRST, "1", "0"),
    ]
