"""Hostile models, tokenizers and templates: each is refused with the file's name and a remedy.

What their files show is found by the launcher, before anything is started; the rest by the functions that read them on the
ranks, which raise nothing but a UserError: any other error would end a run with a traceback, and fails a test here.
"""

from __future__ import annotations

import gzip
import io
import shutil
from pathlib import Path

import pytest

from nemo_kto.artifacts.safetensors_files import find_weights
from nemo_kto.data.tokens.chat import load_tokenizer
from nemo_kto.errors import UserError
from tests.helpers.messages import Message, assert_names, raises
from tests.hostile.folders import (
    GONE,
    Break,
    assert_harmless,
    both,
    config,
    content,
    cut,
    fields,
    header,
    indexed,
    launcher_says,
    linked,
    ranks_say,
    removed,
    replaced_by_folder,
    replaced_by_pipe,
    shapes,
    shard,
    write,
)

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER, TEMPLATE = "tokenizer.json", "chat_template.jinja"
NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"
NAMES = (
    *("Gemma2", "Gemma3", "GptOss", "Llama", "Llama4", "Mistral", "Mixtral", "Olmo2", "Olmo3", "Phi3"),
    *("Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "SmolLM3"),
)
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
FAMILIES = ", ".join(f"{name}ForCausalLM" for name in NAMES)
NO_MODEL = Message("folder", "config.json", "trainer.json")

# The damage, and the launcher's error: the end of the line, or a part of it.
AT_START: dict[str, tuple[Break, Message]] = {
    # config.json as a file
    "config is absent": (removed("config.json"), NO_MODEL),
    "config is a folder": (replaced_by_folder("config.json"), Message("config.json", "folder", "download")),
    "config is a named pipe": (replaced_by_pipe("config.json"), Message("config.json", "FIFO", "download")),
    "config is a link to itself": (linked("config.json", "config.json"), NO_MODEL),
    "config is a link to nowhere": (linked("config.json", "nowhere"), NO_MODEL),
    "config cannot be read": (
        linked("config.json", "/proc/self/mem"),
        Message("config.json", "read", "Input/output", "save_pretrained"),
    ),
    "config is empty": (
        content("config.json", b""),
        Message("config.json", "JSON", "valid", "value", "1"),
    ),
    "config is cut": (cut("config.json", 0.5), Message("config.json", "JSON", "valid")),
    "config is text": (content("config.json", b"not found"), Message("config.json", "JSON", "valid")),
    "config is a web page": (content("config.json", b"<html><body>404</body></html>"), Message("config.json", "JSON")),
    "config is binary": (content("config.json", b"\x80\x04\x95\xff\xfe\x00"), Message("config.json", "JSON")),
    "config is UTF-16": (content("config.json", '{"a": 1}'.encode("utf-16")), Message("config.json", "JSON")),
    "config is a list": (
        content("config.json", b"[1, 2]"),
        Message("config.json", "JSON", "object", "list", "save_pretrained"),
    ),
    "config is null": (
        content("config.json", b"null"),
        Message("config.json", "JSON", "object", "NoneType", "save_pretrained"),
    ),
    "config is a string": (
        content("config.json", b'"llama"'),
        Message("config.json", "JSON", "object", "str", "save_pretrained"),
    ),
    "config nests without end": (content("config.json", b"[" * 200_000), Message("config.json", "JSON")),
    "config is a Git LFS pointer": (
        content("config.json", LFS_POINTER),
        Message("config.json", "JSON", "Git LFS"),
    ),
    "config is compressed": (
        content("config.json", gzip.compress(b"{}")),
        Message("config.json", "gzip", "gunzip"),
    ),
    "config is an empty object": (content("config.json", b"{}"), Message(FAMILIES, "''")),
    # which model
    "another family": (config(architectures=["GPT2LMHeadModel"]), Message(FAMILIES, "GPT2LMHeadModel")),
    "an encoder-decoder model": (
        config(architectures=["T5ForConditionalGeneration"], model_type="t5", is_encoder_decoder=True),
        Message("t5", "trained", "prompt", "choose"),
    ),
    "is_encoder_decoder is a string": (
        config(is_encoder_decoder="no"),
        Message("is_encoder_decoder", "true", "false", "no"),
    ),
    "a limit of zero": (
        config(architectures=["GptOssForCausalLM"], model_type="gpt_oss", swiglu_limit=0.0),
        Message("swiglu_limit", "float", "0.0", "save_pretrained"),
    ),
    "a limit that is null": (
        config(architectures=["GptOssForCausalLM"], model_type="gpt_oss", swiglu_limit=None),
        Message("swiglu_limit", "float", "None"),
    ),
    "a Llama 4 of several experts a token": (
        config(architectures=["Llama4ForCausalLM"], model_type="llama4_text", num_experts_per_tok=2),
        Message("num_experts_per_tok", "1", "llama4_text", "2", "choose"),
    ),
    "a Llama 4 with its images": (
        config(architectures=["Llama4ForConditionalGeneration"], model_type="llama4", vision_config={}),
        Message("llama4", "save_pretrained"),
    ),
    "a model of images": (
        config(architectures=["Gemma3ForConditionalGeneration"], model_type="gemma3", vision_config={}),
        Message("gemma3", "save_pretrained"),
    ),
    "a mixture of experts": (config(architectures=["DeepseekV3ForCausalLM"]), Message("DeepseekV3ForCausalLM")),
    "a classifier": (config(architectures=["LlamaForSequenceClassification"]), Message("LlamaForSequenceClassification")),
    "architectures is a string": (
        config(architectures="LlamaForCausalLM"),
        Message("list", "strings", "LlamaForCausalLM"),
    ),
    "architectures are numbers": (config(architectures=[1]), Message("list", "strings", "[1]")),
    "architectures are lists": (config(architectures=[["x"]]), Message("list", "strings", "[['x']]")),
    "architectures is null": (config(architectures=None), Message(FAMILIES, "''")),
    "architectures is empty": (config(architectures=[]), Message(FAMILIES, "''")),
    "model_type of another": (
        config(model_type="qwen2"),
        Message("model_type", "llama", "LlamaForCausalLM", "qwen2", "save_pretrained"),
    ),
    "model_type is absent": (
        config(model_type=GONE),
        Message("model_type", "llama", "LlamaForCausalLM", "None", "save_pretrained"),
    ),
    "model_type is a number": (config(model_type=3), Message("model_type", "string", "3", "save_pretrained")),
    "quantized with GPTQ": (
        config(quantization_config={"quant_method": "gptq", "bits": 4}),
        Message("quant_method", "gptq", "start"),
    ),
    "quantized as only another family may be": (
        config(quantization_config={"quant_method": "mxfp4"}),
        Message("quant_method", "mxfp4", "start"),
    ),
    "quantized by a list": (config(quantization_config=[4]), Message("quantization_config", "object", "[4]")),
    "quantized by nothing": (config(quantization_config={}), Message("quant_method", "unknown")),
    "another activation": (config(hidden_act="gelu"), Message("hidden_act", "silu", "gelu", "choose")),
    "an activation that is a list": (config(hidden_act=["silu"]), Message("hidden_act", "string", "['silu']")),
    "tokens that see what comes after them": (
        config(use_bidirectional_attention=True),
        Message("use_bidirectional_attention", "false", "true", "choose"),
    ),
    "a soft cap that the family does not have": (
        config(attn_logit_softcapping=50.0),
        Message("attn_logit_softcapping", "null", "50.0", "choose"),
    ),
    "a soft cap of zero": (config(final_logit_softcapping=0.0), Message("final_logit_softcapping", "float")),
    "a scalar that is null": (
        config(architectures=["Gemma2ForCausalLM"], model_type="gemma2", query_pre_attn_scalar=None),
        Message("query_pre_attn_scalar", "float"),
    ),
    "another activation of gemma2": (
        config(architectures=["Gemma2ForCausalLM"], model_type="gemma2", hidden_activation="gelu"),
        Message("hidden_activation", "gelu_pytorch_tanh", "gelu", "choose"),
    ),
    "a bias on the MLP alone": (config(mlp_bias=True), Message("mlp_bias=true", "attention_bias=false")),
    # sizes
    **{
        f"{name} is {value!r}": (config(**{name: value}), Message(f"{name}", "integer", "1"))
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        for value in (0, -8, "8", None, 10**30, 2.5)
    },
    **{
        f"{name} is {value!r}": (config(**{name: value}), Message(f"{name}", "integer", "1"))
        for name in ("intermediate_size", "num_key_value_heads", "max_position_embeddings", "head_dim")
        for value in (0, [8], True)
    },
    "heads and groups": (
        config(num_key_value_heads=3),
        Message("num_attention_heads", "num_key_value_heads", "2", "3", "save_pretrained"),
    ),
    "heads and width": (
        config(num_attention_heads=3, num_key_value_heads=3),
        Message("hidden_size", "num_attention_heads", "8", "3", "save_pretrained"),
    ),
    "an odd head": (config(head_dim=3), Message("head_dim", "3")),
    "rms_norm_eps is a string": (config(rms_norm_eps="1e-5"), Message("rms_norm_eps", "float", "1e-5")),
    "rms_norm_eps is negative": (config(rms_norm_eps=-1e-5), Message("rms_norm_eps", "float", "-1e-05")),
    "rms_norm_eps is NaN": (content("config.json", b'{"rms_norm_eps": NaN}'), Message("float", "nan")),
    "tie_word_embeddings is a string": (
        config(tie_word_embeddings="yes"),
        Message("tie_word_embeddings", "true", "false", "yes"),
    ),
    "attention_bias is a number": (config(attention_bias=1), Message("attention_bias", "true", "false", "1")),
    "several fields": (
        config(hidden_size="8", vocab_size=0, rope_theta="x"),
        Message("hidden_size", "integer", "1", "2147483647", "8", "vocab_size", "0", "rope_theta", "float", "x",
                "save_pretrained"),
    ),
    # positions
    "rope_theta is zero": (config(rope_theta=0), Message("rope_theta", "float", "0")),
    "rope_scaling is a string": (config(rope_scaling="linear"), Message("rope_scaling", "object", "linear")),
    "rope of a type that is not there": (
        config(rope_scaling={"rope_type": "proportional", "factor": 4.0}),
        Message("llama3", "proportional"),
    ),
    "rope type is a list": (
        config(rope_scaling={"rope_type": []}),
        Message("llama3", "[]"),
    ),
    "factors of longrope are no list": (
        config(rope_scaling={"rope_type": "longrope", "short_factor": 2.0, "long_factor": [1.0, 0]}),
        Message("rope_scaling.short_factor", "list", "2.0", "rope_scaling.long_factor", "1.0", "0"),
    ),
    "rope factor is a string": (
        config(rope_scaling={"rope_type": "linear", "factor": "4"}),
        Message("rope_scaling.factor", "float", "4"),
    ),
    "rope for each layer type": (
        config(rope_parameters={"full_attention": {"rope_type": "default"}}),
        Message("rope_parameters", "all", "one", "full_attention"),
    ),
    "windowed rope is a number": (
        config(architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", rope_parameters={"sliding_attention": 5}),
        Message("rope_parameters.sliding_attention", "object", "5", "save_pretrained"),
    ),
    "rope of a layer type has a wrong number": (
        config(rope_parameters={"full_attention": {"rope_theta": "x"}}),
        Message("rope_parameters.full_attention.rope_theta", "float", "x", "save_pretrained"),
    ),
    "windowed rope of a type that is not there": (
        config(
            architectures=["Gemma3ForCausalLM"],
            model_type="gemma3_text",
            rope_parameters={"sliding_attention": {"rope_type": "made-up"}},
        ),
        Message("llama3", "made-up", "choose"),
    ),
    "layer_types of another number": (
        config(layer_types=["full_attention"]),
        Message("layer_types", "2", "1", "save_pretrained"),
    ),
    # weights
    "weights are absent": (
        removed(WEIGHTS),
        Message("model.safetensors", "load"),
    ),
    "weights are a folder": (replaced_by_folder(WEIGHTS), Message("model.safetensors", "folder")),
    "weights are a named pipe": (replaced_by_pipe(WEIGHTS), Message("model.safetensors", "FIFO")),
    "weights are a Git LFS pointer": (
        content(WEIGHTS, LFS_POINTER),
        Message("model.safetensors", "Git LFS", "git lfs pull"),
    ),
    "weights are those of llama.cpp": (content(WEIGHTS, b"GGUF\x03" + bytes(99)), Message("model.safetensors", "GGUF")),
    "weights are a link to themselves": (linked(WEIGHTS, WEIGHTS), Message("model.safetensors")),
    "weights are a link that leads out": (
        linked(WEIGHTS, "/proc/self/mem"),
        Message("model.safetensors", "file", "folder", "link", "/proc/"),
    ),
    "weights are a link to the folder above": (
        both(lambda folder: shutil.move(folder / WEIGHTS, folder.parent), linked(WEIGHTS, f"../{WEIGHTS}", new=True)),
        Message(WEIGHTS, "download"),
    ),
    "the index is a link that leads out": (
        both(
            lambda folder: write(folder.parent / INDEX, {"weight_map": {NORM: WEIGHTS}}),
            linked(INDEX, f"../{INDEX}", new=True),
        ),
        Message(INDEX, "file", "folder", "link"),
    ),
    "the index names the folder above": (
        indexed({"weight_map": {NORM: f"../{WEIGHTS}"}}),
        Message("all", "files", f"../{WEIGHTS}", "copy"),
    ),
    "the index names a way out and back": (indexed({"weight_map": {NORM: f"a/../{WEIGHTS}"}}), Message("copy")),
    "the index names an absolute path": (
        indexed({"weight_map": {NORM: "/proc/self/mem"}}),
        Message("all", "files", "/proc/self/mem", "copy"),
    ),
    "the index names no path": (indexed({"weight_map": {NORM: "a\0b"}}), Message("all", "files", "a\\x00b")),
    "the model has code of its own": (
        config(auto_map={"AutoConfig": "mine.Mine"}),
        Message("config.json", "auto_map", "AutoConfig", "mine.Mine", "remove"),
    ),
    "the tokenizer has code of its own": (
        fields("tokenizer_config.json", tokenizer_class="Mine", auto_map={"AutoTokenizer": ["mine.Mine", None]}),
        Message("tokenizer_config.json", "auto_map", "AutoTokenizer", "mine.Mine", "None"),
    ),
    "weights are empty": (
        content(WEIGHTS, b""),
        Message("file"),
    ),
    "weights are text": (content(WEIGHTS, b"Entry not found"), Message("download")),
    "weights are a pickle": (content(WEIGHTS, b"PK\x03\x04" + bytes(200)), Message("model.safetensors")),
    "weights are cut in the header": (cut(WEIGHTS, 0.1), Message("file")),
    "weights are cut in the values": (cut(WEIGHTS, 0.9), Message("download")),
    "weights are longer": (lambda folder: (folder / WEIGHTS).open("ab").write(b"more"), Message("changed", "short")),
    "a header that is no JSON": (content(WEIGHTS, (4).to_bytes(8, "little") + b"nope"), Message("JSON")),
    "a header that is a list": (content(WEIGHTS, (2).to_bytes(8, "little") + b"[]"), Message("JSON", "object")),
    "a header of empty entries": (header(lambda known: known.update({NORM: {}})), Message(NORM)),
    "a weight whose name controls the terminal": (
        header(lambda known: known.update({"\x1b[2J\n" + "x" * 100_000: {}})),
        Message(WEIGHTS, r"\x1b[2J"),
    ),
    "a shape of strings": (header(lambda known: known[NORM].update(shape=["8"])), Message(NORM)),
    "a negative shape": (header(lambda known: known[NORM].update(shape=[-8])), Message(NORM)),
    "a shape that the bytes do not have": (
        header(lambda known: known[NORM].update(shape=[9])),
        Message("contradicts", "itself"),
    ),
    "int8": (shapes({}, "I8"), Message("I8", "F64", "F32", "F16", "BF16", "start")),
    "fp8": (shapes({}, "F8_E4M3"), Message("F8_E4M3", "F64", "F32", "F16", "BF16")),
    "int32": (shapes({}, "I32"), Message("I32", "F64", "F32", "F16", "BF16")),
    "the index names a file that is not there": (
        indexed({"weight_map": {NORM: "model-00001-of-00002.safetensors"}}),
        Message("model-00001-of-00002.safetensors"),
    ),
    "the index is a Git LFS pointer": (content(INDEX, LFS_POINTER), Message(INDEX, "Git LFS", "git lfs pull")),
    "the index names a file without the weight": (
        both(shapes({NORM: None}), indexed({"weight_map": {NORM: WEIGHTS}})),
        Message(INDEX, WEIGHTS, NORM),
    ),
    "the index names another file than the one with the weight": (
        both(shard("b.safetensors", "b"), indexed({"weight_map": {NORM: "b.safetensors", EMBEDDING: WEIGHTS}})),
        Message(INDEX, "b.safetensors", NORM),
    ),
    "a weight in two files of the index": (
        both(shard("b.safetensors", NORM), indexed({"weight_map": {NORM: "b.safetensors", EMBEDDING: WEIGHTS}})),
        Message(NORM, "b.safetensors", WEIGHTS),
    ),
    "a whole model beside the index of another": (
        both(shard("b.safetensors", NORM), indexed({"weight_map": {NORM: "b.safetensors"}})),
        Message(WEIGHTS, INDEX, "remove"),
    ),
    "the index is empty": (content(INDEX, b""), Message(INDEX, "JSON")),
    "the index is a list": (indexed([]), Message(INDEX, "JSON", "object", "list")),
    "the index has no map": (indexed({"metadata": {}}), Message(INDEX, "weight_map")),
    "the map of the index is a list": (indexed({"weight_map": [1]}), Message(INDEX, "weight_map")),
    "the map of the index holds numbers": (indexed({"weight_map": {NORM: 1}}), Message(INDEX, "weight_map")),
    "the map of the index is empty": (indexed({"weight_map": {}}), Message(INDEX, "weight_map")),
    # tokenizer and template
    "no tokenizer": (
        removed(TOKENIZER),
        Message("tokenizer", "tokenizer.json", "tokenizer.model", "none", "files"),
    ),
    "tokenizer is a folder": (replaced_by_folder(TOKENIZER), Message("tokenizer.json", "folder", "copy")),
    "tokenizer is a named pipe": (replaced_by_pipe(TOKENIZER), Message("tokenizer.json", "FIFO", "copy")),
    "tokenizer is a Git LFS pointer": (content(TOKENIZER, LFS_POINTER), Message("tokenizer.json", "Git LFS")),
    "tokenizer.model is a Git LFS pointer": (
        both(removed(TOKENIZER), content("tokenizer.model", LFS_POINTER)),
        Message("tokenizer.model", "Git LFS", "git lfs pull"),
    ),
    "tokenizer_config is a named pipe": (
        replaced_by_pipe("tokenizer_config.json"),
        Message("tokenizer_config.json", "FIFO"),
    ),
    "the template is a named pipe": (replaced_by_pipe(TEMPLATE), Message("chat_template.jinja", "named pipe")),
    "the template is compressed": (
        content(TEMPLATE, gzip.compress(b"x")),
        Message("chat_template.jinja", "gzip", "gunzip"),
    ),
    "tokenizer is empty": (content(TOKENIZER, b""), Message("tokenizer.json", "JSON", "valid")),
    "tokenizer is cut": (cut(TOKENIZER, 0.5), Message("tokenizer.json", "JSON", "valid")),
    "tokenizer is binary": (content(TOKENIZER, bytes(range(256))), Message("tokenizer.json", "JSON", "valid")),
    "tokenizer is a list": (content(TOKENIZER, b"[]"), Message("tokenizer.json", "JSON", "object", "list")),
    "tokenizer without a model": (content(TOKENIZER, b"{}"), Message("tokenizer.json", "model.vocab")),
    "tokenizer whose model is a string": (fields(TOKENIZER, model="bpe"), Message("tokenizer.json", "model.vocab")),
    "tokenizer whose vocabulary is a number": (
        fields(TOKENIZER, model={"vocab": 5}),
        Message("tokenizer.json", "model.vocab"),
    ),
    "tokenizer whose ids are strings": (fields(TOKENIZER, model={"vocab": {"a": "x"}}), Message("model.vocab")),
    "tokenizer whose added tokens are strings": (
        fields(TOKENIZER, added_tokens=["x"]),
        Message("added_tokens", "other"),
    ),
    "tokens beyond the vocabulary": (
        config(vocab_size=257),
        Message("tokenizer.json", "vocab_size", "257", "257", "<|im_end|>", "tokenizer", "resize_token_embeddings"),
    ),
    "an EOS token beyond the vocabulary": (
        fields("tokenizer_config.json", eos_token="<end>"),
        Message("tokenizer_config.json", "vocab_size", "259", "259", "<end>", "resize_token_embeddings"),
    ),
    "tokenizer_config is garbage": (content("tokenizer_config.json", b"{"), Message("tokenizer_config.json", "JSON")),
    "tokenizer_config is a list": (
        content("tokenizer_config.json", b"[]"),
        Message("tokenizer_config.json", "JSON", "object"),
    ),
    "no EOS token": (
        fields("tokenizer_config.json", eos_token=None),
        Message("tokenizer_config.json", "tokenizer", "EOS", "none", "eos_token"),
    ),
}  # fmt: skip

# What only reading shows, on the ranks.
ON_RANKS: dict[str, tuple[Break, Message]] = {
    "a weight is missing": (shapes({NORM: None}), Message("1", "differences", "missing", NORM)),
    "a weight too many": (shapes({"model.layers.7.x": (2,)}), Message("unexpected", "model.layers.7.x")),
    "a weight of another shape": (shapes({NORM: (9,)}), Message(NORM, "[8]", "[9]")),
    "a weight without dimensions": (shapes({NORM: ()}), Message(NORM, "[8]", "[]")),
    "a weight transposed": (shapes({EMBEDDING: (8, 259)}), Message(EMBEDDING, "259", "8")),
    "no weights in the file": (
        content(WEIGHTS, (2).to_bytes(8, "little") + b"{}"),
        Message("20", "differences", "missing", "model.embed_tokens.weight")),
    "more layers than weights": (config(num_hidden_layers=9000), Message("80982", "differences")),
    "a model of another width": (config(hidden_size=4096, head_dim=4), Message("[4096]", "[8]")),
    "sizes left out": (config(hidden_size=GONE), Message("259", "4096", "8")),
    "rope without its numbers": (
        config(rope_scaling={"rope_type": "llama3", "factor": 8.0}),
        Message("config.json")),  # a set, in any order
    "layer types that are not there": (
        config(architectures=["Qwen2ForCausalLM"], model_type="qwen2", layer_types=["full_attention", "strange"]),
        Message("config.json")),
    "a rotation of half a head": (
        config(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        Message("config.json"),
    ),
    "a tokenizer of an unknown model": (
        fields(TOKENIZER, model={"type": "Magic", "vocab": {"a": 0}}),
        Message("cannot", "loaded"),
    ),
    "a tokenizer with unknown steps": (
        fields(TOKENIZER, pre_tokenizer={"type": "Magic"}),
        Message("tokenizer", "loaded"),
    ),
    "a tokenizer with merges of nothing": (
        fields(TOKENIZER, model={"type": "BPE", "vocab": {"a": 0}, "merges": ["b c"]}), Message("tokenizer", "loaded")),
    "a vocabulary with holes below zero": (
        fields(TOKENIZER, model={"type": "WordLevel", "vocab": {"a": -1}, "unk_token": "a"}),
        Message("tokenizer", "loaded")),
    "no EOS token anywhere": (
        fields("tokenizer_config.json", eos_token=GONE), Message("tokenizer", "EOS", "none", "eos_token")),
    "an EOS token that is a number": (fields("tokenizer_config.json", eos_token=5), Message("tokenizer")),
    "an EOS token of another file beyond the vocabulary": (
        lambda folder: write(folder / "special_tokens_map.json", {"eos_token": "<new>"}),
        Message("vocab_size", "259", "259", "<new>", "resize_token_embeddings")),
    "a template that is absent": (removed(TEMPLATE), Message("template", "messages")),
    "a template that is no template": (
        content(TEMPLATE, b"{% for %}"),
        Message("template", "messages"),
    ),
    "a template without its end": (
        content(TEMPLATE, b"{% if true %}x"),
        Message("template", "messages"),
    ),
    "a template that raises": (content(TEMPLATE, b"{{ raise_exception('no') }}"), Message("template", "messages", "no")),
    "a template that divides by zero": (content(TEMPLATE, b"{{ 1 / 0 }}"), Message("messages")),
    "a template that asks for what is not there": (content(TEMPLATE, b"{{ messages[9].x.y }}"), Message("messages")),
    "a template whose complaint controls the terminal": (
        content(TEMPLATE, b"{{ raise_exception('\x1b[2J\nnemo-kto: fine' * 10000) }}"),
        Message("template", r"\x1b[2J\nnemo-kto: fine"),
    ),
    "a regular expression that takes too long": (
        both(
            fields(TOKENIZER, pre_tokenizer={"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated",
                                             "invert": False}),
            content(TEMPLATE, b"{{ 'x' * 60 }}{% for message in messages %}{{ message.content }}{% endfor %}"),
        ),
        Message("tokenizer.json")),
    "a template that reaches out": (
        content(TEMPLATE, b"{{ ''.__class__.__mro__[1].__subclasses__() }}"),
        Message("messages", "refuses"),
    ),
    "a template that needs all memory": (
        content(TEMPLATE, b"{{ 'x' * 10**11 }}"), Message("chat_template.jinja", "1", "GiB")),
    "a template that returns nothing": (content(TEMPLATE, b""), Message("template")),
    "a template that returns spaces": (content(TEMPLATE, b"  \n"), Message("template", "none")),
    "a template that is binary": (content(TEMPLATE, b"\xff\x00\xfe"), Message("tokenizer")),
    "a template that forgets the answer": (
        content(TEMPLATE, b"{{ messages[0].content }}{{ messages | length }}"),
        Message("template", "prompt", "answer")),
    "a template that is a number": (
        both(removed(TEMPLATE), fields("tokenizer_config.json", chat_template=5)), Message("tokenizer")),
}  # fmt: skip


def test_valid_folders_give_no_error(here: Path) -> None:
    assert launcher_says(here / "model", here / "rows.jsonl") == []
    assert ranks_say(here / "model") is None


@pytest.mark.parametrize("case", AT_START)
def test_damage_found_before_the_start(here: Path, case: str) -> None:
    breaks, expected = AT_START[case]
    breaks(here / "model")
    found = launcher_says(here / "model", here / "rows.jsonl")
    assert expected in found
    assert all(line.startswith("pretrained_checkpoint.restore_from_path ") and str(here / "model") in line for line in found)
    assert all(";" in line for line in found), "a remedy is missing"
    assert_harmless("\n".join(found))
    if expected is not NO_MODEL:
        assert ranks_say(here / "model") is not None


def test_files_that_the_index_does_not_name_are_not_read(here: Path) -> None:
    model = here / "model"
    both(shard("b.safetensors", NORM), indexed({"weight_map": {EMBEDDING: WEIGHTS}}))(model)
    (model / "c.safetensors").write_bytes(b"no header")
    assert {file.name for file, _ in find_weights(model).values()} == {WEIGHTS}
    assert launcher_says(model, here / "rows.jsonl") == []


@pytest.mark.parametrize("case", ON_RANKS)
def test_damage_found_on_reading(here: Path, case: str) -> None:
    breaks, expected = ON_RANKS[case]
    breaks(here / "model")
    found = ranks_say(here / "model")
    assert found is not None
    assert found == expected
    assert ";" in found or "\n  download" in found, "a remedy is missing"
    assert_harmless(found)


def test_all_errors_of_a_folder_are_in_one_list(here: Path) -> None:
    model = here / "model"
    config(vocab_size=100, num_hidden_layers=3)(model)
    cut(WEIGHTS, 0.9)(model)
    overrides = [
        "model.pipeline_model_parallel_size=2",
        "trainer.devices=2",
        "model.data.seq_length=65",
        "model.optim.lr=nan",
    ]
    found = launcher_says(model, here / "rows.jsonl", *overrides)
    assert [line.split()[0] for line in found] == [
        "model.optim.lr",
        "pretrained_checkpoint.restore_from_path",
        "model.pipeline_model_parallel_size",
        "model.data.seq_length",
        "pretrained_checkpoint.restore_from_path",
    ]
    assert found[2:4] == [
        Message(
            "model.pipeline_model_parallel_size", "3", f"{model}", "2", "1", "model.num_layers_in_last_pipeline_stage=1"
        ),
        Message("model.data.seq_length", "max_position_embeddings", "64", f"{model}", "65", "use"),
    ]


def test_longrope_is_limited_to_the_length_of_its_short_factors(here: Path) -> None:
    settings = {"rope_type": "longrope", "short_factor": [1.0] * 2, "long_factor": [2.0] * 2}
    config(rope_scaling={**settings, "original_max_position_embeddings": 32})(here / "model")
    assert launcher_says(here / "model", here / "rows.jsonl", "model.data.seq_length=32") == []
    assert launcher_says(here / "model", here / "rows.jsonl", "model.data.seq_length=33") == [
        Message("model.data.seq_length", "original_max_position_embeddings", "32", f"{here / 'model'}", "33", "use")
    ]


def test_adapters_of_layers_that_phi3_fuses(here: Path) -> None:
    config(architectures=["Phi3ForCausalLM"], model_type="phi3")(here / "model")
    lora = ["model.peft.peft_scheme=lora", "model.peft.lora_tuning.target_modules=[attention_dense,mlp,q_proj]"]
    assert launcher_says(here / "model", here / "rows.jsonl", *lora) == [
        Message(
            "model.peft.lora_tuning.target_modules",
            "phi3",
            "mlp",
            "q_proj",
            "o_proj",
            "down_proj",
            "model.peft.peft_scheme=none",
        )
    ]
    lora[1] = "model.peft.lora_tuning.target_modules=[attention_dense,down_proj]"
    assert launcher_says(here / "model", here / "rows.jsonl", *lora) == []


def test_unsupported_tensor_parallel_sizes(here: Path) -> None:
    overrides = ["model.tensor_model_parallel_size=8", "trainer.devices=8"]
    assert launcher_says(here / "model", here / "rows.jsonl", *overrides) == [
        Message("model.tensor_model_parallel_size", "intermediate_size", "12", f"{here / 'model'}", "8", "6")
    ]


def test_messages_need_a_template(here: Path) -> None:
    removed(TEMPLATE)(here / "model")
    write(here / "rows.jsonl", {"messages": [{"role": "user", "content": "p"}], "label": True})
    assert launcher_says(here / "model", here / "rows.jsonl") == [
        Message(
            "model.data.data_prefix",
            "strings",
            "tokenizer",
            "template",
            "messages",
            f"{here / 'rows.jsonl'}",
            "chat_template.jinja",
            f"{here / 'model'}",
            "prompts",
            "answers",
        )
    ]


def test_a_model_in_the_hugging_face_cache_is_complete(here: Path) -> None:
    snapshots, blobs = here / "models--a--b" / "snapshots", here / "models--a--b" / "blobs"
    snapshots.mkdir(parents=True)
    model = (here / "model").rename(snapshots / "0123")
    shutil.copytree(model, blobs)
    for file in model.iterdir():
        linked(file.name, f"../../blobs/{file.name}")(model)
    (here / "model").symlink_to(model)
    for folder in (model, here / "model"):
        assert launcher_says(folder, here / "rows.jsonl") == []
        assert ranks_say(folder) is None
    linked(WEIGHTS, f"../../../models--other/blobs/{WEIGHTS}")(model)
    (found,) = launcher_says(model, here / "rows.jsonl")
    assert found == Message(WEIGHTS, "link", "download")


def test_code_of_a_model_is_never_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    code = (
        f"open({str(here / 'marker')!r}, 'w')\n"
        "from transformers import PretrainedConfig, PreTrainedTokenizerFast\n"
        "class Config(PretrainedConfig): pass\nclass Tokenizer(PreTrainedTokenizerFast): pass\n"
    )
    content("mine.py", code.encode())(here / "model")
    names = {"AutoConfig": "mine.Config", "AutoTokenizer": [None, "mine.Tokenizer"]}
    for breaks in (config(auto_map=names), fields("tokenizer_config.json", tokenizer_class="Tokenizer", auto_map=names)):
        breaks(here / "model")
        found = launcher_says(here / "model", here / "rows.jsonl")
        for line in found:
            assert_names(line, "auto_map")
        assert_names(ranks_say(here / "model"), "config.json", "auto_map")
    assert len(found) == 2
    with raises(UserError, "tokenizer_config.json", "auto_map"):
        load_tokenizer(here / "model")
    assert not (here / "marker").exists()
