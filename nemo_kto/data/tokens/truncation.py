"""Which tokens of an example stay when it is longer than the model may see."""

from __future__ import annotations

from dataclasses import dataclass

TRUNCATION_MODES = ("keep_end", "keep_start")


@dataclass(frozen=True)
class Truncation:
    """How examples are cut: the prompt first, an answer only where it is too long by itself; each keeps one token at least.

    Attributes:
        seq_length: tokens in an example, at least 2.
        mode: ``keep_end`` keeps the last tokens of the prompt (and the BOS in front of it), ``keep_start`` the first.
        bos_id: the token that ``keep_end`` leaves at the front where it stands there; None: there is no such token.

    Raises:
        ValueError: ``seq_length`` below 2, or a mode of another name.
    """

    seq_length: int
    mode: str
    bos_id: int | None

    def __post_init__(self) -> None:
        if self.seq_length < 2:
            raise ValueError(f"seq_length must be at least 2 (a prompt and an answer token), got {self.seq_length}")
        if self.mode not in TRUNCATION_MODES:
            raise ValueError(f"truncation_mode must be one of {', '.join(TRUNCATION_MODES)}, got {self.mode!r}")

    def truncate(self, prompt: list[int], response: list[int]) -> tuple[list[int], list[int]]:
        """Prompt and response, at least one token each, cut to ``seq_length`` tokens together."""
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
        """The prompt cut once, so that the longer answer fits (both must be given to one prompt), and the two answers."""
        kept, _ = self.truncate(prompt, max(chosen, rejected, key=len))
        return kept, chosen[: self.seq_length - 1], rejected[: self.seq_length - 1]
