"""Commands of `nemo-kto` and the Python interface."""
