"""What is adapted, in numbers and names: no megatron-core here, so that a command line can be checked without it."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Names of linear layers in Hugging Face's models, which PEFT uses, and NeMo's names for groups of them.
HUGGING_FACE_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EMBEDDING = "embed_tokens"
MAX_ALPHA = 1_000_000  # far above what is used, and far below what fp32 can hold
# What Mixtral calls the projections of its experts.
OTHER_NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
NEMO_TARGETS: dict[str, tuple[str, ...]] = {
    "attention_qkv": ("q_proj", "k_proj", "v_proj"),
    "attention_dense": ("o_proj",),
    "mlp_fc1": ("gate_proj", "up_proj"),
    "mlp_fc2": ("down_proj",),
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "all": HUGGING_FACE_TARGETS,
}
TARGET_MODULES = (*NEMO_TARGETS, *HUGGING_FACE_TARGETS, EMBEDDING)


@dataclass(frozen=True, kw_only=True)
class LoRASettings:
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685, section 4.1): y = W x + scale * B A x.

    Attributes:
        rank: rows of A and columns of B.
        alpha: the adapter's output is scaled by alpha / rank, or alpha / sqrt(rank) with ``rslora``.
        dropout: probability with which an input of A is dropped in training.
        target_modules: of :data:`TARGET_MODULES`.
        layers: numbers of the adapted layers, counted from 1; None for all.
        rslora: rank-stabilised scale (Kalajdzievski 2023, arXiv 2312.03732).
        dora: each row of the sum of weight and adapter has a magnitude that is trained (``models.dora``).

    Raises:
        ValueError: a value is impossible or a name unknown; says what may stand there.
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    target_modules: tuple[str, ...] = ("attention_qkv",)
    layers: tuple[int, ...] | None = None
    rslora: bool = False
    dora: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"the rank of an adapter must be at least 1, got {self.rank}")
        if not 0 < self.alpha <= MAX_ALPHA:
            raise ValueError(f"alpha of an adapter must be above 0 and at most {MAX_ALPHA}, got {self.alpha}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"the dropout of an adapter must be in [0, 1), got {self.dropout}")
        unknown = [name for name in self.target_modules if name not in TARGET_MODULES]
        if unknown or not self.target_modules:
            raise ValueError(
                f"target_modules must be one or more of {', '.join(TARGET_MODULES)}; got {', '.join(unknown) or 'none'}"
            )
        if self.layers is not None and (not self.layers or min(self.layers) < 1):
            raise ValueError(f"layers must be one or more numbers from 1, or None for all; got {list(self.layers)}")

    @property
    def scale(self) -> float:
        """What the adapter's output is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def kind(self) -> str:
        """The method by name."""
        return "DoRA" if self.dora else "LoRA"

    @property
    def scale_text(self) -> str:
        """How the scale comes about, in words."""
        return f"alpha {self.alpha:g}" + (" / sqrt(rank)" if self.rslora else "")

    @property
    def modules(self) -> tuple[str, ...]:
        """What is adapted by its Hugging Face names, in the order of :data:`HUGGING_FACE_TARGETS`, the embedding last."""
        wanted = {module for name in self.target_modules for module in NEMO_TARGETS.get(name, (name,))}
        return tuple(module for module in (*HUGGING_FACE_TARGETS, EMBEDDING) if module in wanted)
