"""Losses as pure functions of tensors: log-ratios in, one loss per example out."""
