"""What `make gpu` trains: models of known shapes with random weights, and rows as long as real preference data.

No network and no files of others: a model is made in seconds, and its tokenizer has one token for each byte.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.helpers.tiny_models import make_tokenizer

BETA, LR, STEPS = 0.1, 1e-6, 7

_LLAMA_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model and its rows.

    Attributes:
        name: for the table.
        family: of transformers' configurations.
        config: values of its config.json.
        lora: only adapters of rank 16 on all linear layers are trained; else all weights are.
        longest: tokens of the longest row.
        rows: of a global batch.
        dtype: the weights are stored in; nemo_kto trains in it.
    """

    name: str
    family: str
    config: dict[str, Any]
    lora: bool
    longest: int = 4096
    rows: int = 64
    dtype: str = "bfloat16"


# config.json of meta-llama/Llama-3.2-1B and of Qwen/Qwen2.5-7B.
LLAMA_1B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": _LLAMA_ROPE,
    "tie_word_embeddings": True,
}
QWEN_7B: dict[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
}
TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 16384}
SIZES = {
    "llama-1b": Size(name="Llama-3.2-1B, all weights", family="llama", config=LLAMA_1B, lora=False),
    "qwen-7b": Size(name="Qwen2.5-7B, LoRA", family="qwen2", config=QWEN_7B, lora=True),
}
_TOY: dict[str, Any] = {"longest": 256, "rows": 8, "dtype": "float32"}
TOYS = {
    "llama-1b": Size(name="tiny llama, all weights", family="llama", config={**LLAMA_1B, **TINY}, lora=False, **_TOY),
    "qwen-7b": Size(name="tiny qwen2, LoRA", family="qwen2", config={**QWEN_7B, **TINY}, lora=True, **_TOY),
}


def write_model(size: Size, folder: Path) -> Path:
    """A Hugging Face folder with random weights, drawn where that is fast, and a tokenizer."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = make_tokenizer()
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = AutoConfig.for_model(size.family, **size.config, **ids, dtype=size.dtype)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    device, dtype = "cuda" if torch.cuda.is_available() else "cpu", getattr(torch, size.dtype)
    torch.manual_seed(0)
    weights = {}
    for name, parameter in model.named_parameters():  # a tied weight is there once
        drawn = torch.empty(parameter.shape, dtype=dtype, device=device)
        weights[name] = (drawn.normal_(0, 0.02) if parameter.dim() > 1 else drawn.fill_("norm" in name)).cpu()
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def row_lengths(rows: int, longest: int) -> list[int]:
    """Tokens of each row, prompt and answer with its end: log-normal, from ``longest``/32 to ``longest``.

    The median is 350 of 4096 and the deviation of the logarithm 0.8, so that the mean is about 500. That is the mean of
    UltraFeedback: HuggingFaceH4/ultrafeedback_binarized has 405,688,662 bytes in 61,135 rows (its dataset card), which hold
    the prompt four times, the chosen answer twice and the rejected one once: 2 kB for a prompt with an answer, at 4.2 bytes
    a token. The deviation is an assumption. The quantiles are taken in equal steps, and the ends are there once each.
    """
    normal = statistics.NormalDist(math.log(350 / 4096 * longest), 0.8)
    drawn = (math.exp(normal.inv_cdf((index + 0.5) / rows)) for index in range(rows))
    lengths = [min(max(round(length), longest // 32), longest) for length in drawn]
    return [longest // 32, *lengths[1:-1], longest]


def make_rows(size: Size) -> list[dict[str, Any]]:
    """STEPS global batches in TRL's form, each with the same lengths; three tenths of each row are its prompt.

    The longest prompt and the longest answer are those of one row, so no KL example is cut.
    """
    draw = random.Random(0)

    def text(tokens: int) -> str:
        return "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=tokens))

    rows = []
    for index, tokens in enumerate(row_lengths(size.rows, size.longest) * STEPS):
        prompt = max(2, round(0.3 * tokens))
        rows.append({"prompt": text(prompt), "completion": text(tokens - prompt - 1), "label": index % 2 == 0})
    return rows


def write_rows(rows: list[dict[str, Any]], file: Path) -> Path:
    """A line of JSON for each."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def main() -> None:
    """Write a model and its rows into FOLDER, unless they are there: python benchmarks/gpu_models.py NAME FOLDER [--toy]."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    size = (TOYS if "--toy" in sys.argv else SIZES)[name]
    if not (folder / "rows.jsonl").exists():
        write_model(size, folder / "model")
        write_rows(make_rows(size), folder / "rows.jsonl")  # last: it says that both are complete


if __name__ == "__main__":
    main()
