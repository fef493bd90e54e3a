"""Hostile models, tokenizers and templates: each is refused with the file's name and a remedy.

What their files show is found by the launcher, before anything is started; the rest by the functions that read them on the
ranks, which raise nothing but a UserError: any other error would end a run with a traceback, and fails a test here.
"""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest

from nemo_kto.data.tokens.chat_template import load_tokenizer
from nemo_kto.errors import UserError
from nemo_kto.model_files.safetensors_files import find_weights
from tests.helpers.messages import Message, assert_names, raises
from tests.hostile.folders import (
    APERTUS,
    GONE,
    GRANITE,
    LFM,
    NEMOTRON,
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
    made,
    ranks_say,
    removed,
    replaced_by_pipe,
    shapes,
    shard,
    write,
)

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER, TEMPLATE = "tokenizer.json", "chat_template.jinja"
NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"
CODE = fields("tokenizer_config.json", tokenizer_class="Mine", auto_map={"AutoTokenizer": ["mine.Mine", None]})
NO_MODEL = Message("folder", "config.json", "trainer.json")

MIXER = "model.layers.0.mixer"
MOE, SHARED = "model.layers.0.block_sparse_moe", "model.layers.0.shared_mlp.input_linear"


def nemotron(damage: Break) -> Break:
    return both(made(NEMOTRON), damage)


def granite(damage: Break) -> Break:
    return both(made(GRANITE), damage)


def lfm(damage: Break) -> Break:
    return both(made(LFM), damage)


# The damage, and the launcher's error: the end of the line, or a part of it.
AT_START: dict[str, tuple[Break, Message]] = {
    # config.json as a file
    "config is absent": (removed("config.json"), NO_MODEL),
    "config is a named pipe": (replaced_by_pipe("config.json"), Message("config.json", "FIFO", "download")),
    "config is cut": (cut("config.json", 0.5), Message("config.json", "JSON", "valid")),
    "config nests without end": (content("config.json", b"[" * 200_000), Message("config.json", "JSON")),
    # which model
    "another family": (
        config(architectures=["GPT2LMHeadModel"]),
        Message("architecture must be one of", "docs/reference/supported.md", "GPT2LMHeadModel", "choose")),
    "a newer model of a known family": (
        config(architectures=["Qwen4NextForCausalLM"], model_type="qwen4_next", linear_num_value_heads=32),
        Message("Qwen4NextForCausalLM", "not supported", "linear attention", "supported.md", "choose")),
    "hyper-connections": (
        config(architectures=["DeepseekV4ForCausalLM"], model_type="deepseek_v4", hc_mult=4, index_topk=512),
        Message("deepseek_v4", "hyper-connections", "indexer", "loss of its own", "supported.md")),
    "a part of odd size that rotates": (
        config(architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", qk_rope_head_dim=5),
        Message("qk_rope_head_dim", "even", "5", "correct")),
    "an encoder-decoder model": (
        config(architectures=["T5ForConditionalGeneration"], model_type="t5", is_encoder_decoder=True),
        Message("t5", "trained", "prompt", "choose")),
    "a Llama 4 of several experts a token": (
        config(architectures=["Llama4ForCausalLM"], model_type="llama4_text", num_experts_per_tok=2),
        Message("num_experts_per_tok", "1", "llama4_text", "2", "choose")),
    "a model of images of no known family": (
        config(architectures=["LlavaForConditionalGeneration"], model_type="llava", vision_config={}),
        Message("llava", "images", "choose", "docs/reference/supported.md")),
    "architectures are lists": (config(architectures=[["x"]]), Message("list", "strings", "[['x']]")),
    "model_type of another": (
        config(model_type="qwen2"), Message("model_type", "llama", "LlamaForCausalLM", "qwen2", "correct")),
    "quantized with GPTQ": (
        config(quantization_config={"quant_method": "gptq", "bits": 4}), Message("quant_method", "gptq", "start")),
    "another activation": (config(hidden_act="gelu"), Message("hidden_act", "silu", "gelu", "choose")),
    "tokens that see what comes after them": (
        config(use_bidirectional_attention=True), Message("use_bidirectional_attention", "false", "true", "choose")),
    # sizes
    **{
        f"{name} is {value!r}": (config(**{name: value}), Message(f"{name}", "integer", "1"))
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        for value in (0, "8", None)
    },
    **{
        f"{name} is {value!r}": (config(**{name: value}), Message(f"{name}", "integer", "1"))
        for name in ("intermediate_size", "num_key_value_heads", "max_position_embeddings", "head_dim")
        for value in (0, True)
    },
    "heads and groups": (
        config(num_key_value_heads=3), Message("num_attention_heads", "num_key_value_heads", "2", "3", "correct")),
    "tie_word_embeddings is a string": (
        config(tie_word_embeddings="yes"), Message("tie_word_embeddings", "true", "false", "yes")),
    "several fields": (
        config(hidden_size="8", vocab_size=0, rope_theta="x"),
        Message("hidden_size", "integer", "1", "2147483647", "8", "vocab_size", "0", "rope_theta", "float", "x",
                "correct"),
    ),
    "an LFM2 without kinds of layers": (lfm(config(layer_types=None)), Message("layer_types", "each layer", "none", "add")),
    "a convolution of one token": (lfm(config(conv_L_cache=1)), Message("conv_L_cache", "integer", "2", "1", "correct")),
    # Mamba-2
    "a pattern of fewer layers": (
        nemotron(config(hybrid_override_pattern="M*")),
        Message("hybrid_override_pattern", "3 layers", "num_hidden_layers", "2", "correct")),
    "a pattern with another letter": (
        nemotron(config(hybrid_override_pattern="M*X")), Message("hybrid_override_pattern", "M, *, -, E", "X", "choose")),
    "no pattern": (
        nemotron(config(hybrid_override_pattern=GONE)),
        Message("hybrid_override_pattern", "layers_block_type", "kind", "neither", "add")),
    "a kind of layers that is not there": (
        nemotron(config(layers_block_type=["mamba", "attention", "x"])),
        Message("layers_block_type", "a list of mamba, linear_attention", "or moe", "'x'", "correct")),
    **{
        f"{name} is {value!r}": (nemotron(config(**{name: value})), Message(name, "integer", repr(value), "correct"))
        for name, value in (
            ("mamba_num_heads", "4"), ("mamba_head_dim", 0), ("n_groups", 0), ("ssm_state_size", -3), ("conv_kernel", 1)
        )
    },
    "experts of a Granite that are fewer than chosen": (
        granite(config(num_local_experts=1)), Message("num_experts_per_tok", "at most", "1", "2", "correct")),
    "kinds of a Granite's layers that are fewer": (
        granite(config(layer_types=["mamba"])), Message("layer_types", "2 layers", "1", "correct")),
    **{
        f"{name} of a Granite is {value!r}": (granite(config(**{name: value})), Message(name, *words, repr(value)))
        for name, value, words in (
            ("position_embedding_type", "alibi", ("rope", "nope")),
            ("mamba_d_head", "x", ("integer", "auto")),
            ("mamba_n_groups", 0, ("integer",)),
            ("mamba_d_conv", 1, ("integer",)),
            ("num_local_experts", -1, ("integer", "0")),
            ("shared_intermediate_size", None, ("integer",)),
        )
    },
    # positions
    "rope of a type that is not there": (
        config(rope_scaling={"rope_type": "spiral", "factor": 4.0}), Message("llama3", "spiral")),
    "rope for each layer type": (
        config(rope_parameters={"full_attention": {"rope_type": "default"}}),
        Message("rope_parameters", "all", "one", "full_attention")),
    # weights
    "weights are absent": (removed(WEIGHTS), Message("model.safetensors", "load")),
    "weights are a named pipe": (replaced_by_pipe(WEIGHTS), Message("model.safetensors", "FIFO")),
    "weights are a link that leads out": (
        linked(WEIGHTS, "/proc/self/mem"), Message("model.safetensors", "file", "folder", "link", "/proc/")),
    "the index is a link that leads out": (
        both(
            lambda folder: write(folder.parent / INDEX, {"weight_map": {NORM: WEIGHTS}}),
            linked(INDEX, f"../{INDEX}", new=True),
        ),
        Message(INDEX, "file", "folder", "link"),
    ),
    "the index names a way out and back": (indexed({"weight_map": {NORM: f"a/../{WEIGHTS}"}}), Message("copy")),
    "the index names an absolute path": (
        indexed({"weight_map": {NORM: "/proc/self/mem"}}), Message("all", "files", "/proc/self/mem", "copy")),
    "the model has code of its own": (
        config(architectures=["Mine"], model_type="mine", auto_map={"AutoConfig": "mine.Mine"}, vocab_size=None),
        Message("architecture", "'Mine'", "mine", "not supported", "choose")),
    "the tokenizer has code of its own": (
        both(CODE, content("tokenizer.model", b"\n\x0e\n\x05<unk>"), removed(TOKENIZER)),
        Message("tokenizer_config.json", "auto_map", "AutoTokenizer", "mine.Mine", "None")),
    "weights are a pickle": (content(WEIGHTS, b"PK\x03\x04" + bytes(200)), Message("model.safetensors")),
    "weights are cut in the values": (cut(WEIGHTS, 0.9), Message("download")),
    "a weight whose name controls the terminal": (
        header(lambda known: known.update({"\x1b[2J\n" + "x" * 100_000: {}})), Message(WEIGHTS, r"\x1b[2J")),
    "a negative shape": (header(lambda known: known[NORM].update(shape=[-8])), Message(NORM)),
    "a shape that the bytes do not have": (
        header(lambda known: known[NORM].update(shape=[9])), Message("contradicts", "itself")),
    "weights that overlap": (
        header(lambda known: known[NORM].update(data_offsets=[0, 32])), Message(WEIGHTS, "byte 0 instead of", "download")),
    "a number as metadata": (
        header(lambda known: known.update(__metadata__={"a": 1})),
        Message(WEIGHTS, "metadata", "{'a': 1}", "strings", "download")),
    "an empty weight of 2^70 rows": (
        header(lambda known: known.update(more={"dtype": "F32", "shape": [0, 2**70], "data_offsets": [0, 0]})),
        Message(WEIGHTS, "the number 1180591620717411303424", "download")),
    "a name with half a character": (
        header(lambda known: known.update({"\ud800": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}})),
        Message(WEIGHTS, "surrogates", "download")),
    "fp8": (shapes({}, "F8_E4M3"), Message("F8_E4M3", "F64", "F32", "F16", "BF16")),
    "the index names a file that is not there": (
        indexed({"weight_map": {NORM: "model-00001-of-00002.safetensors"}}), Message("model-00001-of-00002.safetensors")),
    "the index names another file than the one with the weight": (
        both(shard("b.safetensors", "b"), indexed({"weight_map": {NORM: "b.safetensors", EMBEDDING: WEIGHTS}})),
        Message(INDEX, "b.safetensors", NORM)),
    "a weight in two files of the index": (
        both(shard("b.safetensors", NORM), indexed({"weight_map": {NORM: "b.safetensors", EMBEDDING: WEIGHTS}})),
        Message(NORM, "b.safetensors", WEIGHTS)),
    # tokenizer and template
    "no tokenizer": (removed(TOKENIZER), Message("tokenizer", "tokenizer.json", "tokenizer.model", "none", "files")),
    "a vocabulary of tiktoken, as of Kimi": (
        both(CODE, content("tiktoken.model", b"IQ== 0\nIg== 1\n"), removed(TOKENIZER)),
        Message("tokenizer.json", "tiktoken.model", "code", "docs/guides/models.md")),
    "a vocabulary of tiktoken under the name of SentencePiece": (
        both(content("tokenizer.model", b"IQ== 0\nIg== 1\n"), removed(TOKENIZER)),
        Message("tokenizer.json", "tokenizer.model", "tiktoken", "docs/guides/models.md")),
    "a vocabulary of tiktoken, as of Qwen": (
        both(content("qwen.tiktoken", b"IQ== 0\nIg== 1\n"), removed(TOKENIZER)),
        Message("tokenizer.json", "qwen.tiktoken", "docs/guides/models.md")),
    "a vocabulary of mistral-common": (
        both(content("tekken.json", b"{}"), removed(TOKENIZER)),
        Message("tokenizer.json", "tekken.json", "mistral-common", "pip install", "python -c", "save_pretrained")),
    "tokenizer is a named pipe": (replaced_by_pipe(TOKENIZER), Message("tokenizer.json", "FIFO", "copy")),
    "tokenizer is cut": (cut(TOKENIZER, 0.5), Message("tokenizer.json", "JSON", "valid")),
    "tokens beyond the vocabulary": (
        config(vocab_size=257),
        Message("tokenizer.json", "vocab_size", "257", "257", "<|im_end|>", "tokenizer", "resize_token_embeddings")),
    "an EOS token beyond the vocabulary": (
        fields("tokenizer_config.json", eos_token="<end>"),
        Message("tokenizer_config.json", "vocab_size", "259", "259", "<end>", "resize_token_embeddings")),
    "no EOS token": (
        fields("tokenizer_config.json", eos_token=None),
        Message("tokenizer_config.json", "tokenizer", "EOS", "none", "eos_token")),
}  # fmt: skip

# What only reading shows, on the ranks.
ON_RANKS: dict[str, tuple[Break, Message]] = {
    "a weight is missing": (shapes({NORM: None}), Message("1", "differences", "missing", NORM)),
    "a weight of another shape": (shapes({NORM: (9,)}), Message(NORM, "[8]", "[9]")),
    "more layers than weights": (config(num_hidden_layers=9000), Message("80982", "differences")),
    "heads that are no multiple of their groups": (
        nemotron(config(n_groups=3)), Message("mamba_num_heads", "divisible", "n_groups", "4", "3", "correct")),
    "limits of steps in the wrong order": (
        nemotron(config(time_step_limit=[1.0, 0.5])), Message("time_step_limit", "smallest", "[1.0, 0.5]", "correct")),
    "only one limit of steps": (nemotron(config(time_step_limit=[0.5])), Message("time_step_limit", "[0.5]", "correct")),
    "Mamba-2 with biases": (nemotron(config(use_bias=True)), Message("use_bias", "false", "true", "choose")),
    "no decays": (nemotron(shapes({f"{MIXER}.A_log": None})), Message("missing", f"{MIXER}.A_log", "download")),
    "too many decays": (nemotron(shapes({f"{MIXER}.A_log": (5,)})), Message(f"{MIXER}.A_log", "[4]", "[5]", "download")),
    "a convolution without its middle dimension": (
        nemotron(shapes({f"{MIXER}.conv1d.weight": (28, 4)})), Message(f"{MIXER}.conv1d.weight", "[28, 1, 4]", "[28, 4]")),
    "an input projection without the steps": (
        nemotron(shapes({f"{MIXER}.in_proj.weight": (44, 8)})), Message(f"{MIXER}.in_proj.weight", "[48, 8]", "[44, 8]")),
    "another size of the state": (
        nemotron(config(ssm_state_size=4)),
        Message(f"{MIXER}.in_proj.weight", "[52, 8]", "[48, 8]", f"{MIXER}.conv1d.bias", "[32]", "[28]")),
    "a Granite with biases in Mamba-2": (
        granite(config(mamba_proj_bias=True)), Message("mamba_proj_bias", "false", "true", "choose")),
    "heads of a Granite that are no multiple of their groups": (
        granite(config(mamba_n_groups=3)), Message("mamba_n_heads", "mamba_n_groups", "4", "3", "correct")),
    "a Nemotron whose experts have a smaller width than the layers": (
        nemotron(config(moe_latent_size=64)), Message("moe_latent_size", "null", "64", "choose")),
    "a Granite with another layer": (
        granite(config(layer_types=["mamba", "conv"])), Message("config.json", "linear_attention", "conv")),
    "a Granite whose heads do not fit": (granite(config(mamba_d_head=5)), Message("config.json", "transformers", "correct")),
    "experts of a Granite without their router": (
        granite(shapes({f"{MOE}.router.layer.weight": None})), Message("missing", f"{MOE}.router.layer.weight", "download")),
    "experts of a Granite that are too few": (
        granite(shapes({f"{MOE}.input_linear.weight": (3, 24, 8)})),
        Message(f"{MOE}.input_linear.weight", "[4, 24, 8]", "[3, 24, 8]")),
    "a shared expert of a Granite without its gate": (
        granite(shapes({f"{SHARED}.weight": (6, 8)})), Message(f"{SHARED}.weight", "[12, 8]", "[6, 8]")),
    "an LFM2 with biases": (lfm(config(conv_bias=True)), Message("conv_bias", "false", "true", "choose")),
    "an LFM2 whose router has no bias": (
        lfm(config(use_expert_bias=False)), Message("use_expert_bias", "true", "false", "choose")),
    "an LFM2 with another layer": (
        lfm(config(layer_types=["conv", "mamba"])), Message("layer_types", "full_attention, conv", "linear_attention")),
    "an LFM2 whose convolutions combine other tokens": (
        lfm(config(conv_L_cache=4)), Message("layers.0.conv.conv.weight", "[8, 1, 4]", "[8, 1, 3]")),
    "an Apertus with another xIELU": (
        both(made(APERTUS), shapes({"model.layers.1.mlp.act_fn.beta": ()})),
        Message("model.safetensors", "layers.1.mlp.act_fn.beta", "0.5", "0.0", "choose")),
    "rope without its numbers": (
        config(rope_scaling={"rope_type": "llama3", "factor": 8.0}),
        Message("config.json")),  # a set, in any order
    "a tokenizer with merges of nothing": (
        fields(TOKENIZER, model={"type": "BPE", "vocab": {"a": 0}, "merges": ["b c"]}), Message("tokenizer", "loaded")),
    "an EOS token of another file beyond the vocabulary": (
        lambda folder: write(folder / "special_tokens_map.json", {"eos_token": "<new>"}),
        Message("vocab_size", "259", "259", "<new>", "resize_token_embeddings")),
    "a template that is absent": (removed(TEMPLATE), Message("template", "messages")),
    "a template that raises": (content(TEMPLATE, b"{{ raise_exception('no') }}"), Message("template", "messages", "no")),
    "a regular expression that takes too long": (
        both(
            fields(TOKENIZER, pre_tokenizer={"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated",
                                             "invert": False}),
            content(TEMPLATE, b"{{ 'x' * 60 }}{% for message in messages %}{{ message.content }}{% endfor %}"),
        ),
        Message("tokenizer.json")),
    "a template that reaches out": (
        content(TEMPLATE, b"{{ ''.__class__.__mro__[1].__subclasses__() }}"), Message("messages", "refuses")),
    "a template that needs all memory": (
        content(TEMPLATE, b"{{ 'x' * 10**11 }}"), Message("chat_template.jinja", "1", "GiB")),
    "a template that forgets the answer": (
        content(TEMPLATE, b"{{ messages[0].content }}{{ messages | length }}"), Message("template", "prompt", "answer")),
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
    assert {found.file.name for found in find_weights(model).values()} == {WEIGHTS}
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
    overrides = "model.pipeline_model_parallel_size=2 trainer.devices=2 model.data.seq_length=65 model.optim.lr=nan"
    found = launcher_says(model, here / "rows.jsonl", *overrides.split())
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


LONGROPE = config(
    rope_scaling={
        "rope_type": "longrope", "short_factor": [1.0] * 2, "long_factor": [2.0] * 2, "original_max_position_embeddings": 32,
    }
)  # fmt: skip
PHI3 = config(architectures=["Phi3ForCausalLM"], model_type="phi3")
LORA, TARGETS = "model.peft.peft_scheme=lora", "model.peft.lora_tuning.target_modules"
# The folder, other keys, and the launcher's errors.
WITH_KEYS: dict[str, tuple[Break, list[str], list[Message]]] = {
    "positions within the short factors of LongRoPE": (LONGROPE, ["model.data.seq_length=32"], []),
    "positions beyond the short factors of LongRoPE": (
        LONGROPE, ["model.data.seq_length=33"],
        [Message("model.data.seq_length", "original_max_position_embeddings", "32", "/model", "33", "use")]),
    "adapters of layers that Phi 3 has": (PHI3, [LORA, f"{TARGETS}=[attention_dense,mlp,gate_up_proj]"], []),
    "adapters of layers that Phi 3 fuses": (
        PHI3, [LORA, f"{TARGETS}=[attention_dense,mlp,q_proj]"],
        [Message(TARGETS, "phi3", "got q_proj, ", "o_proj", "down_proj", "gate_up_proj", "model.peft.peft_scheme=none")]),
    "tensor parallelism that does not divide the MLP": (
        config(), ["model.tensor_model_parallel_size=8", "trainer.devices=8"],
        [Message("model.tensor_model_parallel_size", "intermediate_size", "12", "/model", "8", "6")]),
    "messages without a template": (
        both(
            removed(TEMPLATE),
            lambda folder: write(
                folder.parent / "rows.jsonl", {"messages": [{"role": "user", "content": "p"}], "label": True}
            ),
        ),
        [],
        [Message("model.data.data_prefix", "strings", "tokenizer", "template", "messages", "/rows.jsonl",
                 "chat_template.jinja", "/model", "prompts", "answers")]),
}  # fmt: skip


@pytest.mark.parametrize("case", WITH_KEYS)
def test_keys_that_a_model_does_not_support(here: Path, case: str) -> None:
    breaks, keys, expected = WITH_KEYS[case]
    breaks(here / "model")
    assert launcher_says(here / "model", here / "rows.jsonl", *keys) == expected


def test_adapters_of_layers_that_a_model_lacks(here: Path) -> None:
    """Without layers of one MLP, this family has only experts that it joins."""
    kind, key = {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe"}, "mlp_only_layers"
    lora = ["model.peft.peft_scheme=lora", "model.peft.lora_tuning.target_modules=[attention,mlp_fc1]"]
    for dense, wrong in (([0], []), ([], [Message("qwen3_vl_moe", "mlp_fc1", "q_proj, k_proj, v_proj, o_proj,", "none")])):
        text = {"model_type": "qwen3_vl_moe_text", "num_hidden_layers": 2, "num_experts": 4, key: dense}
        config(**kind, text_config=text)(here / "model")
        found = launcher_says(here / "model", here / "rows.jsonl", *lora)
        assert [line for line in found if "target_modules" in line] == wrong


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
    config(auto_map=names)(here / "model")  # transformers has the class itself
    assert launcher_says(here / "model", here / "rows.jsonl") == []
    assert ranks_say(here / "model") is None
    fields("tokenizer_config.json", tokenizer_class="Tokenizer", auto_map=names)(here / "model")
    assert launcher_says(here / "model", here / "rows.jsonl") == []  # tokenizer.json needs no code
    assert ranks_say(here / "model") is None
    both(removed(TOKENIZER), content("vocab.json", b"{}"))(here / "model")
    (line,) = launcher_says(here / "model", here / "rows.jsonl")
    assert_names(line, "tokenizer_config.json", "auto_map")
    assert_names(ranks_say(here / "model"), "tokenizer_config.json", "auto_map")
    config(architectures=["Mine"], model_type="mine")(here / "model")
    assert_names(ranks_say(here / "model"), "config.json", "'Mine'", "not supported")
    config(architectures=["LlamaForCausalLM"], model_type="llama")(here / "model")
    with raises(UserError, "tokenizer_config.json", "auto_map"):
        load_tokenizer(here / "model")
    assert not (here / "marker").exists()
