"""Checkpoints as NeMo-Aligner, Megatron-LM and Megatron-Bridge write them, saved by megatron-core itself."""

from __future__ import annotations

import argparse
import io
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import yaml
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.transformer.enums import AttnBackend

from nemo_kto.distributed import state
from nemo_kto.distributed.state import Layout
from nemo_kto.huggingface.hf_weights import load_weights
from nemo_kto.huggingface.rank_weights import ENGINE_NAMES
from tests.helpers.hf_jobs import build
from tests.helpers.hf_models import weights

OPTIMIZER = "optimizer.state.exp_avg.decoder.final_layernorm.weight"


def save_torch_dist(
    model: Path,
    folder: Path,
    layout: Layout,
    *,
    dtype: torch.dtype = torch.float32,
    prefix: str = "",
    engine_names: bool = True,
    stacked: bool = True,
    common: dict[str, Any] | None = None,
) -> None:
    """Save a Hugging Face model in torch_dist on all ranks.

    ``engine_names``: the norms have the names of Transformer Engine's layers; ``stacked``: all layers are in one tensor;
    ``common``: other content of the checkpoint.
    """
    state.init_distributed(layout=layout, seed=0)
    gpt, architecture = build(model, layout, params_dtype=dtype)
    load_weights([gpt], architecture, model)
    names = {ours: theirs for theirs, ours in ENGINE_NAMES.items()} if engine_names else {}
    sharded = gpt.sharded_state_dict(prefix=prefix, metadata={"non_homogeneous_layers": not stacked})
    for tensor in dist_checkpointing.utils.nested_values(sharded):
        for ours, theirs in names.items():
            if tensor.key.endswith(f".{ours}") and "experts" not in tensor.key and "final" not in tensor.key:
                tensor.key = tensor.key.replace(ours, theirs)
    object_state = ShardedObject(f"{prefix}decoder.layers.self_attention.core_attention._extra_state", None, (1,), (0,), 0)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
        sharded["extra"] = object_state
    dist.barrier()
    dist_checkpointing.save({"model": sharded, **(common or {})}, str(folder))


def settings_of(model: Path) -> dict[str, Any]:
    """The settings under the names that most programs share."""
    config = json.loads((model / "config.json").read_text())
    rope = config["rope_parameters"]
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": config["num_attention_heads"],
        "num_query_groups": config["num_key_value_heads"],
        "kv_channels": config.get("head_dim"),
        "rotary_base": rope["rope_theta"],
        "position_embedding_type": "rope",
        "max_position_embeddings": config["max_position_embeddings"],
        "normalization": "RMSNorm",
    }


def experts_of(model: Path) -> dict[str, Any]:
    config = json.loads((model / "config.json").read_text())
    return {
        "num_moe_experts": config.get("num_experts", config.get("num_local_experts")),
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_ffn_hidden_size": config.get("moe_intermediate_size", config["intermediate_size"]),
        "moe_router_pre_softmax": not config.get("norm_topk_prob", True),
    }


def megatron_lm_arguments(model: Path, **more: Any) -> argparse.Namespace:
    """Arguments as in common.pt, with objects that only Megatron-LM's classes can load."""
    config = json.loads((model / "config.json").read_text())
    own = {
        "norm_epsilon": config["rms_norm_eps"],
        "swiglu": True,
        "group_query_attention": True,
        "untie_embeddings_and_output_weights": not config["tie_word_embeddings"],
        "attention_backend": AttnBackend.auto,
        "params_dtype": torch.float32,
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": "org/model",
    }
    return argparse.Namespace(**{**settings_of(model), **own, **more})


def write_bridge_config(model: Path, folder: Path, **more: Any) -> None:
    """Write run_config.yaml, and the tokenizer in its folder."""
    config = json.loads((model / "config.json").read_text())
    settings = {
        **settings_of(model),
        "_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider",
        "layernorm_epsilon": config["rms_norm_eps"],
        "seq_length": config["max_position_embeddings"],
        "gated_linear_unit": True,
        "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False},
        "share_embeddings_and_output_weights": config["tie_word_embeddings"],
        "vocab_size": config["vocab_size"],
        **more,
    }
    del settings["max_position_embeddings"]
    (folder / "run_config.yaml").write_text(yaml.safe_dump({"model": settings, "tokenizer": {}}))
    (folder / "tokenizer").mkdir()
    for file in model.glob("*token*"):
        shutil.copy(file, folder / "tokenizer")


def write_nemo(
    model: Path, weights: Path, archive: Path, *, mode: Literal["w", "w:gz"] = "w", sentencepiece: bytes = b"", **more: Any
) -> None:
    """Pack a .nemo archive with ``weights``, a torch_dist folder or a file model_weights.ckpt."""
    config = json.loads((model / "config.json").read_text())
    settings = {
        **settings_of(model),
        "mcore_gpt": True,
        "layernorm_epsilon": config["rms_norm_eps"],
        "activation": "fast-swiglu",
        "normalization": "rmsnorm",
        "encoder_seq_length": config["max_position_embeddings"],
        "share_embeddings_and_output_weights": config["tie_word_embeddings"],
        "precision": "${trainer.precision}",
        "tokenizer": {"library": "huggingface", "type": "org/model"},
        **more,
    }
    if sentencepiece:
        settings["tokenizer"] = {"library": "sentencepiece", "type": None, "model": "nemo:0123_tokenizer.model"}
    (weights.parent / "model_config.yaml").write_text(yaml.safe_dump(settings))
    with tarfile.open(archive, mode) as tar:
        tar.add(weights.parent / "model_config.yaml", "./model_config.yaml")
        tar.add(weights, f"./{weights.name}")
        if sentencepiece:
            info = tarfile.TarInfo("./0123_tokenizer.model")
            info.size = len(sentencepiece)
            tar.addfile(info, io.BytesIO(sentencepiece))


def state_dict(model: Path, *, norm_offset: int = 0) -> dict[str, torch.Tensor]:
    """The weights of a dense model under the names in NeMo's files, with queries, keys and values of a group together."""
    config, tensors = json.loads((model / "config.json").read_text()), weights(model)
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    found = {
        "embedding.word_embeddings.weight": tensors["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": tensors["model.norm.weight"] + norm_offset,
        "output_layer.weight": tensors["lm_head.weight"],
    }
    for number in range(config["num_hidden_layers"]):
        layer, theirs = f"decoder.layers.{number}.", f"model.layers.{number}."
        query, key, value = (tensors[f"{theirs}self_attn.{part}_proj.weight"] for part in "qkv")
        each = zip(query.chunk(groups), key.chunk(groups), value.chunk(groups), strict=True)
        found[layer + "self_attention.linear_qkv.weight"] = torch.cat([torch.cat(parts) for parts in each])
        assert heads % groups == 0
        found[layer + "self_attention.linear_proj.weight"] = tensors[theirs + "self_attn.o_proj.weight"]
        gate_and_up = [tensors[f"{theirs}mlp.{part}_proj.weight"] for part in ("gate", "up")]
        found[layer + "mlp.linear_fc1.weight"] = torch.cat(gate_and_up)
        found[layer + "mlp.linear_fc2.weight"] = tensors[theirs + "mlp.down_proj.weight"]
        norms = {
            "self_attention.linear_qkv.layer_norm_weight": "input_layernorm",
            "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm",
        }
        found |= {layer + ours: tensors[f"{theirs}{name}.weight"] + norm_offset for ours, name in norms.items()}
    return {f"model.{name}": tensor for name, tensor in found.items()}


def sentencepiece_model() -> bytes:
    """A SentencePiece model of characters: it has the three special tokens of Llama, and 256 tokens in all."""
    from transformers.convert_slow_tokenizer import import_protobuf

    model: Any = import_protobuf().ModelProto()
    pieces = [("<unk>", 2), ("<s>", 3), ("</s>", 3), *((f"<0x{byte:02X}>", 6) for byte in range(200)), ("▁", 1)]
    for token, kind in [*pieces, *((character, 1) for character in "abcdefghijklmnopqrstuvwxyz")]:
        piece = model.pieces.add()
        piece.piece, piece.type, piece.score = token, kind, 0.0
    model.trainer_spec.model_type = 2
    model.trainer_spec.unk_id, model.trainer_spec.bos_id, model.trainer_spec.eos_id = 0, 1, 2
    content: bytes = model.SerializeToString()
    return content
