"""Which tokens of an example stay when it is longer than the model may see."""

from __future__ import annotations

TRUNCATION_MODES = ("keep_end", "keep_start")


def truncate(
    prompt: list[int], response: list[int], *, seq_length: int, mode: str, bos_id: int | None
) -> tuple[list[int], list[int]]:
    """Cut an example to ``seq_length`` tokens: the prompt first, the answer only where it is too long by itself.

    Args:
        prompt: at least one token.
        response: at least one token.
        seq_length: tokens in an example, at least 2.
        mode: ``keep_end`` keeps the last tokens of the prompt (and the BOS in front of it), ``keep_start`` the first.
        bos_id: the token that ``keep_end`` leaves at the front where it stands there; None: there is no such token.

    Returns:
        Prompt and response with at least one token each, together at most ``seq_length``.
    """
    response = response[: seq_length - 1]
    room = seq_length - len(response)
    if len(prompt) <= room:
        return prompt, response
    if mode == "keep_start":
        return prompt[:room], response
    if prompt[0] == bos_id and room > 1:
        return [prompt[0], *prompt[len(prompt) - room + 1 :]], response
    return prompt[len(prompt) - room :], response


def truncate_pair(
    prompt: list[int], answers: tuple[list[int], list[int]], *, seq_length: int, mode: str, bos_id: int | None
) -> tuple[list[int], tuple[list[int], list[int]]]:
    """Cut a pair: its prompt once, so that the longer answer fits, because both answers must be given to one prompt.

    Args:
        prompt: at least one token.
        answers: the two answers, at least one token each.
        seq_length, mode, bos_id: as in :func:`truncate`.

    Returns:
        Prompt and answers.
    """
    kept, _ = truncate(prompt, max(answers, key=len), seq_length=seq_length, mode=mode, bos_id=bos_id)
    first, second = (answer[: seq_length - 1] for answer in answers)
    return kept, (first, second)


def check_truncation(*, seq_length: int, mode: str) -> None:
    """Refuse settings that no example can meet.

    Raises:
        ValueError: ``seq_length`` below 2, or a mode of another name.
    """
    if seq_length < 2:
        raise ValueError(f"seq_length must be at least 2 (a prompt and an answer token), got {seq_length}")
    if mode not in TRUNCATION_MODES:
        raise ValueError(f"truncation_mode must be one of {', '.join(TRUNCATION_MODES)}, got {mode!r}")
