"""config.json of published models, word by word (tests/data/published_configs), and small models of the same fields.

``python -m tests.helpers.published_configs`` writes the numbers of parameters of transformers' models again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoConfig

from nemo_kto.architecture.architecture import read_architecture
from nemo_kto.architecture.families import ALIASES
from nemo_kto.errors import UserError
from tests.families import IMAGES
from tests.helpers.hf_models import auto_class

FOLDER = Path(__file__).resolve().parents[1] / "data" / "published_configs"
COUNTS = FOLDER.parent / "published_parameters.json"
NAMES = sorted(file.stem for file in FOLDER.iterdir())
LAYERS = 6
_UNTRAINED = ("vision", "embed_vision", "visual", "multi_modal", "mm_projector")  # of the names of parameters
# Of small models, for the fields that a file has; zeros stay.
_SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "intermediate_size_mlp": 80, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48, "shared_intermediate_size": 48, "moe_shared_expert_intermediate_size": 48,
    "vocab_size": 259, "head_dim": 16, "num_attention_heads": 8, "num_experts": 8, "n_routed_experts": 8,
    "num_local_experts": 8, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "index_head_dim": 8, "index_n_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "linear_key_head_dim": 12, "linear_value_head_dim": 8, "mamba_num_heads": 6, "mamba_head_dim": 8, "ssm_state_size": 12,
    "n_groups": 2, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 12, "mamba_d_ssm": 128, "sliding_window": 8,
    "attention_chunk_size": 8, "rotary_dim": 8, "num_hidden_layers": LAYERS, "block_ff_dim": 144, "block_multiple_of": 16,
}  # fmt: skip
_AT_MOST = {"num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 2, "floor_scale": 6}
# ``model_type`` -> a tiny model with a vision tower of the same kind
_TOWERS = {model.model_type: model for model in IMAGES.values()}
_OF_LAYERS = ("layer_types", "no_rope_layers", "hybrid_override_pattern", "mlp_layer_types", "indexer_types")


def published(name: str) -> dict[str, Any]:
    """The content of a file."""
    config: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return config


@cache
def counts() -> dict[str, int]:
    """Number of parameters of transformers' text model, by the names of the files that this program reads."""
    found: dict[str, int] = json.loads(COUNTS.read_text())
    return found


def write(config: Mapping[str, Any], folder: Path) -> Path:
    """Write a folder with this config.json only."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def small(name: str) -> dict[str, Any]:
    """A published configuration of few layers and small widths, without quantization; other fields are as published."""
    config = published(name)
    wrapped = isinstance(config.get("text_config"), dict)
    text = _small(dict(config["text_config"] if wrapped else config))
    whole = {**config, "text_config": text} if wrapped else text
    if "vision_config" in whole:
        whole["vision_config"] = _TOWERS[whole["model_type"]].config().vision_config.to_dict()
        whole |= {name: 32 for name in ("projection_hidden_size", "vt_hidden_size") if name in config}
    return {name: value for name, value in whole.items() if name != "quantization_config"}


def _small(text: dict[str, Any]) -> dict[str, Any]:
    found = text | {name: size for name, size in _SIZES.items() if text.get(name)}
    found |= {name: min(most, text[name]) for name, most in _AT_MOST.items() if text.get(name)}
    if (groups := text.get("num_key_value_heads")) and (heads := text.get("num_attention_heads")):
        found["num_key_value_heads"] = max(1, _SIZES["num_attention_heads"] * groups // heads)
    found |= dict.fromkeys({"pad_token_id", "bos_token_id", "eos_token_id"} & set(text))
    found.pop("quantization_config", None)
    for name in _OF_LAYERS:
        if kinds := text.get(name):  # the first layers with the most kinds
            start = max(range(len(kinds) - LAYERS + 1), key=lambda first: (len(set(kinds[first : first + LAYERS])), -first))
            found[name] = kinds[start : start + LAYERS]
    if "moe_layers" in text:
        found["moe_layers"] = [layer for layer in text["moe_layers"] if layer < LAYERS]
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := text.get(name), dict) and "mrope_section" in rope:
            part = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 1.0))
            size = found.get("head_dim") or found["hidden_size"] // found["num_attention_heads"]
            third = (pairs := int(size * part) // 2) // 3
            found[name] = {**rope, "mrope_section": [pairs - 2 * third, third, third]}
    return found


def text_model(config: Mapping[str, Any], device: str = "meta") -> Any:
    """transformers' model of a whole configuration; it refuses integers for booleans, which Llama 4 has."""
    config = {name: value for name, value in config.items() if name != "quantization_config"}
    text = config.get("text_config", config)
    if "attn_temperature_tuning" in text:
        config = {**config, "text_config": {**text, "attn_temperature_tuning": bool(text["attn_temperature_tuning"])}}
    kind = ALIASES.get(config["model_type"], config["model_type"])
    own = {name: value for name, value in config.items() if name != "model_type"}
    with torch.device(device):
        return auto_class(config).from_config(AutoConfig.for_model(kind, **own), attn_implementation="eager")


def count(config: Mapping[str, Any]) -> int:
    """Number of parameters of the text model that transformers makes of a configuration, with its output layer."""
    names = text_model(config).named_parameters()
    trained = [(name.removeprefix("model."), parameter) for name, parameter in names if ".indexer." not in name]
    return sum(parameter.numel() for name, parameter in trained if not name.startswith(_UNTRAINED))


def main() -> None:
    found = {}
    for name in NAMES:
        with TemporaryDirectory() as folder:
            try:
                read_architecture(write(published(name), Path(folder)), tensor_parallel=1)
            except UserError:
                continue
        found[name] = count(published(name))
        print(name, f"{found[name]:,}", flush=True)
    COUNTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
