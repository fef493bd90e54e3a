"""Conversations with a trained model."""
