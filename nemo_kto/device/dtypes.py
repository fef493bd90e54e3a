"""torch's types for the names in the configuration."""

from __future__ import annotations

import torch

DTYPES = {"bf16": torch.bfloat16, "32": torch.float32}
"""By the value of trainer.precision."""

MOMENTS = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""By the value of model.optim.moments_dtype."""
