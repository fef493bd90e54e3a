"""Tiny Hugging Face checkpoints with a real tokenizer, and rows for them.

    python tests/helpers/tiny_models.py FOLDER     writes FOLDER/model (a llama of random weights), kto.jsonl and dpo.jsonl

It needs no more than what nemo_kto itself needs.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

EOS, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Four layers (pipelines of two and four), eight heads in four groups (tensor parallel up to four), a rope theta that is not
# the default, and a vocabulary that no tensor-parallel degree divides.
_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "initializer_range": 0.08,
    "rope_theta": 100000.0,
}


def make_tokenizer() -> Any:
    """A byte-level tokenizer (259 tokens) with a ChatML template, made in memory."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE(vocab={symbol: number for number, symbol in enumerate(alphabet)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytewise, bos_token=TURN_START, eos_token=TURN_END, pad_token=EOS, unk_token=EOS
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def make_checkpoint(folder: Path, family: str, *, seed: int = 0, dtype: str = "float32", **changes: Any) -> Path:
    """Write a Hugging Face checkpoint of random weights with its tokenizer.

    Args:
        folder: where to; made if absent.
        family: a ``model_type`` of tests/families.
        seed: seed of the weights.
        dtype: torch's name of the type the weights are stored in.
        changes: values of the Hugging Face config other than the tiny default ones.

    Returns:
        The folder.
    """
    from tests.families import TINY

    return _write_checkpoint(folder, family, seed=seed, dtype=dtype, **{**TINY[family], **changes})


def _write_checkpoint(folder: Path, family: str, *, seed: int = 0, dtype: str = "float32", **changes: Any) -> Path:
    import torch
    import transformers

    tokenizer = make_tokenizer()
    settings = {
        **_COMMON,
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **changes,
    }
    config = transformers.AutoConfig.for_model(family, **settings)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    # Norm weights and biases start at one and zero, where a lost or exchanged one would not be detected.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("_bias") or bool((parameter == 1).all()):
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith(("correction_bias", "expert_bias")):
                buffer.add_(0.1 * torch.randn_like(buffer))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_architecture(family: str, **changes: Any) -> Any:
    """An Architecture of two layers with six heads of size 2 in three groups; ``changes``: its other fields."""
    from nemo_kto.architecture.architecture import Architecture
    from nemo_kto.architecture.families import FAMILIES
    from nemo_kto.layers.layer_settings import Rope
    from nemo_kto.mixers import (
        SOFTMAX_ATTENTION,
        GatedDeltaNet,
        GlobalAttention,
        LatentAttention,
        Mamba2,
        SequenceMixer,
        ShortConvolution,
    )

    delta_net = GatedDeltaNet(key_heads=2, value_heads=4, key_dim=3, value_dim=2, kernel=4)
    mamba = Mamba2(heads=4, groups=2, head_dim=3, state_dim=2, kernel=4, step_limits=(0.0, math.inf))
    convolution, wide = ShortConvolution(channels=8, groups=4, kernel=3), GlobalAttention(heads=6, groups=3, head_dim=4)
    latents = LatentAttention(
        heads=6, query_rank=5, key_value_rank=4, plain_dim=2, rotated_dim=2, value_dim=3, interleaved=True
    )
    kinds = {mapping.mixer for mapping in FAMILIES[family].mappings}
    mixer: SequenceMixer = next(
        (each for each in (delta_net, latents, mamba, convolution, wide) if each.kind in kinds), SOFTMAX_ATTENTION
    )
    sizes: dict[str, Any] = {
        "tensor_parallel": 1,
        "num_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 6,
        "num_query_groups": 3,
        "head_dim": 2,
        "ffn_hidden_size": 24,
        "vocab_size": 11,
        "max_position_embeddings": 16,
        "norm_epsilon": 1e-6,
        "rope": Rope(frequencies=(1.0,)),
        "windows": (None, None),
        "rotates": (True, True),
        "mixers": (mixer, latents if mixer is latents else SOFTMAX_ATTENTION),
        "tied": False,
    }
    return Architecture(family=FAMILIES[family], **(sizes | changes))


def write_safetensors(file: Path, shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({}), dtype: str = "F32") -> None:
    """Write a safetensors file of zeros."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * {"F32": 4, "BF16": 2, "I8": 1, "F8_E4M3": 1, "I32": 4}[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def write_stub_model(folder: Path) -> Path:
    """A folder that a command line may name as a model: of a known family, of no particular size, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    write_safetensors(folder / "model.safetensors")
    return folder


def write_stub_adapter(folder: Path) -> Path:
    """A folder that a command line may name as an adapter in PEFT's format: of rank 1, on one layer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1}))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    write_safetensors(folder / "adapter_model.safetensors", {name.format("A"): (1, 2), name.format("B"): (2, 1)})
    return folder


def make_rows(number: int, *, seed: int = 0) -> list[dict[str, str]]:
    """Unpaired rows of varied length; every tenth prompt is that of the row before it."""
    draw = random.Random(seed)
    words = "amber birch cedar delta ember fjord grove heath inlet juniper knoll larch".split()
    rows: list[dict[str, str]] = []
    for index in range(number):
        prompt = f"{index}: " + " ".join(draw.choices(words, k=draw.randint(1, 6)))
        if index % 10 == 9:
            prompt = rows[-1]["prompt"]
        preference = draw.choice(["chosen", "rejected"])
        response = " ".join(draw.choices(words, k=draw.randint(1, 8)))
        rows.append({"prompt": prompt, "response": response, "preference": preference})
    return rows


def make_pairs(number: int, *, seed: int = 1) -> list[dict[str, Any]]:
    """Pairs of answers of varied length; every third has rewards."""
    draw = random.Random(seed)
    words = "amber birch cedar delta ember fjord grove heath inlet juniper knoll larch".split()
    pairs: list[dict[str, Any]] = []
    for index in range(number):
        chosen, rejected = (" ".join(draw.choices(words, k=draw.randint(1, 8))) for _ in range(2))
        pair: dict[str, Any] = {"prompt": f"{index}: {draw.choice(words)}", "chosen": chosen, "rejected": rejected}
        if index % 3 == 0:
            pair |= {"chosen_reward": 4 * draw.random(), "rejected_reward": 2 * draw.random()}
        pairs.append(pair)
    return pairs


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    """A line of JSON for each row."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def main() -> None:
    folder = Path(sys.argv[1])
    _write_checkpoint(folder / "model", "llama")  # also where this file is alone
    write_rows(folder / "kto.jsonl", make_rows(8))
    write_rows(folder / "dpo.jsonl", make_pairs(8))


if __name__ == "__main__":
    main()
