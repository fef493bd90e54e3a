"""Losses, as pure functions of tensors: log-ratios in, one loss a row out."""
