"""Token log-probs of a model in bf16 on a GPU, whose matrix products return fp32: as exact as on the CPU."""

from __future__ import annotations

import pytest

from nemo_kto.device import device
from tests.unit.distributed.test_logprobs_precision import (  # noqa: F401  # collected here
    test_gradients_are_rounded_once,
    test_the_log_ratio_of_slightly_moved_weights,
    test_token_log_probs_are_not_rounded_to_bf16,
)

pytestmark = pytest.mark.skipif(not device.on_gpu(), reason="needs a GPU that is used")
