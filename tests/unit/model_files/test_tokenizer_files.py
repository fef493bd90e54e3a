"""Files of the model folder that are copied into a checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nemo_kto.errors import UserError
from nemo_kto.model_files import companion_files as content
from nemo_kto.model_files.companion_files import copy_companions, model_config, read_companions, with_dtype
from tests.helpers.messages import Message

NEEDED = {
    "config.json": b"{}",
    "generation_config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer.model": bytes(range(256)),
    "tokenizer.model.v3": b"sentencepiece",
    "sentencepiece.bpe.model": b"sentencepiece",
    "tekken.json": b"{}",
    "params.json": b"{}",
    "tiktoken.model": b"IQ== 0",
    "qwen.tiktoken": b"IQ== 0",
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tools.jinja": b"{{ tools }}",
    "README.md": b"# The model",
    "LICENSE": b"Permission is granted.",
}
OTHERS = ("model.safetensors", "pytorch_model.bin", "training_args.json", "notes.txt")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for name, data in NEEDED.items():
        (tmp_path / "model" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "model" / name).write_bytes(data)
    for name in OTHERS:
        (tmp_path / "model" / name).write_bytes(b"large")
    return tmp_path / "model"


def test_only_configuration_tokenizer_templates_license_and_card_are_copied(model: Path) -> None:
    for file in model.rglob("*"):
        file.chmod(0o500 if file.is_dir() else 0o400)
    assert read_companions(model, into="the checkpoints") == NEEDED
    model.joinpath("additional_chat_templates").chmod(0o700)


def test_adapters_get_the_files_of_the_tokenizer(model: Path, tmp_path: Path) -> None:
    (target := tmp_path / "adapter").mkdir()
    copy_companions(model, target, only_tokenizer=True)
    found = {file.relative_to(target).as_posix() for file in target.rglob("*") if file.is_file()}
    assert found == NEEDED.keys() - {"config.json", "generation_config.json", "README.md", "LICENSE"}


def test_special_files_are_named_and_skipped(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(model / "merges.txt")
    (model / "vocab.json").symlink_to("nowhere")
    os.mkfifo(model / "tokenizer_2.json")  # other names belong to a tokenizer only where they are files
    (model / "added_tokens.json").mkdir()
    assert read_companions(model, into="the checkpoints") == NEEDED
    reasons = {"merges.txt": "FIFO", "vocab.json": "No such file or directory"}
    expected = [Message(f"{model / name}", "checkpoints", why) for name, why in reasons.items()]
    assert [record.getMessage() for record in caplog.records] == expected


def test_files_that_are_too_large_are_named_and_skipped(
    model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "_MAX_BYTES", 200)
    assert "tokenizer.model" not in read_companions(model, into="the checkpoints")
    text = Message(f"{model}/tokenizer.model", "checkpoints", "200 bytes", "256")
    assert [record.getMessage() for record in caplog.records] == [text]


def test_a_link_within_the_folder_is_followed_and_one_that_leads_out_is_refused(model: Path, tmp_path: Path) -> None:
    (model / "vocab.json").symlink_to("tokenizer.json")
    assert read_companions(model, into="the checkpoints") == NEEDED | {"vocab.json": NEEDED["tokenizer.json"]}
    (tmp_path / "secret").write_text("private")
    (model / "special_tokens_map.json").symlink_to("../secret")
    with pytest.raises(UserError) as caught:
        read_companions(model, into="the checkpoints")
    assert str(caught.value) == Message(
        f"{model}/special_tokens_map.json", "file", "folder", "link", f"{tmp_path}/secret", "download"
    )


def test_the_configuration_of_another_dtype_and_of_an_output_that_is_not_tied(tmp_path: Path) -> None:
    """The name of the dtype is that of the source."""
    fields = {"tie_word_embeddings": True, "tie_embedding": True, "dtype": "float16", "quantization_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert model_config(tmp_path, tied=True)["tie_word_embeddings"] is True
    untied = model_config(tmp_path, tied=False)
    assert with_dtype(untied, "bfloat16") == {"tie_word_embeddings": False, "tie_embedding": False, "dtype": "bfloat16"}
    assert with_dtype({"torch_dtype": "float16"}, "float32") == {"torch_dtype": "float32"}
    assert with_dtype({}, "float32") == {"torch_dtype": "float32"}
