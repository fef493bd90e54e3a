"""Small real tokenizers, data files and the examples made of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from nemo_kto.data.batches.dataset import KTODataset
from nemo_kto.data.batches.splits import Splits, build_splits
from nemo_kto.data.rows.reader import Fields, FileColumns, FileReader, RowErrors
from nemo_kto.data.tokens.cache import KTO_EXAMPLES

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %} {{ message['content'] }} </s>"
    "{% else %}[INST] {{ message['content'] }} [/INST]{% endif %}{% endfor %}"
)
_CORPUS = ["the film was good", "the film was bad and long", "what is a good film?", "hello there, world", "user assistant"]


def _byte_level(special: list[str]) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(_CORPUS, trainer)
    return backend


def chatml_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """As SmolLM2 and Qwen: adds nothing by itself; its EOS ends turns, its BOS token opens them."""
    backend = _byte_level(["<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


def llama_tokenizer(template: str = LLAMA) -> PreTrainedTokenizerFast:
    """As Llama: puts a BOS in front of every text, and its template writes another BOS."""
    backend = _byte_level(["<s>", "</s>", "<|eot|>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def write_rows(path: Path, rows: Iterable[dict]) -> Path:
    """A jsonl file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def numbered_rows(count: int, name: str = "row") -> list[dict]:
    """``count`` plain rows with different texts; every other one desirable."""
    return [
        {"prompt": f"{name} {i}:", "response": f" answer {i}", "preference": ("chosen", "rejected")[i % 2]}
        for i in range(count)
    ]


def read_file(path: Path, fields: Fields, *, as_pairs: bool = False) -> tuple[list[Any], FileColumns, RowErrors]:
    """The records of a data file, its columns, and its broken rows, also those with unknown labels."""
    broken, columns = RowErrors(), FileColumns()
    reader = FileReader(fields=fields, broken=broken)
    records: list[Any] = list(reader.dpo_records(path, columns) if as_pairs else reader.kto_records(path, columns))
    columns.add_label_errors(path, fields.labels, broken)
    return records, columns, broken


TOKENIZER = chatml_tokenizer()


def splits(data_prefix: object, tmp_path: Path, splits_string: str | None = None, **changes: object) -> Splits[KTODataset]:
    settings: dict = {"kind": KTO_EXAMPLES, "make": KTODataset, "tokenizer": TOKENIZER, "seq_length": 32}
    settings |= {"truncation_mode": "keep_end", "seed": 5, "cache_dir": tmp_path / "cache", **changes}
    return build_splits(data_prefix=data_prefix, splits_string=splits_string, **settings)


def train_split(data_prefix: object, tmp_path: Path, splits_string: str | None = None, **changes: object) -> KTODataset:
    train = splits(data_prefix, tmp_path, splits_string, **changes).train
    assert train is not None
    return train


def prompts(dataset: KTODataset | None) -> list[str]:
    assert dataset is not None
    return [TOKENIZER.decode(row.prompt_ids) for row in dataset.__getitems__(range(len(dataset)))]


def named(count: int, name: str = "row", first: int = 0) -> list[str]:
    """The prompts of :func:`numbered_rows`."""
    return [f"{name} {i}:" for i in range(first, count)]
