"""Commands for configurations of other trainers."""
