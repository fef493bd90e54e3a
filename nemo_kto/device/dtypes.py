"""Mapping from dtype names in the configuration to torch dtypes."""

from __future__ import annotations

import torch

DTYPES = {"bf16": torch.bfloat16, "32": torch.float32}  # trainer.precision -> dtype of the model
MOMENTS = {"fp32": torch.float32, "bf16": torch.bfloat16}  # model.optim.moments_dtype -> dtype of the optimizer's moments
