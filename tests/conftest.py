"""What every test may use: tiny Hugging Face checkpoints with a real tokenizer, labelled rows, the quickstart's model."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import gc
import importlib.util
import json
import random
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
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
    "max_position_embeddings": 256,
    "initializer_range": 0.08,
    "rope_theta": 100000.0,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "mistral": {"tie_word_embeddings": False, "sliding_window": None},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True, "head_dim": 16},
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--matrix",
        default="quick",
        choices=("quick", "full", "0", "1", "2"),
        help="which of the combinations marked full to run: none (quick), all (full), or one third of them (its number)",
    )


def pytest_configure() -> None:
    """Megatron-core and transformers are imported while tests are collected, with nothing among it to be freed."""
    gc.disable()


def pytest_collection_finish() -> None:
    """From here on garbage is looked for, among what the tests make."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the combinations that --matrix does not ask for; a third is chosen by the tests' names."""
    matrix = config.getoption("--matrix")
    if matrix == "full":
        return
    left_out = [
        item for item in items if item.get_closest_marker("full") and str(zlib.crc32(item.nodeid.encode()) % 3) != matrix
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


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
        family: one of llama, mistral, qwen2, qwen3.
        seed: seed of the weights.
        dtype: torch's name of the type the weights are stored in.
        changes: values of the Hugging Face config other than the tiny default ones.

    Returns:
        The folder.
    """
    import torch
    import transformers

    tokenizer = make_tokenizer()
    settings = {
        **_COMMON,
        **_FAMILIES[family],
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **changes,
    }
    config = transformers.AutoConfig.for_model(family, **settings)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    # Norm weights and biases start at one and nought, where a lost or exchanged one would go unnoticed.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_checkpoint(family, **changes) -> folder``; the same call gives the same folder."""
    made: dict[str, Path] = {}

    def get(family: str, **changes: Any) -> Path:
        key = f"{family}{sorted(changes.items())}"
        if key not in made:
            made[key] = make_checkpoint(tmp_path_factory.mktemp(family), family, **changes)
        return made[key]

    return get


@pytest.fixture(scope="session")
def tiny_llama(tiny_checkpoint: Callable[..., Path]) -> Path:
    """Folder of a llama of random weights: untied embeddings, grouped heads, rope theta 1e5."""
    return tiny_checkpoint("llama")


@pytest.fixture(scope="session")
def tiny_qwen2(tiny_checkpoint: Callable[..., Path]) -> Path:
    """Folder of a qwen2 of random weights: tied embeddings, biases on q, k and v."""
    return tiny_checkpoint("qwen2")


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that holds the byte-level ChatML tokenizer alone."""
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
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


@pytest.fixture(scope="session")
def kto_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A jsonl file of 96 unpaired rows."""
    file = tmp_path_factory.mktemp("rows") / "kto.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in make_rows(96)))
    return file


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


@pytest.fixture(scope="session")
def dpo_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A jsonl file of 96 pairs."""
    file = tmp_path_factory.mktemp("pairs") / "dpo.jsonl"
    file.write_text("".join(json.dumps(pair) + "\n" for pair in make_pairs(96)))
    return file


def load_script(path: str) -> ModuleType:
    """Import a file of the repository that is no part of a package, such as ``examples/quickstart/prepare.py``."""
    file = REPOSITORY / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of the real SmolLM2-135M-Instruct, prepared as the quickstart prepares it (about a minute, once a machine)."""
    prepare = load_script("examples/quickstart/prepare.py")
    try:
        return Path(prepare.prepare_model(prepare.default_cache()))
    except prepare.PackageMissing as error:
        pytest.skip(str(error))
