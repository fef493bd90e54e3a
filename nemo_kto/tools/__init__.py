"""Companions of the trainer: each uses the core and the files of a run, and the core imports none."""
