"""Llama 1 to 4, and models like Llama 3: SmolLM, Seed-OSS, Mistral, Mixtral, MiniMax M2, Phi 3 to 4, Apertus."""

from __future__ import annotations

from typing import Any

from tests.families.family import (
    NINE_HEADS,
    NO_TOKENS,
    SHORT,
    TP2,
    VISION,
    Activations,
    FamilyTests,
    KTOStep,
    Model,
    SharedPrompts,
    adapters,
    rope,
    yarn,
)

# fmt: off
_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 4.0, "low_freq_factor": 1.5, "high_freq_factor": 3.0,
    "original_max_position_embeddings": 16,
}
_LLAMA4: dict[str, Any] = {
    "head_dim": 8, "num_local_experts": 4, "attention_chunk_size": 7, "floor_scale": 5, "attn_scale": 0.4,
    "attn_temperature_tuning": True, "bos_token_id": None, "eos_token_id": None,
}
_LLAMA4_WIDTHS = ("vision_output_dim", "projector_input_dim", "projector_output_dim")
_TINY_LLAMA4: dict[str, Any] = {
    "intermediate_size": 48, "intermediate_size_mlp": 96, "num_local_experts": 8, "moe_layers": [0, 2, 3],
    "no_rope_layers": [1, 1, 0, 1], "attention_chunk_size": 12, "floor_scale": 6, "attn_scale": 0.3,
}
_TINY_MINISTRAL3: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 1e5, "factor": 4.0, "original_max_position_embeddings": 10,
    "llama_4_scaling_beta": 0.5,
}
TESTS = FamilyTests(
    tiny={
        "apertus": {},
        "llama": {"tie_word_embeddings": False},
        "ministral3": {"tie_word_embeddings": False, "head_dim": 16, "rope_parameters": _TINY_MINISTRAL3},
        "llama4_text": {"tie_word_embeddings": False, "head_dim": 8, **_TINY_LLAMA4},
        "mistral": {"tie_word_embeddings": False, "sliding_window": None},
        "phi3": {"tie_word_embeddings": False, "partial_rotary_factor": 0.5},
        "seed_oss": {"tie_word_embeddings": False, "head_dim": 16},
        "smollm3": {"tie_word_embeddings": True},
        "mixtral": {"tie_word_embeddings": False, "num_local_experts": 4},
    },
    models={
        "apertus-8b": Model(
            "apertus", {"rope_parameters": _LLAMA3, **NO_TOKENS}, quick=True,
            lora=adapters("attention", "up_proj", "down_proj"),
        ),
        "llama": Model("llama", {"rope_parameters": rope(5e5)}, quick=True),
        "llama-tied-llama3-rope": Model(
            "llama", {"rope_parameters": _LLAMA3, "head_dim": 16, "tie_word_embeddings": True}, quick=True
        ),
        # as a merged LoRA with new tokens is saved: tied by config.json, with an output weight of its own
        "llama-own-output": Model("llama", {"rope_parameters": rope(1e5)}, quick=True),
        "llama-odd-heads": Model(
            "llama", {**NINE_HEADS, "hidden_size": 36, "rope_parameters": rope(1e5), "tie_word_embeddings": True},
            quick=True, lora=adapters("all", rank=4, alpha=8), quick_lora=True,
        ),
        "llama-one-kv-head": Model(
            "llama", {"num_key_value_heads": 1, "rope_parameters": rope(1e5)},
            lora=adapters("q_proj", "v_proj", "gate_proj", rank=3, alpha=2, layers=(1, 4), rslora=True),
        ),
        "llama-attention-bias": Model(
            "llama", {"rope_parameters": rope(1e5), "attention_bias": True},
            lora=adapters("mlp_fc2", "attention_dense", rank=1, alpha=0.5, dropout=0.25),
        ),
        "llama-all-biases-linear-rope": Model(
            "llama",
            {"rope_parameters": rope(1e5, rope_type="linear", factor=2.5), "attention_bias": True, "mlp_bias": True},
            lora=adapters("all", dora=True), quick_lora=True,
        ),
        "llama-yarn-rope": Model("llama", {"rope_parameters": yarn(1e5, beta_fast=4.0)}),
        "mistral-window": Model("mistral", {"rope_parameters": rope(1e5), "sliding_window": 7, "head_dim": 16}, quick=True),
        "mistral": Model(
            "mistral", {"rope_parameters": rope(1e5), "sliding_window": None},
            lora=adapters("embed_tokens", "o_proj", rank=3, alpha=5), quick_lora=True,
        ),
        "phi3-part-of-each-head": Model(
            "phi3", {"rope_parameters": rope(1e5, partial_rotary_factor=0.5), "tie_word_embeddings": True, **NO_TOKENS}
        ),
        # as Phi-4-mini
        "phi3-part-of-each-head-longrope": Model(
            "phi3", {
                "rope_parameters": rope(
                    1e5, rope_type="longrope", partial_rotary_factor=0.75, short_factor=[1.0, 1.5, 2.0],
                    long_factor=[2.0, 3.0, 4.0], attention_factor=0.7,
                ), "original_max_position_embeddings": 32, **NO_TOKENS,
            }, quick=True,
        ),
        "phi3-odd-heads-window-longrope": Model(
            "phi3", {
                **NINE_HEADS, "hidden_size": 36, "rope_parameters": rope(
                    1e5, rope_type="longrope", short_factor=[1.0, 1.5], long_factor=[2.0, 4.0], attention_factor=0.7
                ), "original_max_position_embeddings": 32, "sliding_window": 7, **NO_TOKENS,
            },
        ),
        "smollm3": Model("smollm3", {"rope_parameters": rope(2e6), "no_rope_layers": [1, 0, 1, 0], **NO_TOKENS}),
        "smollm3-window-yarn-rope": Model(
            "smollm3", {
                "rope_parameters": yarn(1e5), "use_sliding_window": True, "sliding_window": 7, "tie_word_embeddings": True,
                **NO_TOKENS,
            }, quick=True,
        ),
        "seed-oss": Model("seed_oss", {"rope_parameters": rope(1e6), "head_dim": 16, **NO_TOKENS}, quick=True),
        "ministral3": Model(
            "ministral3", {
                "rope_parameters": yarn(1e6, llama_4_scaling_beta=0.5, mscale=1.0, mscale_all_dim=0.5) | SHORT,
                "head_dim": 16, **NO_TOKENS,
            }, quick=True,
        ),
        "minimax-m2": Model(
            "minimax_m2", {
                "rope_parameters": rope(1e5, partial_rotary_factor=0.5), "head_dim": 16, "num_local_experts": 8,
                "num_experts_per_tok": 3, **NO_TOKENS,
            }, kind="mixture", quick=True, lora=adapters("all"), adapted_experts=4 * 8 * 3,
            correction_bias_in="block_sparse_moe",
        ),
        # chunks shorter than the sequences, and queries that grow within them
        "llama4": Model(
            "llama4_text", {
                **_LLAMA4, "rope_parameters": _LLAMA3, "intermediate_size_mlp": 40, "interleave_moe_layer_step": 2,
                "no_rope_layers": [1, 0, 1, 0],
                "layer_types": ["full_attention", "chunked_attention", "chunked_attention", "full_attention"],
            }, kind="mixture", quick=True, lora=adapters("all"), quick_lora=True,
        ),
        "llama4-bias-no-norm-odd-heads": Model(
            "llama4_text", {
                **NINE_HEADS, **_LLAMA4, "rope_parameters": yarn(1e5), "intermediate_size_mlp": 24, "moe_layers": [0, 1, 3],
                "use_qk_norm": False, "attention_bias": True, "tie_word_embeddings": True,
                "no_rope_layers": [1, 1, 1, 1],  # without a rotation the gradients of the keys' biases are zero
            }, kind="mixture",
        ),
        "llama4-norms-everywhere": Model(
            "llama4_text",
            {**_LLAMA4, "attn_temperature_tuning": False, "rope_parameters": yarn(1e5), "no_rope_layers": [1, 1, 1, 1]},
            kind="mixture",
        ),
        "mixtral": Model(
            "mixtral", {"rope_parameters": rope(1e5), "num_local_experts": 4}, kind="mixture", quick=True,
            lora=adapters("all"), quick_lora=True, adapted_experts=4 * 4 * 3,
        ),
        "mixtral-window": Model(
            "mixtral", {
                "rope_parameters": rope(1e5), "num_local_experts": 4, "num_experts_per_tok": 3, "head_dim": 16,
                "sliding_window": 7,
            }, kind="mixture",
        ),
        "mistral3": Model.wrapped(
            "mistral3", {"model_type": "mistral", "sliding_window": None},
            {**VISION, "model_type": "pixtral", "head_dim": 16}, tie_word_embeddings=False,
        ),
        "mistral3-ministral": Model.wrapped(
            "mistral3", {
                "model_type": "ministral3", "rope_parameters": {**yarn(1e5, llama_4_scaling_beta=0.3), **SHORT},
            }, {**VISION, "model_type": "pixtral", "head_dim": 16},
        ),
        "llama4-vision": Model.wrapped(
            "llama4", {**_LLAMA4, "intermediate_size_mlp": 40, "interleave_moe_layer_step": 1, "no_rope_layers": [1, 0]},
            # four patches with 32 values each are joined
            {**VISION, "intermediate_size": 128, **dict.fromkeys(_LLAMA4_WIDTHS, 32)},
        ),
    },
    gradients={
        "apertus-8b": KTOStep("apertus", quick=("tp2",)),
        "llama": KTOStep("llama", quick=("recompute", "pp2_uneven", "cp2_tp2_sequence_parallel")),
        "ministral3": KTOStep("ministral3", quick=("cp2",)),
        "seed_oss": KTOStep("seed_oss", quick=("cp2",)),
        "window": KTOStep("mistral", {"sliding_window": 7}, layouts=("one_rank", "cp2", "cp2_tp2_sequence_parallel")),
    },
    shared_prompts={
        "no_gate": SharedPrompts("apertus"),
        "experts": SharedPrompts("mixtral", answers=2),
        "experts_tp2_ep2": SharedPrompts(
            "mixtral", world_size=2, layout={**TP2, "expert": 2, "expert_tensor": 1}, answers=2
        ),
        "experts_pp2_ep2": SharedPrompts("mixtral", world_size=4, layout={"pipeline": 2, "expert": 2}),
        "experts_ep2": SharedPrompts("mixtral", world_size=2, layout={"expert": 2}, quick=True),
        "chunks_and_temperature": SharedPrompts("llama4_text", quick=True),
        "rope_and_temperature": SharedPrompts("ministral3", quick=True),
        "bias_of_the_output": SharedPrompts("seed_oss"),
    },
    wide={
        "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 3},
        "llama4_text": {
            "moe_layers": [0, 1, 2, 3], "no_rope_layers": [1, 1, 1, 1], "attention_chunk_size": 64,
            "intermediate_size_mlp": 512, "head_dim": 32,
        },
    },
    activations=[
        Activations("apertus", TP2),
        Activations("llama4_text", quick=True),
        Activations("ministral3"),
        Activations("seed_oss", {"context": 2}, lora=adapters("all", rank=4)),
        Activations("llama4_text", dtype="bfloat16", lora=adapters("all", rank=4, dropout=0.1, dora=True)),
        Activations("mixtral", lora=adapters("all", rank=4)),
    ],
    trajectories={
        "mistral": {"sliding_window": 16},
        "phi3": {"sliding_window": 16},
        "smollm3": {"no_rope_layers": [1, 0, 0, 1]},
    },
)
