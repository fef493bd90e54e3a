"""Tokenizers of published folders: read without code and with the same ids, whatever packages are installed."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.integrations.mistral import tokenizer as mistral
from transformers.models.auto import tokenization_auto

from nemo_kto.data.tokens.chat_template import hf_config, load_tokenizer
from nemo_kto.errors import UserError
from nemo_kto.model_files import tokenizer_files
from nemo_kto.model_files.companion_files import copy_companions
from tests.helpers.documented import REPOSITORY, blocks
from tests.helpers.messages import raises
from tests.unit.data.tiny_data import chatml_tokenizer

PAGE = REPOSITORY / "docs" / "guides" / "models.md"
TEXT = "the film was good"
# config.json of Kimi K2, and fields of others that transformers refuses; tokenizer_config.json of Kimi K2 and Moonlight
KIMI_K2: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "model_type": "kimi_k2",
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 50000.0,
    "vocab_size": 163840,
}  # fmt: skip
MOONLIGHT = {**KIMI_K2, "model_type": "deepseek_v3", "rope_scaling": None}
LLAMA4 = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "model_type": "llama4",
    "text_config": {"model_type": "llama4_text", "attn_temperature_tuning": 4},
}
NEMOTRON_NAS = {"model_type": "nemotron-nas", "rope_scaling": {"factor": 8.0, "rope_type": "llama3"}, "rope_theta": 5e5}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
DEVSTRAL = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
CODE = {name: [f"tokenization_{name}.TikTokenTokenizer", None] for name in ("kimi", "moonshot")}
PUBLISHED: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "Kimi K2": (KIMI_K2, {"tokenizer_class": "TikTokenTokenizer", "auto_map": {"AutoTokenizer": CODE["kimi"]}}),
    "Kimi K2 without code": (KIMI_K2, {}),
    "Moonlight": (MOONLIGHT, {"tokenizer_class": "TikTokenTokenizer", "auto_map": {"AutoTokenizer": CODE["moonshot"]}}),
    "Llama 4 Scout": (LLAMA4, {}),
    "Nemotron Super": (NEMOTRON_NAS, {}),
    "Mistral, as mistral-common writes it": (MISTRAL, {"tokenizer_class": "MistralCommonBackend"}),
    "Mistral": (MISTRAL, {"tokenizer_class": "LlamaTokenizerFast"}),
    "Devstral": (DEVSTRAL, {"tokenizer_class": "TokenizersBackend"}),
}


def write(folder: Path, config: Mapping[str, Any], changes: Mapping[str, Any]) -> Path:
    chatml_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


def write_tekken(folder: Path) -> None:
    """The file of mistral-common, with a token for each byte and one more."""
    tokens = [bytes([number]) for number in range(256)] + [b"th"]
    special = [{"rank": rank, "token_str": text} for rank, text in enumerate(("<unk>", "<s>", "</s>", "[INST]", "[/INST]"))]
    content = {
        "config": {"pattern": r"\p{L}+|\s+|.", "default_vocab_size": 262, "default_num_special_tokens": 5, "version": "v7"},
        "vocab": [{"rank": rank, "token_bytes": base64.b64encode(each).decode()} for rank, each in enumerate(tokens)],
        "special_tokens": special,
    }
    (folder / "tekken.json").write_text(json.dumps(content))


@pytest.fixture(params=[False, True], ids=["without", "with"])
def mistral_common(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers as it is with mistral-common: its class for Mistral's models, if they have a tekken.json."""
    if request.param:
        monkeypatch.setattr(mistral, "is_mistral_common_available", lambda: True)
        for kind in ("mistral", "mistral3", "ministral3", "mixtral"):
            monkeypatch.setitem(tokenization_auto.TOKENIZER_MAPPING_NAMES, kind, "MistralCommonBackend")


@pytest.mark.usefixtures("mistral_common")
@pytest.mark.parametrize("published", PUBLISHED)
def test_ids_are_those_of_tokenizer_json(published: str, tmp_path: Path) -> None:
    """In an export too, which plain transformers reads without code."""
    write_tekken(folder := write(tmp_path / "model", *PUBLISHED[published]))
    expected = chatml_tokenizer()
    tokenizer = load_tokenizer(folder)
    assert type(tokenizer).__name__ == "TokenizersBackend"
    assert tokenizer(TEXT)["input_ids"] == expected(TEXT)["input_ids"]
    assert (tokenizer.eos_token_id, tokenizer.chat_template) == (expected.eos_token_id, expected.chat_template)
    (tmp_path / "export").mkdir()
    copy_companions(folder, tmp_path / "export")
    config = {"model_type": "deepseek_v3"} if published.startswith("Kimi") else PUBLISHED[published][0]
    (tmp_path / "export" / "config.json").write_text(json.dumps(config))
    exported = json.loads((tmp_path / "export" / "tokenizer_config.json").read_text())
    assert "auto_map" not in exported
    assert "MistralCommon" not in exported["tokenizer_class"]
    if published not in ("Llama 4 Scout", "Nemotron Super"):
        plain = AutoTokenizer.from_pretrained(tmp_path / "export", trust_remote_code=False, mistral_format=False)
        assert plain(TEXT)["input_ids"] == expected(TEXT)["input_ids"]


def test_the_command_in_the_message_reads_tekken(tmp_path: Path) -> None:
    """Ids of mistral-common: special tokens first, then those of the vocabulary by their ranks."""
    write_tekken(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(MISTRAL))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with raises(UserError, f"{tmp_path}", "tokenizer.json", "tekken.json", "mistral-common") as caught:
        load_tokenizer(tmp_path)
    _, _, code = str(caught.value).partition('python -c "')
    subprocess.run([sys.executable, "-c", code.removesuffix('"')], check=True)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer("the [INST]")["input_ids"] == [5 + 256, 5 + ord("e"), 5 + ord(" "), 3]
    assert (tokenizer.eos_token_id, tokenizer.chat_template) == (2, "{{ messages[0].content }}")


KIMI_CODE = """
class TikTokenTokenizer:
    pat_str = r"[\\p{Han}]+|[\\p{L}&&[^\\p{Han}]]+|."
    special_tokens = {"<|im_end|>": 259, "[EOS]": 258, "[BOS]": 257}
    vocab_file = "FOLDER/tiktoken.model"
    from_pretrained = classmethod(lambda cls, folder: cls())
"""


def test_the_lines_of_the_page_convert_the_vocabulary_of_kimi_k2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rule splits Chinese characters from letters beside them, unlike that of Llama 3; special tokens keep their ids."""
    kimi, (lines,) = PUBLISHED["Kimi K2"], [each.code for each in blocks(PAGE) if "TikTokenConverter" in each.code]
    write(tmp_path, kimi[0], {**kimi[1], "eos_token": "[EOS]", "bos_token": "[BOS]"})
    (tmp_path / "tokenizer.json").unlink()
    ranks = {token: rank for rank, token in enumerate([*(bytes([number]) for number in range(256)), b"a\xe4"])}
    (tmp_path / "tiktoken.model").write_text("".join(f"{base64.b64encode(each).decode()} {ranks[each]}\n" for each in ranks))
    with raises(UserError, f"{tmp_path}", "tokenizer.json", "tiktoken.model", "code", "docs/guides/models.md"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenization_kimi.py").write_text(KIMI_CODE.replace("FOLDER", str(tmp_path)))
    monkeypatch.setitem(sys.modules, "tiktoken", types.ModuleType("tiktoken"))
    monkeypatch.setitem(sys.modules, "tiktoken.load", loader := types.ModuleType("tiktoken.load"))
    monkeypatch.setattr(loader, "load_tiktoken_bpe", lambda file: ranks, raising=False)
    exec(lines.replace("FOLDER", str(tmp_path)), {})
    assert load_tokenizer(tmp_path)("a\u4f60[EOS]")["input_ids"] == [ord("a"), *"\u4f60".encode(), 258]


@pytest.mark.parametrize("name", ["tokenizer.model", "spiece.model"])
def test_a_sentencepiece_model_needs_its_package(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, transformers reads the file as one of tiktoken."""
    (tmp_path / name).write_bytes(b"\n\x0e\n\x05<unk>")
    monkeypatch.setattr(tokenizer_files, "find_spec", lambda name: None)
    with raises(UserError, f"{tmp_path / name}", "sentencepiece", "installed", "none", "pip install"):
        load_tokenizer(tmp_path)
    shutil.copytree(write(tmp_path / "other", MISTRAL, {}), tmp_path, dirs_exist_ok=True)
    assert load_tokenizer(tmp_path)(TEXT)["input_ids"] == chatml_tokenizer()(TEXT)["input_ids"]


def test_an_alias_of_a_model_type_is_read_wherever_transformers_reads_a_configuration(tmp_path: Path) -> None:
    config = hf_config(write(tmp_path, KIMI_K2, {}))
    assert (config.model_type, config.rope_parameters["factor"], config.vocab_size) == ("deepseek_v3", 32.0, 163840)
