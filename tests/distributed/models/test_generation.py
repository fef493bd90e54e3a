"""Answers of the model: those of transformers on one rank, and the same ones at every layout."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import lora_jobs
from tests.helpers.engines import engine
from tests.helpers.rank_pool import RankPool

EOS_ID, NEW_TOKENS, SEQ_LENGTH = 258, 6, 40
# Different lengths; the last prompt has room for only three tokens.
PROMPTS = [list(range(60, 60 + length)) for length in (3, 17, 8, 26, SEQ_LENGTH - 3)]
# Name of a layout: ranks, sizes, and further arguments of ``answers``.
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "tp2": (2, {"tensor": 2}, {}),
    "pp2": (2, {"pipeline": 2}, {}),
    "dp2": (2, {}, {}),
    "cp2": (2, {"context": 2}, {}),
    "packed_cp2": (2, {"context": 2}, {"packed": True}),
    "tp2_pp2_sequence_parallel": (4, {"tensor": 2, "pipeline": 2, "sequence_parallel": True}, {}),
    "pp2_vp2": (2, {"pipeline": 2, "virtual": 2}, {}),
    "cp2_pp2_vp2": (4, {"context": 2, "pipeline": 2, "virtual": 2}, {}),
}
MIXTURE_LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "ep2": (2, {"expert": 2, "expert_tensor": 1}, {}),
    "ep2_one_prompt": (2, {"expert": 2, "expert_tensor": 1}, {"prompts": 1}),  # the other rank has none
    "tp2_ep2": (4, {"tensor": 2, "expert": 2, "expert_tensor": 2, "sequence_parallel": True}, {}),
}
QUICK = ("pp2", "pp2_vp2", "packed_cp2", "tp2_pp2_sequence_parallel", "ep2_one_prompt")
KEEP_TOKENS = ("tp2", "pp2", "dp2")  # layouts at which each pass computes only new tokens


def answers(folder: Path, layout: dict[str, Any], options: dict[str, Any] | None = None) -> dict[str, Any]:
    """On a rank: greedy and drawn answers.

    Args:
        options: ``packed``, and ``prompts``: how many of them.
    """
    from nemo_kto.distributed import state
    from nemo_kto.models.engine.generation import Decoding, generate

    packed, prompts = (options or {}).get("packed", False), (options or {}).get("prompts")
    chunks, architecture = lora_jobs.build(folder, state.Layout(**layout), distributed=False)
    runs = engine(chunks, architecture, packed=packed)
    if packed:
        runs.limits = replace(runs.limits, prompts=None, tokens=90)
    decoding = Decoding(stop_ids=frozenset(), max_new_tokens=NEW_TOKENS, seq_length=SEQ_LENGTH, seed=7)
    collate = {"eos_id": EOS_ID, "seq_length": SEQ_LENGTH, "pad_to_multiple": runs.limits.multiple}
    found = {
        name: generate(runs, PROMPTS[:prompts], settings, collate=collate)
        for name, settings in (("greedy", decoding), ("drawn", replace(decoding, temperature=0.8, top_p=0.9)))
    }
    assert all(chunk.training for chunk in chunks)
    return found | {"keeps_tokens": runs.keeps_tokens()}


@pytest.fixture(scope="module")
def one_rank(ranks: RankPool, tiny_checkpoint: Callable[..., Path]) -> Callable[[str], dict[str, Any]]:
    """Name of a family -> its answers on one rank."""
    return functools.cache(lambda family: ranks.run(1, answers, tiny_checkpoint(family), {})[0])


def test_greedy_answers_are_those_of_transformers(
    one_rank: Callable[[str], dict[str, Any]], tiny_checkpoint: Callable[..., Path]
) -> None:
    from transformers import AutoModelForCausalLM

    for family in ("llama", "qwen3_moe"):
        model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint(family), dtype=torch.float32)
        for prompt, answer in zip(PROMPTS, one_rank(family)["greedy"], strict=True):
            room = min(NEW_TOKENS, SEQ_LENGTH - len(prompt))
            ids = torch.tensor([prompt])
            whole = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=room, do_sample=False, eos_token_id=None
            )
            assert answer == whole[0, len(prompt) :].tolist()
            assert len(answer) == room
        assert one_rank(family)["keeps_tokens"]
    found = one_rank("llama")
    assert all(drawn != greedy for drawn, greedy in zip(found["drawn"], found["greedy"], strict=True))


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(family, name, marks=[pytest.mark.full] * (name not in QUICK))
        for family, layouts in (("llama", LAYOUTS), ("qwen3_moe", MIXTURE_LAYOUTS))
        for name in layouts
    ],
)
def test_same_answers_at_every_layout(
    ranks: RankPool,
    one_rank: Callable[[str], dict[str, Any]],
    tiny_checkpoint: Callable[..., Path],
    family: str,
    layout: str,
) -> None:
    size, sizes, options = (LAYOUTS | MIXTURE_LAYOUTS)[layout]
    expected = {name: one_rank(family)[name][: options.get("prompts")] for name in ("greedy", "drawn")}
    expected["keeps_tokens"] = layout in KEEP_TOKENS
    for of_rank in ranks.run(size, answers, tiny_checkpoint(family), sizes, options):
        assert of_rank == expected
