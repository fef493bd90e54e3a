"""A small complete model folder, ways to damage it, and the errors that a run reports."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nemo_kto.algorithms.recipes import KTO
from nemo_kto.architecture.architecture import read_architecture
from nemo_kto.architecture.lora import LoRASettings
from nemo_kto.config.resolved import ModelFiles
from nemo_kto.data.rows.reader import Fields, RowErrors
from nemo_kto.data.rows.records import DataError, KTORecord, RowError
from nemo_kto.data.tokens.cache import KTO_EXAMPLES, ExampleKind, TokenCache
from nemo_kto.data.tokens.chat_template import RecordEncoder
from nemo_kto.data.tokens.truncation import Truncation
from nemo_kto.errors import UserError
from nemo_kto.huggingface.hf_weights import check_weights
from nemo_kto.huggingface.rank_weights import wanted_adapters, wanted_weights
from nemo_kto.model_files.adapter_files import read_adapter_settings
from nemo_kto.run.data import model_tokenizer
from tests.helpers.tiny_models import write_safetensors
from tests.unit.conftest import composed, errors_of

Break = Callable[[Path], object]
GONE = object()
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 259,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "rope_theta": 1e4,
}
# Mamba-2, attention, MLP
NEMOTRON: dict[str, Any] = {
    **{name: CONFIG[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")},
    **{name: CONFIG[name] for name in ("vocab_size", "max_position_embeddings")},
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "num_hidden_layers": 3,
    "hybrid_override_pattern": "M*-",
    "head_dim": 4,
    "layer_norm_epsilon": 1e-5,
    "mlp_hidden_act": "relu2",
    "mamba_num_heads": 4,
    "mamba_head_dim": 4,
    "n_groups": 2,
    "ssm_state_size": 3,
    "conv_kernel": 4,
}
# a short convolution, attention with experts
LFM: dict[str, Any] = {
    **CONFIG,
    "architectures": ["Lfm2MoeForCausalLM"],
    "model_type": "lfm2_moe",
    "layer_types": ["conv", "full_attention"],
    "num_dense_layers": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}
APERTUS: dict[str, Any] = {**CONFIG, "architectures": ["ApertusForCausalLM"], "model_type": "apertus", "hidden_act": "xielu"}
# experts, after Mamba-2 and after attention
GRANITE: dict[str, Any] = {
    **CONFIG,
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "layer_types": ["mamba", "attention"],
    "position_embedding_type": "nope",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 6,
    "mamba_n_heads": 4,
    "mamba_d_head": 4,
    "mamba_d_state": 3,
}
ADAPTED = LoRASettings(rank=2, alpha=4.0, target_modules=("q_proj", "v_proj"))
ADAPTER = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "bias": "none"}


def make_model(folder: Path, tokenizer: Path) -> Path:
    """A llama of two layers, all zeros, with the tokenizer of another folder."""
    shutil.copytree(tokenizer, folder)
    write(folder / "config.json", CONFIG)
    write_safetensors(folder / "model.safetensors", wanted_weights(read_architecture(folder, tensor_parallel=1)))
    return folder


def make_adapter(folder: Path, model: Path) -> Path:
    folder.mkdir()
    write(folder / "adapter_config.json", ADAPTER)
    shapes = wanted_adapters(read_architecture(model, tensor_parallel=1), ADAPTED)
    write_safetensors(folder / "adapter_model.safetensors", shapes)
    return folder


def write(file: Path, content: object) -> None:
    file.write_text(json.dumps(content), encoding="utf-8")


def made(fields: dict[str, Any]) -> Break:
    """The model of these fields, all zeros, in the place of the llama."""

    def make(folder: Path) -> None:
        write(folder / "config.json", fields)
        write_safetensors(folder / "model.safetensors", wanted_weights(read_architecture(folder, tensor_parallel=1)))

    return make


# Ways to break a folder. Each is called with the folder.
def fields(file: str, **changes: object) -> Break:
    """Other values for fields of a JSON file; GONE removes one."""

    def apply(folder: Path) -> None:
        content: dict[str, object] = {**json.loads((folder / file).read_text(encoding="utf-8")), **changes}
        write(folder / file, {name: value for name, value in content.items() if value is not GONE})

    return apply


def config(**changes: object) -> Break:
    return fields("config.json", **changes)


def content(file: str, raw: bytes) -> Break:
    return lambda folder: (folder / file).write_bytes(raw)


def removed(*files: str) -> Break:
    return lambda folder: [(folder / file).unlink() for file in files]


def replaced_by_pipe(file: str) -> Break:
    def apply(folder: Path) -> None:
        (folder / file).unlink()
        os.mkfifo(folder / file)

    return apply


def linked(file: str, target: str, *, new: bool = False) -> Break:
    """A link: to itself, to nowhere, or to another file; ``new`` if there is no file to replace."""

    def apply(folder: Path) -> None:
        (folder / file).unlink(missing_ok=new)
        os.symlink(target, folder / file)

    return apply


def cut(file: str, part: float) -> Break:
    def apply(folder: Path) -> None:
        raw = (folder / file).read_bytes()
        (folder / file).write_bytes(raw[: int(len(raw) * part)])

    return apply


def header(change: Callable[[dict[str, Any]], object], file: str = "model.safetensors") -> Break:
    """Another header for the same values."""

    def apply(folder: Path) -> None:
        raw = (folder / file).read_bytes()
        length = int.from_bytes(raw[:8], "little")
        known = json.loads(raw[8 : 8 + length])
        change(known)
        text = json.dumps(known).encode()
        (folder / file).write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])

    return apply


def shapes(changes: Mapping[str, tuple[int, ...] | None], dtype: str = "F32", file: str = "model.safetensors") -> Break:
    """Weights of other shapes; None removes one."""

    def apply(folder: Path) -> None:
        raw = (folder / file).read_bytes()
        known = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        wanted = {**{name: tuple(entry["shape"]) for name, entry in known.items()}, **changes}
        kept = {name: shape for name, shape in wanted.items() if shape is not None}
        write_safetensors(folder / file, kept, dtype)

    return apply


def indexed(weight_map: object) -> Break:
    def apply(folder: Path) -> None:
        write(folder / "model.safetensors.index.json", weight_map)

    return apply


def shard(file: str, *names: str) -> Break:
    """A further file of weights, vectors of zeros."""
    return lambda folder: write_safetensors(folder / file, dict.fromkeys(names, (8,)))


def both(*breaks: Break) -> Break:
    return lambda folder: [each(folder) for each in breaks]


USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}


def assert_harmless(message: str) -> None:
    """No message may control or flood the terminal, for any file content."""
    assert all(line.isprintable() and len(line) < 1200 for line in message.split("\n")), message[:2000]


def launcher_says(model: Path, rows: Path, *overrides: str) -> list[str]:
    """Errors that the launcher finds before the start."""
    given = [f"pretrained_checkpoint.restore_from_path='{model}'", f"model.data.data_prefix='{rows}'"]
    given += ["trainer.accelerator=cpu", "model.data.seq_length=64", f"exp_manager.exp_dir='{rows.parent}/results'"]
    return errors_of(composed([*given, *overrides]), KTO)


def ranks_say(model: Path, adapter: Path | None = None) -> str | None:
    """Errors that a rank finds, by the functions that read the files; any error except UserError is a bug."""
    try:
        check_weights(read_architecture(model, tensor_parallel=1), model)
        encoder = RecordEncoder(tokenizer=model_tokenizer(ModelFiles(source=model)))
        (encoded,) = encoder.encode([KTORecord(prompt=[USER], response=[ANSWER], desirable=True, line=1)])
        if isinstance(encoded, RowError):
            return str(encoded)
        if adapter is not None:
            read_adapter_settings(adapter)
    except UserError as error:
        return str(error)
    return None


def file_error(path: Path, encoder: RecordEncoder, kind: ExampleKind = KTO_EXAMPLES, *, limit: int) -> str:
    """The errors of a data file, FOLDER in place of its folder, below ``limit`` characters; empty if it is read."""
    folder, cut, broken = path.parent / "cache", Truncation(64, "keep_end", encoder.bos_id), RowErrors()
    cache = TokenCache(kind=kind, folder=folder, fields=Fields(), encoder=encoder, truncation=cut)
    try:
        table, _ = cache.open([path], broken=broken)[path]
        broken.raise_if_any()
    except DataError as error:
        message = str(error).replace(str(path.parent), "FOLDER")
        assert len(message) < limit
        assert {left.name for left in folder.glob("*")} <= {"hashes"}, "a partial table was left"
        return message
    assert table is not None
    assert len(table) > 0
    return ""
