"""Search for the layout of a run: memory, speed, and what is lacking."""
