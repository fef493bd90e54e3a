"""Import of .nemo archives and Megatron checkpoints."""
