"""Linear layers of megatron-core with a bias of their own."""

from __future__ import annotations


def with_bias(linear: type) -> type:
    """Return a subclass of a linear layer with a bias; megatron-core's option adds one to attention output and MLP alike."""

    class LinearWithBias(linear):  # type: ignore[misc, valid-type]
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **{**kwargs, "bias": True})

    return LinearWithBias
