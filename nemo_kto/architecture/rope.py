"""RoPE as described by Hugging Face configurations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nemo_kto.layers.layer_settings import Rope
from nemo_kto.utils import lazy_import

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

# Required settings of each RoPE type; transformers has defaults for the others.
_NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
    "dynamic": ("factor", "max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
    "proportional": (),
}
_YARN = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
_ORIGINAL = "original_max_position_embeddings"
_OPTIONAL = {
    "proportional": ("factor",),
    "yarn": (*_YARN, _ORIGINAL),
    "dynamic": ("alpha",),
    "longrope": ("attention_factor", "factor"),
}


def settings_of_type(kind: object) -> set[str]:
    """Return the names of the settings that a RoPE type has; others, which files may also have, are not read."""
    return {"rope_theta", "partial_rotary_factor", *_NEEDED.get(str(kind), ()), *_OPTIONAL.get(str(kind), ())}


def rope_type(config: Mapping[str, Any]) -> str:
    """Return the RoPE type in a configuration that a family's ``rope`` has reduced to one layer type.

    Raises ValueError if the type is not implemented, or differs between layers of a family with a single RoPE.
    """
    settings = rope_settings(config)
    if nested := sorted(name for name, value in settings.items() if isinstance(value, Mapping)):
        message = f"rope_parameters must be the same for all layers, got one set for each of {', '.join(nested)}"
        raise ValueError(f"{message}; choose another model")
    kind = settings.get("rope_type", settings.get("type", "default"))
    if not isinstance(kind, str) or kind not in _NEEDED:
        raise ValueError(f"the rope type must be one of {', '.join(_NEEDED)}, got {kind!r}; choose another model")
    return kind


def longest_sequence(config: Mapping[str, Any]) -> tuple[str, int | None]:
    """Return the configuration's field that limits the sequence length, and its value in tokens; None if it is not set.

    Beyond this length the frequencies of longrope and dynamic change for the whole batch: log-probs of a short sequence
    would depend on the other sequences in its batch, and so on the layout.
    """
    if rope_type(config) == "longrope":
        name = "original_max_position_embeddings"
        return name, config.get(name) or rope_settings(config).get(name)
    return "max_position_embeddings", config.get("max_position_embeddings")


def read_rope(config: Mapping[str, Any], *, partial: bool = False) -> Rope:
    """Read the rotary embedding from a Hugging Face configuration, with defaults filled in, reduced to one layer type.

    Both the old form (rope_theta, rope_scaling) and the new one (rope_parameters) are supported. The values are computed by
    transformers' own functions, for sequences up to :func:`longest_sequence`. ``partial``: the family has models that rotate
    only the first channels of each head. Raises ValueError if the RoPE type is not implemented, one of its settings is
    missing, or a partial rotation is impossible.
    """
    from transformers import PretrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings, kind = rope_settings(config), rope_type(config)
    given = {**config, **settings}
    if missing := [name for name in (*_NEEDED[kind], "rope_theta") if given.get(name) is None]:
        message = f"rope type {kind!r} needs {', '.join(missing)}, missing in rope_parameters (or rope_scaling)"
        raise ValueError(f"{message}; add what is missing")
    rotated = config.get("qk_rope_head_dim")  # latent attention rotates this part of a head as if it were a head
    head_dim = rotated or config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    part = 1.0 if rotated else given.get("partial_rotary_factor") or 1.0
    if part != 1.0 and not partial:
        raise ValueError(f"partial_rotary_factor must be 1.0, got {part}; choose another model")
    if part > 1.0 or int(head_dim * part) < 2 or int(head_dim * part) % 2:
        message = f"partial_rotary_factor must be at most 1.0 and rotate an even number of the {head_dim} channels of a head"
        raise ValueError(f"{message}, got {part}; choose another model")
    pairs, factors = int(head_dim * part) // 2, [name for name in ("short_factor", "long_factor") if kind == "longrope"]
    if wrong := [f"{name} of {len(given[name])}" for name in factors if len(given[name]) != pairs]:
        raise ValueError(f"rope factors must be {pairs}, one for each pair of channels, got {', '.join(wrong)}; correct it")
    theta = given["rope_theta"]
    if kind == "dynamic" and settings.get("alpha"):  # Hunyuan's: another base, whatever the length
        kind, theta = "default", theta * settings["alpha"] ** (head_dim / (head_dim - 2))
    if kind == "default":  # transformers has no function for it
        kind, settings = "linear", {**settings, "factor": 1.0}
    described = PretrainedConfig()
    described.hidden_size, described.num_attention_heads = config["hidden_size"], config["num_attention_heads"]
    described.head_dim = head_dim
    for name in ("max_position_embeddings", "original_max_position_embeddings", "partial_rotary_factor"):
        if (value := config.get(name)) is not None:
            setattr(described, name, value)
    described.rope_theta = theta
    described.rope_parameters = {**settings, "rope_type": kind, "rope_theta": theta, "partial_rotary_factor": part}
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[kind](described, torch.device("cpu"))
    return Rope(
        frequencies=tuple(frequencies.tolist()),
        attention_factor=float(attention_factor),
        factor_in_table=attention_factor != 1.0 and (rotated is not None or int(head_dim * part) < head_dim),
    )


def rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the RoPE settings of a configuration in the older or the newer form."""
    return {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
