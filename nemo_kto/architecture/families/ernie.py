"""ERNIE 4.5: neighbouring channels are rotated together; one setting for all biases."""

from __future__ import annotations

from nemo_kto.architecture.config_fields import ModelFields
from nemo_kto.architecture.family import Family
from nemo_kto.architecture.mappings import DENSE


class ErnieFields(ModelFields):
    use_bias: bool | None = None


ERNIE4_5 = Family(
    name="ernie4_5",
    hf_architecture="Ernie4_5ForCausalLM",
    mappings=DENSE,
    fields=ErnieFields,
    flags=dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), "use_bias"),
    interleaved_rotary=True,
    own_head_dim=True,
)
