"""config.json of published models, and mutants of them: read as transformers reads them, or refused.

Those of Falcon-H1, Ling and MiniMax-M3-VL are composed of fields that other projects publish; the others are the files word
by word.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoConfig

from nemo_kto.architecture.architecture import Architecture, read_architecture
from nemo_kto.architecture.config_fields import LayerRopeFields
from nemo_kto.architecture.config_file import read_config_file
from nemo_kto.architecture.families import FAMILIES, MULTIMODAL, Family
from nemo_kto.architecture.parameters import rank_parameters
from nemo_kto.errors import UserError
from nemo_kto.mixers.param_mapping import Layers
from nemo_kto.model_files.tokenizer_files import image_ids
from nemo_kto.tools.plan import plan_command as plan
from tests.families import IMAGES
from tests.helpers.hf_models import OWN_CODE
from tests.helpers.messages import raises
from tests.helpers.published_configs import COUNTS, NAMES, count, counts, published, write

MODELOPT, LATENT = ("NVIDIA ModelOpt", "unquantized"), ("moe_latent_size", "null", "projection", "choose")
# Pattern of names -> parts of the reason.
REFUSED = {
    "*--DeepSeek-V4-*": ("'DeepseekV4ForCausalLM'", "not supported", "indexer", "hyper-connections", "choose"),
    "*--Kimi-K3": ("'KimiK3ForConditionalGeneration'", "not supported", "linear attention", "projection", "choose"),
    "*--MiMo-V2-Flash": ("'MiMoV2FlashForCausalLM'", "not supported", "heads differ", "choose"),
    "*--Step-3.7-Flash*": ("'Step3p7FlashForCausalLM'", "not supported", "choose"),
    "*--Llama-3_3-Nemotron-Super-49B-v1": ("'DeciLMForCausalLM'", "not supported", "different widths", "choose"),
    "*--NVIDIA-Nemotron-3-Super-*": LATENT,
    "*--NVIDIA-Nemotron-3-Ultra-*": LATENT,
}
OTHER_MODELOPT: list[dict[str, Any]] = [
    {"quant_algo": "W4A8_AWQ"},
    {"quant_algo": "NVFP4", "group_size": 32},
    {"quant_algo": "FP8", "quantized_layers": {}},
]
# Values of the wrong type, out of range, or of another meaning.
WRONG = ["x", None, -1, 0, 0.5, 2, True, [], [1, "x"], {"a": [1]}, float("nan"), 10**30]
GONE = object()
JUNK = [GONE, *WRONG, 1e30, 1e-300, float("inf"), [[1]], 2**31 - 1, [0] * 5, 3]


def test_every_file_has_a_row() -> None:
    refused = {name for name in NAMES if name not in counts()}
    assert refused == {name for name in NAMES for pattern in REFUSED if name not in counts() and fnmatch(name, pattern)}
    assert all(any(fnmatch(name, pattern) for name in refused) for pattern in REFUSED)
    assert len(counts()) + len(refused) == len(NAMES) >= 72


@pytest.mark.parametrize("name", counts())
def test_as_many_parameters_as_in_transformers(name: str, tmp_path: Path) -> None:
    """``python -m tests.helpers.published_configs`` counts those of transformers again."""
    architecture = read_architecture(write(published(name), tmp_path), tensor_parallel=1)
    assert sum(each.total for each in rank_parameters(architecture) if each.trained) == counts()[name]


@pytest.mark.parametrize("name", ["nvidia--Gemma-4-31B-IT-NVFP4", "nvidia--Gemma-4-26B-A4B-NVFP4"])
def test_parameters_of_the_unquantized_model(name: str, tmp_path: Path) -> None:
    config = {key: value for key, value in published(name).items() if key != "quantization_config"}
    architecture = read_architecture(write(config, tmp_path), tensor_parallel=1)
    assert sum(each.total for each in rank_parameters(architecture) if each.trained) == count(config)


def test_sizes_of_gemma_4_with_layer_embeddings_are_refused(tmp_path: Path) -> None:
    config = {key: value for key, value in published("nvidia--Gemma-4-31B-IT-NVFP4").items() if key != "quantization_config"}
    for changes, parts in (
        ({"hidden_size_per_layer_input": 256}, ("hidden_size_per_layer_input", "0", "got 256", "embeddings for each layer")),
        ({"num_kv_shared_layers": 20}, ("num_kv_shared_layers", "0", "got 20", "keys and values of another layer")),
        ({"enable_moe_block": True}, ("enable_moe_block", "num_experts, top_k_experts", "add")),
        ({"use_bidirectional_attention": "all"}, ("use_bidirectional_attention", "false", "got all", "choose")),
    ):
        with raises(UserError, *parts):
            read_architecture(write({**config, "text_config": config["text_config"] | changes}, tmp_path), tensor_parallel=1)


PHIMOE = {
    "architectures": ["PhimoeForCausalLM"],
    "model_type": "phimoe",
    "input_jitter_noise": 0.01,
    "lm_head_bias": True,
}


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        *(
            pytest.param({**published("tiiuae--Falcon-H1-0.5B-Base"), **changes}, parts, id=f"Falcon-H1 {parts[0]}")
            for changes, parts in (
                ({"mamba_rms_norm": True, "mamba_norm_before_gate": True}, ("mamba_norm_before_gate", "false", "got true")),
                ({"projectors_bias": True}, ("projectors_bias", "must be false", "got true", "choose")),
                ({"ssm_multipliers": [1.0] * 4}, ("ssm_multipliers", "a list of five positive floats", "correct")),
                ({"mamba_n_groups": 5}, ("mamba_n_groups", "divisible", "got 24 and 5", "correct")),
            )
        ),
        pytest.param(PHIMOE, ("'PhimoeForCausalLM'", "experts at random", "bias of the output", "choose"), id="phimoe"),
        *(
            pytest.param({"architectures": [name], "model_type": "x"}, (f"'{name}'", "not supported", "choose"), id=name)
            for name in ("BailingMoeV2_5ForCausalLM", "InternVLChatModel")
        ),
    ],
)
def test_models_that_lack_support_are_refused_by_name(
    config: dict[str, Any], parts: tuple[str, ...], tmp_path: Path
) -> None:
    with raises(UserError, *parts):
        read_architecture(write({"num_hidden_layers": 2, **config}, tmp_path), tensor_parallel=1)


def test_recorded_counts(tmp_path: Path) -> None:
    """Of the smallest file, and one with image input that transformers itself refuses as it is published."""
    for name in ("ibm-granite--granite-4.0-h-350m", "meta-llama--Llama-4-Scout-17B-16E-Instruct"):
        assert count(published(name)) == counts()[name], f"{COUNTS} is out of date"
    assert read_architecture(write(published(name), tmp_path), tensor_parallel=1).temperature is not None


def cases(names: Iterable[str], quick: Collection[str]) -> pytest.MarkDecorator:
    """The argument ``name``: of all these names, of which the quick matrix has some."""
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=[pytest.mark.full] * (name not in quick)) for name in names]
    )


NOT_READ = [name for name in NAMES if name not in counts()]


@cases(NOT_READ, {next(name for name in NOT_READ if fnmatch(name, pattern)) for pattern in REFUSED})
def test_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    """By the reader and by ``nemo-kto plan``, whose error names the file once, and no other file."""
    (parts,) = [parts for pattern, parts in REFUSED.items() if fnmatch(name, pattern)]
    with raises(UserError, *parts) as error:
        read_architecture(write(published(name), tmp_path), tensor_parallel=1)
    assert str(error.value).count("config.json") == 1
    assert "download" not in str(error.value)
    with raises(UserError, *parts) as error:
        plan.main(["kto", str(tmp_path)])
    assert not re.search(r"tokenizer|model\.safetensors", str(error.value))  # it reads neither


# the last file of each architecture
OF_ARCHITECTURES = {published(name)["architectures"][0]: name for name in counts()}


# of one with experts, image input and latent attention, an indexer, Mamba-2, gated delta nets, and without any of it
PLANNED = (
    "moonshotai--Kimi-K2.5",
    "zai-org--GLM-5.2-FP8",
    "nvidia--Nemotron-H-56B-Base-8K",
    "Qwen--Qwen3.5-27B",
    "microsoft--phi-4",
)


@cases(OF_ARCHITECTURES.values(), PLANNED)
def test_planned(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On one rank, into which not every model fits."""
    assert plan.main(["kto", str(write(published(name), tmp_path))]) in (0, 1)
    text, chosen_keys = capsys.readouterr().out, read_config_file(tmp_path)[1].chosen_keys
    assert re.findall(r"attention +to all keys, .* at most (\w+) = 2,048 tokens", text) == [chosen_keys] * bool(chosen_keys)
    number, unit = re.findall(r"([\d.,]+) ([MB]) parameters", text)[0]
    assert float(number.replace(",", "")) * {"M": 1e6, "B": 1e9}[unit] == pytest.approx(counts()[name], rel=0.005)


@pytest.mark.parametrize(
    ("files", "changes", "parts"),
    [
        (("model.Q4_K_M.gguf",), None, ("GGUF file model.Q4_K_M.gguf", "safetensors", "start from")),
        (("model.Q4_K_M.gguf",), {}, ("GGUF file model.Q4_K_M.gguf", "safetensors", "start from")),
        (("hf_quant_config.json",), {}, ("hf_quant_config.json", "quantization", "quant_algo", "None", "download")),
        ((), {"quantization": {"group_size": 64, "bits": 4}}, ("got 4 bits in groups of MLX", "unquantized")),
        ((), {"quantization_config": {"group_size": 64, "bits": 8}}, ("got 8 bits in groups of MLX", "unquantized")),
        ((), {"compression_config": {"quant_method": "compressed-tensors", "format": "dense"}}, ("'dense'", "unquantized")),
        ((), {"quantization_config": {"quant_method": "bitsandbytes"}}, ("'bitsandbytes'", "unquantized")),
        (
            (),
            {"quantization_config": {"quant_method": "fp8", "quant_algo": "MIXED_PRECISION"}},
            ("MIXED_PRECISION", *MODELOPT),
        ),
        *(
            ((), {"quantization_config": {"quant_method": "modelopt"} | settings}, ("of NVIDIA ModelOpt", "unquantized"))
            for settings in OTHER_MODELOPT
        ),
    ],
)
def test_other_forms_of_weights(
    files: tuple[str, ...], changes: dict[str, Any] | None, parts: tuple[str, ...], tmp_path: Path
) -> None:
    """Training and ``nemo-kto plan`` refuse them alike."""
    for file in files:
        (tmp_path / file).write_text("{}")
    if changes is not None:
        write(published("Qwen--Qwen3-0.6B") | changes, tmp_path)
    with raises(UserError, *parts):
        read_config_file(tmp_path)
    with raises(UserError, *parts):
        plan.main(["kto", str(tmp_path)])


def text_of(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The configuration with these fields of its text model."""
    if "text_config" in config:
        return {**config, "text_config": {**config["text_config"], **changes}}
    return {**config, **changes}


def used(architecture: Architecture) -> Architecture:
    """Without the width of dense layers if there are none."""
    dense = any(architecture.layers_with[Layers.DENSE])
    return architecture if dense else replace(architecture, ffn_hidden_size=0)


@pytest.mark.parametrize("name", counts())
def test_fields_that_are_not_read_may_hold_anything(name: str, tmp_path: Path) -> None:
    """Those of all other families, of other RoPE types, and of cases that this model is not; read fields are checked."""
    families = (*FAMILIES.values(), *MULTIMODAL)
    config, expected = published(name), read_architecture(write(published(name), tmp_path), tensor_parallel=1)
    text = config.get("text_config", config)
    family, every = expected.family, {field for each in families for field in each.fields.model_fields}
    read = family.reads(family.renewed(text)) | family.deciding(text)
    every |= {"attention_dropout", "pad_token_id", "id2label", "num_labels", "per_layer_config", "qk_head_dim", "dtype", ""}
    for value in WRONG:
        changes: dict[str, Any] = dict.fromkeys(every - read, value)
        for part in {"rope_scaling", "rope_parameters"} & read:
            if isinstance(text.get(part), dict):
                settings = LayerRopeFields.model_fields.keys() - {"full_attention", "sliding_attention"}
                others = [each for each in settings if f"{part}.{each}" not in read]
                changes[part] = {**text[part], **dict.fromkeys(others, value)}
        assert used(read_architecture(write(text_of(config, changes), tmp_path), tensor_parallel=1)) == used(expected), value
    with raises(UserError, "hidden_size", "integer", "'x'", "correct"):
        read_architecture(write(text_of(config, {"hidden_size": "x"}), tmp_path), tensor_parallel=1)


def bases() -> Iterator[tuple[str, dict[str, Any]]]:
    """The published files, and transformers' defaults of each family."""
    yield from ((name, published(name)) for name in counts())
    for family in (*FAMILIES.values(), *MULTIMODAL):
        text = {"text_config": {"model_type": family.text_type}} if family.text_type else {}
        kind, code = family.config_type or family.name, OWN_CODE.get(family.name)
        config = json.loads(AutoConfig.for_model(kind, **text).to_json_string(use_diff=False)) | {"model_type": family.name}
        config = config if code is None else {code.fields.get(name, name): value for name, value in config.items()}
        yield family.hf_architecture + family.text_type, {**config, "architectures": [family.hf_architecture]}


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("Qwen--Qwen2.5-VL-7B-Instruct", {151655, 151656}),
        ("google--gemma-3-4b-it", {262144}),
        ("nvidia--Gemma-4-31B-IT-NVFP4", {258880, 258881, 258884}),
        ("moonshotai--Kimi-K2.5", {163605}),
        ("Qwen--Qwen3-0.6B", set()),
    ],
)
def test_tokens_of_images_videos_and_sounds(name: str, ids: set[int], tmp_path: Path) -> None:
    assert image_ids(write(published(name), tmp_path)) == ids


TIES: tuple[dict[str, bool], ...] = ({}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False})


@pytest.mark.parametrize("name", IMAGES)
def test_embeddings_of_models_with_image_input_are_tied_as_in_transformers(name: str, tmp_path: Path) -> None:
    """Files of Qwen2-VL that transformers 4 wrote say it only in text_config. Llama 4's text model alone determines it."""
    config = json.loads(IMAGES[name].config().to_json_string())
    text = config["text_config"]
    family = next(each for each in MULTIMODAL if (each.name, each.text_type) == (config["model_type"], text["model_type"]))
    for part in (config, text):
        part.pop("tie_word_embeddings", None)
    for whole, of_text in itertools.product(TIES, TIES):
        given = {**config, "architectures": [family.hf_architecture], **whole, "text_config": text | of_text}
        found = AutoConfig.from_pretrained(write(given, tmp_path))
        expected = (found.text_config if family.ties_in_text else found).tie_word_embeddings
        assert read_architecture(tmp_path, tensor_parallel=1).tied is expected, (whole, of_text)


def mutated(config: Any, generator: random.Random) -> dict[str, Any]:
    """With one entry, at any depth, that is absent or holds another value."""
    name = generator.choice(sorted(set(config) - {"vision_config", "audio_config"}))
    if isinstance(value := config[name], dict) and value and generator.random() < 0.9:
        return {**config, name: mutated(value, generator)}
    junk = generator.choice(JUNK)
    return {each: config[each] for each in config if each != name} | ({} if junk is GONE else {name: junk})


def test_mutants_are_read_or_refused(tmp_path: Path) -> None:
    generator, outcomes = random.Random(17), {"read": 0, "refused": 0}
    for name, config in bases():
        for _ in range(8):
            mutant = mutated(config, generator)
            mutant = mutated(mutant, generator) if generator.random() < 0.3 else mutant
            try:
                read_architecture(write(mutant, tmp_path), tensor_parallel=1)
                outcomes["read"] += 1
            except UserError:
                outcomes["refused"] += 1
            except Exception as error:
                raise AssertionError(f"{name}: {mutant}") from error
    assert min(outcomes.values()) > 100, outcomes


QK_HEAD_DIMS: tuple[Any, ...] = (None, [1], {}, 0.0, -1)
LING, M3 = "inclusionAI--Ling-mini-2.0", "MiniMaxAI--MiniMax-M3-VL"
DEEPSEEK, BIG, FACTORS = "deepseek-ai--DeepSeek-V3", 10**30, {"short_factor": [1.0], "long_factor": [1.0]}


@pytest.mark.parametrize(
    ("name", "changes", "parts"),
    [
        *((DEEPSEEK, {"qk_head_dim": value}, None) for value in QK_HEAD_DIMS),
        *(("moonshotai--Kimi-K2.5", {"model_type": value}, ("model_type", "text_config")) for value in ([1], {"a": 1})),
        ("Qwen--Qwen3-0.6B", {"rope_theta": BIG}, ("rope_theta", "at most", str(BIG))),
        ("XiaomiMiMo--MiMo-7B-Base", {"rope_theta": None}, ("rope_theta must be given", "add")),
        ("XiaomiMiMo--MiMo-7B-Base", {"rope_theta": None, "rope_parameters": {"rope_theta": 1e5}}, None),
        (LING, {"partial_rotary_factor": None, "n_group": None}, ("n_group, partial_rotary_factor must be given", "add")),
        (LING, {"norm_topk_prob": False}, ("norm_topk_prob must be true", "got false", "choose")),
        (LING, {"score_function": "softmax"}, ("score_function", "sigmoid", "softmax", "correct")),
        (LING, {"use_bias": True}, ("use_bias", "True", "correct")),
        (LING, {"moe_shared_expert_intermediate_size": 1024}, ("moe_shared_expert_intermediate_size", "512", "got 1024")),
        (M3, {"use_gemma_norm": False}, ("use_gemma_norm", "False", "correct")),
        (M3, {"sparse_attention_config": {"sparse_topk_blocks": 0}}, ("sparse_attention_config.sparse_topk_blocks", "0")),
        (M3, {"model_type": "minimax_m3_vl_text"}, None),
        (M3, {"rotary_dim": 32}, ("rotary_dim", "0.5 * 128", "got 32", "correct")),
        ("Qwen--Qwen3-0.6B", {"num_hidden_layers": 100_000}, ("num_hidden_layers", "10000", "100000")),
        ("Qwen--Qwen3-0.6B", {"num_labels": 10**9, "id2label": None}, None),
        (DEEPSEEK, {"n_group": 0, "topk_group": 0, "n_shared_experts": 0}, None),
        (DEEPSEEK, {"routed_scaling_factor": 2}, None),
        (DEEPSEEK, {"rope_scaling": {"rope_type": "yarn", "factor": None}}, ("factor", "missing", "add")),
        ("nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", {"moe_latent_size": float("inf")}, ("moe_latent_size", "inf")),
        (
            "Qwen--Qwen3-0.6B",
            {"rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 9, **FACTORS}},
            ("pair of channels", "64", "short_factor of 1", "long_factor of 1", "correct"),
        ),
        (
            "Qwen--Qwen3-0.6B",
            {"model_type": "qwen9", "head_dim": -1},
            ("model_type", "'qwen3'", "Qwen3ForCausalLM", "'qwen9'"),
        ),
        ("google--gemma-3-1b-it", {"query_pre_attn_scalar": 256.0}, None),
        ("google--gemma-3-1b-it", {"architectures": None}, ("architectures", "Gemma3ForCausalLM", "got none", "add")),
        ("google--gemma-3-1b-it", {"architectures": [], "model_type": "x"}, ("architectures", "a model", "got none", "add")),
        ("google--gemma-3-1b-it", {"attn_logit_softcapping": 30.0}, ("attn_logit_softcapping", "null", "30.0", "choose")),
    ],
)
def test_single_fields(name: str, changes: dict[str, Any], parts: tuple[str, ...] | None, tmp_path: Path) -> None:
    write(text_of(published(name), changes), tmp_path)
    if parts is None:
        read_architecture(tmp_path, tensor_parallel=1)
        return
    with raises(UserError, *parts):
        read_architecture(tmp_path, tensor_parallel=1)


def test_rotary_dim_of_minimax_m3(tmp_path: Path) -> None:
    """It takes the place of a partial_rotary_factor that is null or absent."""
    for factor in ({"partial_rotary_factor": None}, {}):
        config = published(M3)
        text = {name: value for name, value in config["text_config"].items() if name != "partial_rotary_factor"}
        folder = write({**config, "text_config": {**text, **factor, "rotary_dim": 32}}, tmp_path)
        assert len(read_architecture(folder, tensor_parallel=1).rope.frequencies) == 32 // 2


@pytest.mark.parametrize("kind", ["type", "rope_type"])
def test_older_names_of_longrope(kind: str, tmp_path: Path) -> None:
    """Of Phi-3-mini-128k, whose files had another one in each of three revisions."""
    config = json.loads(AutoConfig.for_model("phi3", pad_token_id=0).to_json_string(use_diff=False))
    factors = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    config |= {"architectures": ["Phi3ForCausalLM"], "original_max_position_embeddings": 4096, "rope_parameters": None}
    config |= {"max_position_embeddings": 131_072, "rope_theta": 10_000.0}
    read = [
        read_architecture(write({**config, "rope_scaling": {**factors, kind: name}}, tmp_path), tensor_parallel=1)
        for name in ("su", "yarn", "longrope")
    ]
    assert read[0] == read[1] == read[2]
    assert read[0].rope.attention_factor == pytest.approx((1 + math.log(32) / math.log(4096)) ** 0.5)


def test_other_names_of_the_numbers_of_experts(tmp_path: Path) -> None:
    """Those that transformers accepts, in the place of the published ones; they were left out, and its defaults read."""
    tried = set()
    for name in OF_ARCHITECTURES.values():
        config, expected = published(name), read_architecture(write(published(name), tmp_path), tensor_parallel=1)
        text = config.get("text_config", config)
        for other, own in CONFIG_MAPPING[
            expected.family.text_type or expected.family.config_type or expected.family.name
        ].attribute_map.items():
            given = own if own in text else "num_experts"
            if "experts" in own and other not in text and given in text:
                changed = {other: text[given], **{each: value for each, value in text.items() if each != given}}
                whole = {**config, "text_config": changed} if "text_config" in config else changed
                assert read_architecture(write(whole, tmp_path), tensor_parallel=1) == expected, (name, other)
                tried.add((expected.family.name, other))
    assert {("gpt_oss", "num_experts"), ("mixtral", "num_experts"), ("deepseek_v3", "num_local_experts")} <= tried


def test_long_lists_of_valid_elements_take_linear_time(tmp_path: Path) -> None:
    """200,000 layers without experts, in a model of 10,000 layers: 268 s when each layer was looked up in the list."""
    changes = {"num_hidden_layers": 10_000, "mlp_only_layers": [20_000] * 200_000}
    start = time.process_time()
    read_architecture(write(published("Qwen--Qwen3-30B-A3B") | changes, tmp_path), tensor_parallel=1)
    assert time.process_time() - start < 20


@pytest.mark.parametrize("field", ["architectures", "layer_types", "mlp_only_layers", "rope_scaling"])
def test_many_wrong_elements_take_linear_time(field: str, tmp_path: Path) -> None:
    """Twelve minutes when each of them was shown with the whole list."""
    wrong: Any = [0.5] * 100_000 if field != "rope_scaling" else {"rope_type": "longrope", "short_factor": ["x"] * 100_000}
    kind: Family = FAMILIES["Qwen2MoeForCausalLM"]
    start = time.process_time()
    with raises(UserError, field, "list", "...") as error:
        read_config_file(write({"architectures": [kind.hf_architecture], "model_type": kind.name, field: wrong}, tmp_path))
    assert time.process_time() - start < 10
    assert len(str(error.value)) < 1000
