"""Choice of the next token: probabilities in closed form, the numbers that decide, and the end of an answer."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from nemo_kto.models.engine.generation import Decoding, choose_tokens, uniform

PARTS = 10_000
PROBS = [0.1, 0.4, 0.2, 0.3]


def frequencies(probs: list[float], *, temperature: float, top_p: float, top_k: int) -> list[float]:
    """How often each token is chosen if the deciding number is in the middle of each of many equal parts of [0, 1)."""
    uniform_B = (torch.arange(PARTS) + 0.5) / PARTS
    logits_BV = torch.tensor(probs).log().expand(PARTS, -1) + 3.0
    chosen_B = choose_tokens(logits_BV, uniform_B, temperature=temperature, top_p=top_p, top_k=top_k)
    return (torch.bincount(chosen_B, minlength=len(probs)) / PARTS).tolist()


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k", "expected"),
    [
        (1.0, 1.0, 0, PROBS),
        (1.0, 1.0, 9, PROBS),
        (0.5, 1.0, 0, [float(Fraction(part, 30)) for part in (1, 16, 4, 9)]),  # squares: 0.01, 0.16, 0.04, 0.09
        (1.0, 0.7, 0, [0.0, 4 / 7, 0.0, 3 / 7]),  # just enough with two
        (1.0, 0.71, 0, [0.0, 4 / 9, 2 / 9, 3 / 9]),
        (0.5, 0.5, 0, [0.0, 1.0, 0.0, 0.0]),  # 16 / 30 is enough
        (1.0, 1e-6, 0, [0.0, 1.0, 0.0, 0.0]),
        (0.5, 1.0, 2, [0.0, 16 / 25, 0.0, 9 / 25]),
        (1.0, 0.75, 3, [0.0, 4 / 7, 0.0, 3 / 7]),  # of the sum of three, 0.9, two are 7 / 9; of all they are 0.7
    ],
)
def test_tokens_are_drawn_with_their_probabilities(
    temperature: float, top_p: float, top_k: int, expected: list[float]
) -> None:
    found = frequencies(PROBS, temperature=temperature, top_p=top_p, top_k=top_k)
    assert found == pytest.approx(expected, abs=2 / PARTS)


def test_without_temperature_the_first_of_the_most_probable_tokens_is_chosen() -> None:
    logits_BV = torch.tensor([[0.0, 2.0, 2.0], [5.0, -1.0, 2.0]])
    assert choose_tokens(logits_BV, torch.tensor([0.99, 0.99]), temperature=0.0, top_p=1.0).tolist() == [1, 0]


def test_tokens_without_probability_are_never_drawn() -> None:
    logits_BV = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]]).expand(2, -1)
    ends_B = torch.tensor([0.0, 1 - 2**-48], dtype=torch.float64)
    assert choose_tokens(logits_BV, ends_B, temperature=1.0, top_p=1.0).tolist() == [1, 2]


def test_logits_that_are_not_finite_give_a_token_of_the_vocabulary() -> None:
    logits_BV = torch.full((1, 4), torch.nan)
    for temperature in (0.0, 1.0):
        token = choose_tokens(logits_BV, torch.tensor([0.5]), temperature=temperature, top_p=0.9)
        assert 0 <= int(token) < 4


def test_numbers_depend_on_seed_prompt_and_position_alone() -> None:
    assert uniform(0, 0, 0) == 0.5316806149009068, "the same in every version, so that samples can be compared"
    found = [uniform(seed, prompt, position) for seed in range(10) for prompt in range(20) for position in range(50)]
    assert len(set(found)) == len(found)
    assert min(found) >= 0
    assert max(found) < 1
    parts = torch.histc(torch.tensor(found), bins=10, min=0, max=1)
    assert (parts - 1000).abs().max() < 5 * 30, "five standard deviations"


@pytest.mark.parametrize(
    ("answer", "complete"), [([1], False), ([1, 9], True), ([9, 1], False), ([1, 1, 1], False), ([1, 1, 1, 1], True)]
)
def test_an_answer_ends_with_a_stop_token_or_its_maximum(answer: list[int], complete: bool) -> None:
    decoding = Decoding(stop_ids=frozenset({8, 9}), max_new_tokens=4, seq_length=100)
    assert decoding.is_complete([1] * 50, answer) is complete


def test_an_answer_ends_with_the_sequence() -> None:
    """Prompt and answer together have at most seq_length tokens."""
    decoding = Decoding(stop_ids=frozenset(), max_new_tokens=4, seq_length=10)
    assert not decoding.is_complete([1] * 8, [1])
    assert decoding.is_complete([1] * 8, [1, 1])
