"""Truncation of examples that are longer than the sequence length."""

from __future__ import annotations

from dataclasses import dataclass

TRUNCATION_MODES = ("keep_end", "keep_start")


@dataclass(frozen=True)
class Truncation:
    """Truncation settings.

    The prompt is truncated first, an answer only if it is too long on its own. Each keeps at least one token.
    """

    seq_length: int  # maximum number of tokens in an example, at least 2
    mode: str  # ``keep_end`` of the prompt (and a BOS at its beginning), or ``keep_start``
    bos_id: int | None  # kept by ``keep_end`` at the beginning of a prompt; None: there is no such token

    def __post_init__(self) -> None:
        if self.seq_length < 2:
            raise ValueError(f"seq_length must be at least 2 (a prompt and an answer token), got {self.seq_length}")
        if self.mode not in TRUNCATION_MODES:
            raise ValueError(f"truncation_mode must be one of {', '.join(TRUNCATION_MODES)}, got {self.mode!r}")

    def truncate(self, prompt: list[int], response: list[int]) -> tuple[list[int], list[int]]:
        """Return prompt and response, which must not be empty, truncated to a total of ``seq_length`` tokens."""
        response = response[: self.seq_length - 1]
        room = self.seq_length - len(response)
        if len(prompt) <= room:
            return prompt, response
        if self.mode == "keep_start":
            return prompt[:room], response
        if prompt[0] == self.bos_id and room > 1:
            return [prompt[0], *prompt[len(prompt) - room + 1 :]], response
        return prompt[len(prompt) - room :], response

    def truncate_pair(
        self, prompt: list[int], chosen: list[int], rejected: list[int]
    ) -> tuple[list[int], list[int], list[int]]:
        """Return the truncated prompt and the two truncated answers.

        The prompt is truncated once, so that the longer answer fits, because both answers must follow the same prompt.
        """
        kept, _ = self.truncate(prompt, max(chosen, rejected, key=len))
        return kept, chosen[: self.seq_length - 1], rejected[: self.seq_length - 1]
