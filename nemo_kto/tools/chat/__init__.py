"""Conversations with a trained model.

Of the core it uses only texts for terminals (``utils.text``) and errors; models and files of rows are those of
:mod:`nemo_kto.tools.inference`.
"""
