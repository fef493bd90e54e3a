"""Rounds of feedback: answers of a model, their labels, and the rows that a training takes."""
