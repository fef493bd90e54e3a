"""Rules of mixture-of-experts models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.messages import Message, raises
from tests.helpers.tiny_models import write_stub_model
from tests.unit.conftest import FindErrors

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


BROKEN = [
    ("llama", [f"{KEY}=2"], 2, [Message(KEY, "1", "2", "MODEL", "leave")]),
    (
        "llama",
        [f"{SHARDS}=1", "model.moe_aux_loss_coeff=0.1"],
        1,
        [
            Message(SHARDS, "null", "1", "MODEL", "leave"),
            Message("model.moe_aux_loss_coeff", "0.0", "0.1", "MODEL", "leave"),
        ],
    ),
    (
        "qwen3_moe",
        [LORA, f"{TARGETS}=[attention,down_proj]", f"{DORA}=true"],
        1,
        [Message(DORA, "false", "adapters", "peft", "true", "attention")],
    ),
    (
        "gpt_oss",
        [LORA, f"{TARGETS}=[q_proj,mlp_fc1,down_proj]"],
        1,
        [
            Message(
                TARGETS,
                "gpt_oss",
                "mlp_fc1",
                "down_proj",
                "q_proj",
                "k_proj",
                "v_proj",
                "o_proj",
                "model.peft.peft_scheme=none",
            )
        ],
    ),
    ("mixtral", [f"{KEY}=4"], 4, [Message(KEY, "6", "MODEL", "4", "3")]),
    ("mixtral", [f"{KEY}=2", f"{INSTANCES}=4"], 4, [Message(INSTANCES, "experts", "2", "4", "2")]),
    (
        "qwen3_moe",
        [f"{KEY}=4", f"{SHARDS}=1", "model.pipeline_model_parallel_size=2"],
        4,
        [
            Message(KEY, "6", "MODEL", "4", "3"),
            Message(KEY, "expert_tensor_parallel_size", "4", "1", "2", "trainer.devices"),
        ],
    ),
    (
        "qwen3_moe",
        [f"{TENSOR}=8", f"{SEQUENCE}=true"],
        8,
        [Message(TENSOR, "moe_intermediate_size", "12", "MODEL", "8", f"{SHARDS}=6")],
    ),
    ("mixtral", [f"{TENSOR}=2"], 2, [Message(SEQUENCE, "true", TENSOR, "2", "false", "set")]),
    (
        "qwen3_moe",
        [LORA, f"{TARGETS}=[attention_qkv,gate_proj]"],
        1,
        [Message(TARGETS, "gate_proj", "up_proj", "attention_qkv", "peft", "mlp_fc1")],
    ),
    (
        "mixtral",
        [LORA, f"{TARGETS}=[all]", f"{TENSOR}=2", f"{SEQUENCE}=true"],
        2,
        [Message(SHARDS, "1", "adapters", "gate_proj", "up_proj", "down_proj", "2", "only", f"{TARGETS}=[attention]")],
    ),
    (
        "every_other",
        [LORA, f"{TARGETS}=[mlp]", f"{SELECTED}=[1,2,3]", "model.pipeline_model_parallel_size=2"],
        2,
        [Message("model.pipeline_model_parallel_size", "2", "none", "use")],
    ),
    (
        "half_dense",
        ["model.pipeline_model_parallel_size=2"],
        2,
        [Message("model.pipeline_model_parallel_size", "2", "none", "1", "use")],
    ),
    *(
        (
            family,
            ["model.pipeline_model_parallel_size=2"],
            2,
            [Message("model.pipeline_model_parallel_size", "2", "none", "1", "use")],
        )
        for family in ("llama4_text", "llama4_last_two")
    ),
    ("mixtral", ["model.moe_aux_loss_coeff=-1"], 1, [Message("model.moe_aux_loss_coeff", "0", "-1", "0.0")]),
]


@pytest.mark.parametrize(("family", "overrides", "ranks", "texts"), BROKEN, ids=lambda value: str(value)[:60])
def test_violated_rules(
    find_errors: FindErrors, tmp_path: Path, family: str, overrides: list[str], ranks: int, texts: list[str]
) -> None:
    folder = model(tmp_path / "mixture", family)
    given = [f"pretrained_checkpoint.restore_from_path={folder}", BATCH, ONE_BY_ONE, *overrides]
    assert find_errors(*given, ranks=ranks) == [text.replace("MODEL", str(folder)) for text in texts]


@pytest.mark.parametrize(
    ("family", "overrides", "ranks"),
    [
        ("mixtral", [f"{KEY}=2", "model.moe_aux_loss_coeff=0.01"], 2),
        ("gpt_oss", [LORA, f"{TARGETS}=[attention]", f"{DORA}=true", f"{KEY}=2"], 2),
        ("qwen3_moe", [f"{TENSOR}=2", f"{SEQUENCE}=true", f"{KEY}=2", f"{SHARDS}=1"], 2),
        ("qwen3_moe", [LORA, f"{TARGETS}=[attention]", f"{TENSOR}=2", f"{SEQUENCE}=true"], 2),
        ("mixtral", [LORA, f"{TARGETS}=[all]", f"{TENSOR}=2", f"{SEQUENCE}=true", f"{SHARDS}=1", f"{KEY}=2"], 2),
        ("qwen3_moe", [LORA, f"{TARGETS}=[mlp_fc2]"], 1),
        ("gpt_oss", [LORA], 1),
        ("gpt_oss", [LORA, f"{DORA}=true", f"{TARGETS}=all-linear"], 1),
        # whose experts have no adapters
        ("llama4_text", [LORA, f"{TARGETS}=[all]", f"{TENSOR}=2", f"{SEQUENCE}=true"], 2),
        ("llama4_text", [LORA, f"{TARGETS}=[gate_proj]", f"{DORA}=true"], 1),
        ("llama4_text", [LORA, f"{TARGETS}=[all]", "model.pipeline_model_parallel_size=2"], 2),
        ("qwen3_moe", [LORA, f"{TARGETS}=[attention]", f"{DORA}=true"], 1),
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
