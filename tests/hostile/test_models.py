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

from nemo_kto.checkpoint.safetensors_files import find_weights
from nemo_kto.data.chat import load_tokenizer
from nemo_kto.errors import UserError
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
AGAIN = "; download the model again, or write it with save_pretrained"
NAMES = (
    *("Gemma2", "Gemma3", "GptOss", "Llama", "Llama4", "Mistral", "Mixtral", "Olmo2", "Olmo3", "Phi3"),
    *("Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "SmolLM3"),
)
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
FAMILIES = ", ".join(f"{name}ForCausalLM" for name in NAMES)
NO_MODEL = "must be a Hugging Face folder (with config.json) or one of our checkpoints (with trainer.json)"

# What is broken, and what the launcher says of it: the end of the line, or a part of it.
AT_START: dict[str, tuple[Break, str]] = {
    # config.json as a file
    "config is absent": (removed("config.json"), NO_MODEL),
    "config is a folder": (replaced_by_folder("config.json"), ", where config.json is a folder; download it"),
    "config is a named pipe": (replaced_by_pipe("config.json"), ", where config.json is a named pipe (FIFO); download it"),
    "config is a link to itself": (linked("config.json", "config.json"), NO_MODEL),
    "config is a link to nowhere": (linked("config.json", "nowhere"), NO_MODEL),
    "config cannot be read": (
        linked("config.json", "/proc/self/mem"),
        "config.json cannot be read: Input/output error" + AGAIN,
    ),
    "config is empty": (
        content("config.json", b""),
        "config.json must be JSON, got something else (Expecting value: line 1",
    ),
    "config is cut": (cut("config.json", 0.5), "config.json must be JSON, got something else ("),
    "config is text": (content("config.json", b"not found"), "config.json must be JSON, got something else ("),
    "config is a web page": (content("config.json", b"<html><body>404</body></html>"), "config.json must be JSON"),
    "config is binary": (content("config.json", b"\x80\x04\x95\xff\xfe\x00"), "config.json must be JSON"),
    "config is UTF-16": (content("config.json", '{"a": 1}'.encode("utf-16")), "config.json must be JSON"),
    "config is a list": (content("config.json", b"[1, 2]"), "config.json must be a JSON object, got list" + AGAIN),
    "config is null": (content("config.json", b"null"), "config.json must be a JSON object, got NoneType" + AGAIN),
    "config is a string": (content("config.json", b'"llama"'), "config.json must be a JSON object, got str" + AGAIN),
    "config nests without end": (content("config.json", b"[" * 200_000), "config.json must be JSON"),
    "config is a Git LFS pointer": (content("config.json", LFS_POINTER), "config.json must be JSON, but it is a Git LFS"),
    "config is compressed": (content("config.json", gzip.compress(b"{}")), "compressed with gzip; decompress it with"),
    "config is an empty object": (content("config.json", b"{}"), f"the architecture must be one of {FAMILIES}, got ''"),
    # which model
    "another family": (config(architectures=["GPT2LMHeadModel"]), f"must be one of {FAMILIES}, got 'GPT2LMHeadModel'"),
    "an encoder-decoder model": (
        config(architectures=["T5ForConditionalGeneration"], model_type="t5", is_encoder_decoder=True),
        "an encoder-decoder model (t5) cannot be trained: a response must be the continuation of its prompt; choose a "
        "decoder-only model",
    ),
    "is_encoder_decoder is a string": (config(is_encoder_decoder="no"), "encoder_decoder must be true or false, got 'no'"),
    "a limit of zero": (
        config(architectures=["GptOssForCausalLM"], model_type="gpt_oss", swiglu_limit=0.0),
        "swiglu_limit must be a positive, finite number, got 0.0" + AGAIN,
    ),
    "a limit that is null": (config(swiglu_limit=None), "swiglu_limit must be a positive, finite number, got None"),
    "a Llama 4 of several experts a token": (
        config(architectures=["Llama4ForCausalLM"], model_type="llama4_text", num_experts_per_tok=2),
        "num_experts_per_tok must be 1 for llama4_text, got 2: megatron-core multiplies what an expert gets by its "
        "weight only where a token has one expert; choose another model",
    ),
    "a Llama 4 with its images": (
        config(architectures=["Llama4ForConditionalGeneration"], model_type="llama4", vision_config={}),
        "a model of images or sounds (llama4) cannot be trained, only text models; choose another, or save its language "
        "model with save_pretrained as a model of its own",
    ),
    "a model of images": (
        config(architectures=["Gemma3ForConditionalGeneration"], model_type="gemma3", vision_config={}),
        "a model of images or sounds (gemma3) cannot be trained, only text models; choose another, or save its language "
        "model with save_pretrained as a model of its own",
    ),
    "a mixture of experts": (config(architectures=["DeepseekV3ForCausalLM"]), "got 'DeepseekV3ForCausalLM'"),
    "a classifier": (config(architectures=["LlamaForSequenceClassification"]), "got 'LlamaForSequenceClassification'"),
    "architectures is a string": (
        config(architectures="LlamaForCausalLM"),
        "architectures must be a list of strings, got 'Ll",
    ),
    "architectures are numbers": (config(architectures=[1]), "architectures must be a list of strings, got [1]"),
    "architectures are lists": (config(architectures=[["x"]]), "architectures must be a list of strings, got [['x']]"),
    "architectures is null": (config(architectures=None), f"must be one of {FAMILIES}, got ''"),
    "architectures is empty": (config(architectures=[]), f"must be one of {FAMILIES}, got ''"),
    "model_type of another": (
        config(model_type="qwen2"),
        "model_type must be 'llama' for LlamaForCausalLM, got 'qwen2'" + AGAIN,
    ),
    "model_type is absent": (config(model_type=GONE), "model_type must be 'llama' for LlamaForCausalLM, got None" + AGAIN),
    "model_type is a number": (config(model_type=3), "model_type must be a string, got 3" + AGAIN),
    "quantized with GPTQ": (
        config(quantization_config={"quant_method": "gptq", "bits": 4}),
        "the weights must not be quantized, got quant_method 'gptq'; start from the unquantized model",
    ),
    "quantized as only another family may be": (
        config(quantization_config={"quant_method": "mxfp4"}),
        "the weights must not be quantized, got quant_method 'mxfp4'; start from the unquantized model",
    ),
    "quantized by a list": (config(quantization_config=[4]), "quantization_config must be an object, got [4]"),
    "quantized by nothing": (config(quantization_config={}), "must not be quantized, got quant_method 'unknown'"),
    "another activation": (config(hidden_act="gelu"), "hidden_act must be 'silu', got 'gelu'; choose another model"),
    "an activation that is a list": (config(hidden_act=["silu"]), "hidden_act must be a string, got ['silu']"),
    "tokens that see what comes after them": (
        config(use_bidirectional_attention=True),
        "use_bidirectional_attention must be false, got true: no token sees what comes after it; choose another model",
    ),
    "a soft cap that the family does not have": (
        config(attn_logit_softcapping=50.0),
        "attn_logit_softcapping must be null for llama, got 50.0; choose another model",
    ),
    "a soft cap of zero": (config(final_logit_softcapping=0.0), "final_logit_softcapping must be a positive, finite number"),
    "a scalar that is null": (config(query_pre_attn_scalar=None), "query_pre_attn_scalar must be a positive, finite number"),
    "another activation of gemma2": (
        config(architectures=["Gemma2ForCausalLM"], model_type="gemma2", hidden_activation="gelu"),
        "hidden_activation must be 'gelu_pytorch_tanh', got 'gelu'; choose another model",
    ),
    "a bias on the MLP alone": (config(mlp_bias=True), "mlp_bias=true with attention_bias=false is not supported"),
    # sizes
    **{
        f"{name} is {value!r}": (config(**{name: value}), f"{name} must be an integer from 1 to ")
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        for value in (0, -8, "8", None, 10**30, 2.5)
    },
    **{
        f"{name} is {value!r}": (config(**{name: value}), f"{name} must be an integer from 1 to ")
        for name in ("intermediate_size", "num_key_value_heads", "max_position_embeddings", "head_dim")
        for value in (0, [8], True)
    },
    "heads and groups": (
        config(num_key_value_heads=3),
        "num_attention_heads must be divisible by num_key_value_heads, got 2 and 3" + AGAIN,
    ),
    "heads and width": (
        config(num_attention_heads=3, num_key_value_heads=3),
        "hidden_size must be divisible by num_attention_heads, got 8 and 3" + AGAIN,
    ),
    "an odd head": (config(head_dim=3), "head_dim must be even, because rotary embeddings turn pairs of channels, got 3"),
    "rms_norm_eps is a string": (config(rms_norm_eps="1e-5"), "rms_norm_eps must be a positive, finite number, got '1e-5'"),
    "rms_norm_eps is negative": (config(rms_norm_eps=-1e-5), "rms_norm_eps must be a positive, finite number, got -1e-05"),
    "rms_norm_eps is NaN": (content("config.json", b'{"rms_norm_eps": NaN}'), "positive, finite number, got nan"),
    "tie_word_embeddings is a string": (
        config(tie_word_embeddings="yes"),
        "tie_word_embeddings must be true or false, got 'yes'",
    ),
    "attention_bias is a number": (config(attention_bias=1), "attention_bias must be true or false, got 1"),
    "several fields": (
        config(hidden_size="8", vocab_size=0, rope_theta="x"),
        "hidden_size must be an integer from 1 to 2147483647, got '8'; vocab_size must be an integer from 1 to 2147483647, "
        "got 0; rope_theta must be a positive, finite number, got 'x'" + AGAIN,
    ),
    # positions
    "rope_theta is zero": (config(rope_theta=0), "rope_theta must be a positive, finite number, got 0"),
    "rope_scaling is a string": (config(rope_scaling="linear"), "rope_scaling must be an object, got 'linear'"),
    "rope of a type that is not there": (
        config(rope_scaling={"rope_type": "proportional", "factor": 4.0}),
        "the rope type must be one of default, linear, llama3, yarn, dynamic, longrope, got 'proportional'",
    ),
    "rope type is a list": (
        config(rope_scaling={"rope_type": []}),
        "must be one of default, linear, llama3, yarn, dynamic, longrope, got []",
    ),
    "factors of longrope are no list": (
        config(rope_scaling={"rope_type": "longrope", "short_factor": 2.0, "long_factor": [1.0, 0]}),
        "rope_scaling.short_factor must be a list of positive, finite numbers, got 2.0; "
        "rope_scaling.long_factor must be a list of positive, finite numbers, got [1.0, 0]",
    ),
    "rope factor is a string": (
        config(rope_scaling={"rope_type": "linear", "factor": "4"}),
        "rope_scaling.factor must be a positive, finite number, got '4'",
    ),
    "rope for each layer type": (
        config(rope_parameters={"full_attention": {"rope_type": "default"}}),
        "rope_parameters must be the same for all layers, got one set for each of full_attention",
    ),
    "rope for layers with a window is a number": (
        config(architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", rope_parameters={"sliding_attention": 5}),
        "rope_parameters.sliding_attention must be an object, got 5" + AGAIN,
    ),
    "rope of a layer type has a wrong number": (
        config(rope_parameters={"full_attention": {"rope_theta": "x"}}),
        "rope_parameters.full_attention.rope_theta must be a positive, finite number, got 'x'" + AGAIN,
    ),
    "rope for layers with a window of a type that is not there": (
        config(
            architectures=["Gemma3ForCausalLM"],
            model_type="gemma3_text",
            rope_parameters={"sliding_attention": {"rope_type": "made-up"}},
        ),
        "the rope type must be one of default, linear, llama3, yarn, dynamic, longrope, got 'made-up'; choose another model",
    ),
    "layer_types of another number": (
        config(layer_types=["full_attention"]),
        "layer_types must name one type for each of the 2 layers, got 1" + AGAIN,
    ),
    # weights
    "weights are absent": (
        removed(WEIGHTS),
        "must hold its weights as safetensors, but model.safetensors is not there; load",
    ),
    "weights are a folder": (replaced_by_folder(WEIGHTS), "model.safetensors is a folder"),
    "weights are a named pipe": (replaced_by_pipe(WEIGHTS), "model.safetensors is a named pipe (FIFO)"),
    "weights are a Git LFS pointer": (
        content(WEIGHTS, LFS_POINTER),
        "model.safetensors must be a safetensors file, but it is a Git LFS pointer; run `git lfs pull`",
    ),
    "weights are those of llama.cpp": (content(WEIGHTS, b"GGUF\x03" + bytes(99)), "a GGUF model; take the model's safe"),
    "weights are a link to themselves": (linked(WEIGHTS, WEIGHTS), "model.safetensors is not there"),
    "weights are a link that leads out": (
        linked(WEIGHTS, "/proc/self/mem"),
        "model.safetensors must be a file of its folder, got a link to /proc/",
    ),
    "weights are a link to the folder above": (
        both(lambda folder: shutil.move(folder / WEIGHTS, folder.parent), linked(WEIGHTS, f"../{WEIGHTS}", anew=True)),
        f"{WEIGHTS}, which is outside; copy it there, or download the model again",
    ),
    "the index is a link that leads out": (
        both(
            lambda folder: write(folder.parent / INDEX, {"weight_map": {NORM: WEIGHTS}}),
            linked(INDEX, f"../{INDEX}", anew=True),
        ),
        f"{INDEX} must be a file of its folder, got a link to ",
    ),
    "the index names the folder above": (
        indexed({"weight_map": {NORM: f"../{WEIGHTS}"}}),
        f"must hold all its files, got '../{WEIGHTS}', which is outside; copy it there",
    ),
    "the index names a way out and back": (indexed({"weight_map": {NORM: f"a/../{WEIGHTS}"}}), "which is outside; copy it"),
    "the index names an absolute path": (
        indexed({"weight_map": {NORM: "/proc/self/mem"}}),
        "must hold all its files, got '/proc/self/mem', which is outside; copy it there",
    ),
    "the index names no path": (indexed({"weight_map": {NORM: "a\0b"}}), "must hold all its files, got 'a\\x00b', which"),
    "the model has code of its own": (
        config(auto_map={"AutoConfig": "mine.Mine"}),
        "config.json: auto_map must not be set, got {'AutoConfig': 'mine.Mine'}: code that comes with a model is not run; "
        "choose another model, or remove auto_map if transformers has the same classes itself",
    ),
    "the tokenizer has code of its own": (
        fields("tokenizer_config.json", tokenizer_class="Mine", auto_map={"AutoTokenizer": ["mine.Mine", None]}),
        "tokenizer_config.json: auto_map must not be set, got {'AutoTokenizer': ['mine.Mine', None]}: code that comes with",
    ),
    "weights are empty": (
        content(WEIGHTS, b""),
        "a whole safetensors file, but it begins with something else than a header",
    ),
    "weights are text": (content(WEIGHTS, b"Entry not found"), "but it begins with something else than a header; download"),
    "weights are a pickle": (content(WEIGHTS, b"PK\x03\x04" + bytes(200)), "model.safetensors must be a"),
    "weights are cut in the header": (cut(WEIGHTS, 0.1), "must be a whole safetensors file, but it has "),
    "weights are cut in the values": (cut(WEIGHTS, 0.9), "it was cut short or changed; download or write it again"),
    "weights are longer": (lambda folder: (folder / WEIGHTS).open("ab").write(b"more"), "it was cut short or changed"),
    "a header that is no JSON": (content(WEIGHTS, (4).to_bytes(8, "little") + b"nope"), "but its header is no JSON"),
    "a header that is a list": (content(WEIGHTS, (2).to_bytes(8, "little") + b"[]"), "its header is no JSON object"),
    "a header of empty entries": (header(lambda known: known.update({NORM: {}})), f"does not say what {NORM} is"),
    "a weight whose name controls the terminal": (
        header(lambda known: known.update({"\x1b[2J\n" + "x" * 100_000: {}})),
        r"its header does not say what \x1b[2J\nxxx",
    ),
    "a shape of strings": (header(lambda known: known[NORM].update(shape=["8"])), f"contradicts itself about {NORM}"),
    "a negative shape": (header(lambda known: known[NORM].update(shape=[-8])), f"contradicts itself about {NORM}"),
    "a shape that the bytes do not have": (header(lambda known: known[NORM].update(shape=[9])), "contradicts itself about"),
    "int8": (shapes({}, "I8"), "is I8 and not F64, F32, F16 or BF16, perhaps quantized; start from the unquantized model"),
    "fp8": (shapes({}, "F8_E4M3"), "is F8_E4M3 and not F64, F32, F16 or BF16, perhaps quantized"),
    "int32": (shapes({}, "I32"), "is I32 and not F64, F32, F16 or BF16, perhaps quantized"),
    "the index names a file that is not there": (
        indexed({"weight_map": {NORM: "model-00001-of-00002.safetensors"}}),
        "but model-00001-of-00002.safetensors is not there",
    ),
    "the index names a file without the weight": (
        both(shapes({NORM: None}), indexed({"weight_map": {NORM: WEIGHTS}})),
        f"{INDEX} must name the file of each weight, got {WEIGHTS} for {NORM}, which it does not hold; ",
    ),
    "the index names another file than the one with the weight": (
        both(shard("b.safetensors", "b"), indexed({"weight_map": {NORM: "b.safetensors", EMBEDDING: WEIGHTS}})),
        f"{INDEX} must name the file of each weight, got b.safetensors for {NORM}, which it does not hold; ",
    ),
    "a weight in two files of the index": (
        both(shard("b.safetensors", NORM), indexed({"weight_map": {NORM: "b.safetensors", EMBEDDING: WEIGHTS}})),
        f"must hold each weight in one file, got {NORM} in b.safetensors and in {WEIGHTS}; ",
    ),
    "a whole model beside the index of another": (
        both(shard("b.safetensors", NORM), indexed({"weight_map": {NORM: "b.safetensors"}})),
        f"{WEIGHTS} beside {INDEX}, which does not name it; remove the one that is not the model",
    ),
    "the index is a Git LFS pointer": (content(INDEX, LFS_POINTER), f"{INDEX} must be JSON, but it is a Git LFS pointer"),
    "the index is empty": (content(INDEX, b""), f"{INDEX} must be JSON"),
    "the index is a list": (indexed([]), f"{INDEX} must be a JSON object, got list"),
    "the index has no map": (indexed({"metadata": {}}), f"{INDEX} must have a weight_map from the name of each weight"),
    "the map of the index is a list": (indexed({"weight_map": [1]}), f"{INDEX} must have a weight_map"),
    "the map of the index holds numbers": (indexed({"weight_map": {NORM: 1}}), f"{INDEX} must have a weight_map"),
    "the map of the index is empty": (indexed({"weight_map": {}}), f"{INDEX} must have a weight_map"),
    # tokenizer and template
    "no tokenizer": (
        removed(TOKENIZER),
        "must hold a tokenizer (tokenizer.json or tokenizer.model), got none; copy its files",
    ),
    "tokenizer is a folder": (replaced_by_folder(TOKENIZER), "got tokenizer.json, which is a folder; copy its files"),
    "tokenizer is a named pipe": (replaced_by_pipe(TOKENIZER), "got tokenizer.json, which is a named pipe (FIFO); copy its"),
    "tokenizer is a Git LFS pointer": (content(TOKENIZER, LFS_POINTER), "tokenizer.json must be a file of the tokenizer"),
    "tokenizer.model is a Git LFS pointer": (
        both(removed(TOKENIZER), content("tokenizer.model", LFS_POINTER)),
        "tokenizer.model must be a file of the tokenizer, but it is a Git LFS pointer; run `git lfs pull`",
    ),
    "tokenizer_config is a named pipe": (
        replaced_by_pipe("tokenizer_config.json"),
        "tokenizer_config.json cannot be read: it is a named pipe (FIFO) and must be a regular file",
    ),
    "the template is a named pipe": (replaced_by_pipe(TEMPLATE), "chat_template.jinja must be a regular file, got a named"),
    "the template is compressed": (
        content(TEMPLATE, gzip.compress(b"x")),
        "chat_template.jinja must be a file of the tokenizer, but it is compressed with gzip; decompress it with gunzip",
    ),
    "tokenizer is empty": (content(TOKENIZER, b""), "tokenizer.json must be JSON, got something else"),
    "tokenizer is cut": (cut(TOKENIZER, 0.5), "tokenizer.json must be JSON, got something else"),
    "tokenizer is binary": (content(TOKENIZER, bytes(range(256))), "tokenizer.json must be JSON, got something else"),
    "tokenizer is a list": (content(TOKENIZER, b"[]"), "tokenizer.json must be a JSON object, got list"),
    "tokenizer without a model": (content(TOKENIZER, b"{}"), "tokenizer.json must have model.vocab, the id of each token"),
    "tokenizer whose model is a string": (fields(TOKENIZER, model="bpe"), "tokenizer.json must have model.vocab"),
    "tokenizer whose vocabulary is a number": (
        fields(TOKENIZER, model={"vocab": 5}),
        "tokenizer.json must have model.vocab",
    ),
    "tokenizer whose ids are strings": (fields(TOKENIZER, model={"vocab": {"a": "x"}}), "must have model.vocab"),
    "tokenizer whose added tokens are strings": (fields(TOKENIZER, added_tokens=["x"]), "and added_tokens; got something"),
    "tokens beyond the vocabulary": (
        config(vocab_size=257),
        "tokenizer.json: tokens must have ids below the model's vocab_size = 257, got 258 of '<|endoftext|>'; take the "
        "model's own tokenizer, or resize the embedding with resize_token_embeddings",
    ),
    "an EOS token beyond the vocabulary": (
        fields("tokenizer_config.json", eos_token="<end>"),
        "tokenizer_config.json: tokens must have ids below the model's vocab_size = 259, got 259 of '<end>'; take",
    ),
    "special tokens beyond the vocabulary": (
        fields("tokenizer_config.json", additional_special_tokens=["<|im_end|>", "<a>", "<b>"]),
        "tokenizer_config.json: tokens must have ids below the model's vocab_size = 259, got 260 of '<b>'; take",
    ),
    "named special tokens beyond the vocabulary": (
        fields("tokenizer_config.json", extra_special_tokens={"image_token": "<img>"}, chat_token="<chat>"),
        "vocab_size = 259, got 260 of '<img>'",
    ),
    "added tokens beyond the vocabulary": (
        fields("tokenizer_config.json", added_tokens_decoder={"5": {"content": "<added>"}}),
        "vocab_size = 259, got 259 of '<added>'",
    ),
    "tokenizer_config is garbage": (content("tokenizer_config.json", b"{"), "tokenizer_config.json must be JSON"),
    "tokenizer_config is a list": (content("tokenizer_config.json", b"[]"), "tokenizer_config.json must be a JSON object"),
    "no EOS token": (
        fields("tokenizer_config.json", eos_token=None),
        "tokenizer_config.json: the tokenizer must have an EOS token, got none; set eos_token there",
    ),
}  # fmt: skip

# What only reading shows, on the ranks.
ON_RANKS: dict[str, tuple[Break, str]] = {
    "a weight is missing": (shapes({NORM: None}), f"got 1 differences:\n  missing: {NORM}\n  download the model again"),
    "a weight too many": (shapes({"model.layers.7.x": (2,)}), "unexpected: model.layers.7.x"),
    "a weight of another shape": (shapes({NORM: (9,)}), f"{NORM}: expected shape [8], got [9]"),
    "a weight without dimensions": (shapes({NORM: ()}), f"{NORM}: expected shape [8], got []"),
    "a weight transposed": (shapes({EMBEDDING: (8, 259)}), f"{EMBEDDING}: expected shape [259, 8], got [8, 259]"),
    "no weights in the file": (
        content(WEIGHTS, (2).to_bytes(8, "little") + b"{}"), "got 20 differences:\n  missing: model.embed_tokens.weight"),
    "more layers than weights": (config(num_hidden_layers=9000), "got 80982 differences:"),
    "a model of another width": (config(hidden_size=4096, head_dim=4), "expected shape [4096], got [8]"),
    "sizes left out": (config(hidden_size=GONE), "expected shape [259, 4096], got [259, 8]"),
    "rope without its numbers": (
        config(rope_scaling={"rope_type": "llama3", "factor": 8.0}), "config.json"),
    "layer types that are not there": (
        config(architectures=["Qwen2ForCausalLM"], model_type="qwen2", layer_types=["full_attention", "strange"]),
        "config.json"),
    "a rotation of half a head": (config(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}), "config.json"),
    "a tokenizer of an unknown model": (fields(TOKENIZER, model={"type": "Magic", "vocab": {"a": 0}}), "cannot be loaded"),
    "a tokenizer with unknown steps": (
        fields(TOKENIZER, pre_tokenizer={"type": "Magic"}),
        "the tokenizer cannot be loaded: ",
    ),
    "a tokenizer with merges of nothing": (
        fields(TOKENIZER, model={"type": "BPE", "vocab": {"a": 0}, "merges": ["b c"]}), "the tokenizer cannot be loaded: "),
    "a vocabulary with holes below zero": (
        fields(TOKENIZER, model={"type": "WordLevel", "vocab": {"a": -1}, "unk_token": "a"}),
        "the tokenizer cannot be loaded: "),
    "no EOS token anywhere": (
        fields("tokenizer_config.json", eos_token=GONE), "the tokenizer must have an EOS token, got none; set eos_token in"),
    "an EOS token that is a number": (fields("tokenizer_config.json", eos_token=5), "the tokenizer"),
    "a token beyond the vocabulary of another file": (
        lambda folder: write(folder / "special_tokens_map.json", {"additional_special_tokens": ["<new>"]}),
        "tokens must have ids below the model's vocab_size = 259, got 259 of '<new>'; take the model's own tokenizer"),
    "a template that is absent": (removed(TEMPLATE), "the tokenizer's chat template refuses the messages: "),
    "a template that is no template": (
        content(TEMPLATE, b"{% for %}"),
        "the tokenizer's chat template refuses the messages: ",
    ),
    "a template without its end": (
        content(TEMPLATE, b"{% if true %}x"),
        "the tokenizer's chat template refuses the messages: ",
    ),
    "a template that raises": (content(TEMPLATE, b"{{ raise_exception('no') }}"), "chat template refuses the messages: no"),
    "a template that divides by zero": (content(TEMPLATE, b"{{ 1 / 0 }}"), "refuses the messages: division by zero"),
    "a template that asks for what is not there": (content(TEMPLATE, b"{{ messages[9].x.y }}"), "refuses the messages: "),
    "a template whose complaint controls the terminal": (
        content(TEMPLATE, b"{{ raise_exception('\x1b[2J\nnemo-kto: fine' * 10000) }}"),
        r"refuses the messages: \x1b[2J\nnemo-kto: fine",
    ),
    "a regular expression that takes too long": (
        both(
            fields(TOKENIZER, pre_tokenizer={"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated",
                                             "invert": False}),
            content(TEMPLATE, b"{{ 'x' * 60 }}{% for message in messages %}{{ message.content }}{% endfor %}"),
        ),
        "tokenizer.json: the tokenizers library gave up: "),
    "a template that reaches out": (
        content(TEMPLATE, b"{{ ''.__class__.__mro__[1].__subclasses__() }}"),
        "refuses the messages",
    ),
    "a template that needs all memory": (
        content(TEMPLATE, b"{{ 'x' * 10**11 }}"), "chat_template.jinja) must render a row in 1 GiB of memory, needed more"),
    "a template that returns nothing": (content(TEMPLATE, b""), "the tokenizer's chat template"),
    "a template that returns spaces": (content(TEMPLATE, b"  \n"), "the tokenizer's chat template must give text, got none"),
    "a template that is binary": (content(TEMPLATE, b"\xff\x00\xfe"), "tokenizer"),
    "a template that forgets the answer": (
        content(TEMPLATE, b"{{ messages[0].content }}{{ messages | length }}"),
        "the chat template must render the prompt the same with and without the answer after it"),
    "a template that is a number": (
        both(removed(TEMPLATE), fields("tokenizer_config.json", chat_template=5)), "the tokenizer"),
}  # fmt: skip


def test_nothing_is_said_of_what_is_whole(here: Path) -> None:
    assert launcher_says(here / "model", here / "rows.jsonl") == []
    assert ranks_say(here / "model") is None


@pytest.mark.parametrize("case", AT_START)
def test_found_before_anything_starts(here: Path, case: str) -> None:
    breaks, expected = AT_START[case]
    breaks(here / "model")
    said = launcher_says(here / "model", here / "rows.jsonl")
    assert any(expected in line for line in said), said
    assert all(line.startswith("pretrained_checkpoint.restore_from_path ") and str(here / "model") in line for line in said)
    assert all(";" in line for line in said), "a remedy is missing"
    assert_harmless("\n".join(said))
    if NO_MODEL not in expected:
        assert ranks_say(here / "model") is not None


def test_files_that_the_index_does_not_name_are_not_read(here: Path) -> None:
    model = here / "model"
    both(shard("b.safetensors", NORM), indexed({"weight_map": {EMBEDDING: WEIGHTS}}))(model)
    (model / "c.safetensors").write_bytes(b"no header")
    assert {file.name for file, _ in find_weights(model).values()} == {WEIGHTS}
    assert launcher_says(model, here / "rows.jsonl") == []


@pytest.mark.parametrize("case", ON_RANKS)
def test_found_where_it_is_read(here: Path, case: str) -> None:
    breaks, expected = ON_RANKS[case]
    breaks(here / "model")
    said = ranks_say(here / "model")
    assert said is not None
    assert expected in said
    assert ";" in said or "\n  download" in said, "a remedy is missing"
    assert_harmless(said)


def test_all_that_is_wrong_with_a_folder_is_in_one_list(here: Path) -> None:
    model = here / "model"
    config(vocab_size=100, num_hidden_layers=3)(model)
    cut(WEIGHTS, 0.9)(model)
    overrides = [
        "model.pipeline_model_parallel_size=2",
        "trainer.devices=2",
        "model.data.seq_length=65",
        "model.optim.lr=nan",
    ]
    said = launcher_says(model, here / "rows.jsonl", *overrides)
    assert [line.split()[0] for line in said] == [
        "model.optim.lr",
        "pretrained_checkpoint.restore_from_path",
        "model.pipeline_model_parallel_size",
        "model.data.seq_length",
        "pretrained_checkpoint.restore_from_path",
    ]
    assert said[2:4] == [
        f"model.pipeline_model_parallel_size must divide the 3 layers of {model}, got 2; use 1, or "
        "model.num_layers_in_last_pipeline_stage=1",
        f"model.data.seq_length must be at most max_position_embeddings = 64 of {model}, got 65; use 64 or fewer",
    ]


def test_longrope_is_as_long_as_its_short_factors_are_for(here: Path) -> None:
    settings = {"rope_type": "longrope", "short_factor": [1.0] * 2, "long_factor": [2.0] * 2}
    config(rope_scaling={**settings, "original_max_position_embeddings": 32})(here / "model")
    assert launcher_says(here / "model", here / "rows.jsonl", "model.data.seq_length=32") == []
    assert launcher_says(here / "model", here / "rows.jsonl", "model.data.seq_length=33") == [
        f"model.data.seq_length must be at most original_max_position_embeddings = 32 of {here / 'model'}, got 33; "
        "use 32 or fewer"
    ]


def test_adapters_of_layers_that_phi3_fuses(here: Path) -> None:
    config(architectures=["Phi3ForCausalLM"], model_type="phi3")(here / "model")
    lora = ["model.peft.peft_scheme=lora", "model.peft.lora_tuning.target_modules=[attention_dense,mlp,q_proj]"]
    assert launcher_says(here / "model", here / "rows.jsonl", *lora) == [
        "model.peft.lora_tuning.target_modules must be layers that phi3 has by themselves, got mlp, q_proj, of which it "
        "fuses some; use of o_proj, down_proj, or model.peft.peft_scheme=none"
    ]
    lora[1] = "model.peft.lora_tuning.target_modules=[attention_dense,down_proj]"
    assert launcher_says(here / "model", here / "rows.jsonl", *lora) == []


def test_tensor_parallel_sizes_that_the_model_cannot_have(here: Path) -> None:
    overrides = ["model.tensor_model_parallel_size=8", "trainer.devices=8"]
    assert launcher_says(here / "model", here / "rows.jsonl", *overrides) == [
        f"model.tensor_model_parallel_size must divide intermediate_size = 12 of {here / 'model'}, got 8; use 6"
    ]


def test_messages_need_a_template(here: Path) -> None:
    removed(TEMPLATE)(here / "model")
    write(here / "rows.jsonl", {"messages": [{"role": "user", "content": "p"}], "label": True})
    assert launcher_says(here / "model", here / "rows.jsonl") == [
        "model.data.data_prefix must hold plain strings where the tokenizer has no chat template, got messages in "
        f"{here / 'rows.jsonl'}; add chat_template.jinja to {here / 'model'}, or write prompts and answers as strings"
    ]


def test_a_model_in_the_cache_of_hugging_face_is_a_whole_model(here: Path) -> None:
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
    (said,) = launcher_says(model, here / "rows.jsonl")
    assert "got a link to " in said


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
        said = launcher_says(here / "model", here / "rows.jsonl")
        assert all("auto_map must not be set, got" in line for line in said)
        assert "config.json: auto_map must not be set, got" in str(ranks_say(here / "model"))
    assert len(said) == 2
    with pytest.raises(UserError, match=r"tokenizer_config\.json: auto_map must not be set"):
        load_tokenizer(here / "model")
    assert not (here / "marker").exists()
