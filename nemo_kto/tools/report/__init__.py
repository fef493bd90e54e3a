"""The page about a run, or a comparison of several."""
