"""Commands around the answers of a model: `nemo-kto sample` and `nemo-kto label`."""

CONCURRENCY = 8  # default of the requests to a server at the same time
