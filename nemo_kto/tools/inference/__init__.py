"""Inference with models of users: a small library that the tools `chat` and `rounds` share.

A model is found (:mod:`named_models`), opened without trust in its files (:mod:`opening`), and draws answers
(:mod:`chat_model`) or scores them (:mod:`reward_model`). :mod:`row_output` writes rows that a killed command keeps.

Of the core it uses: ``model_files`` to find and check model folders (``model_folders``, ``adapter_files``,
``checkpoint_files``, ``safetensors_files``, ``hub``, ``companion_files``); ``config.read_saved`` for the
configuration of a run; ``data.tokens`` for chat templates and drawn tokens (``RecordEncoder``, ``load_tokenizer``,
``read_drawn``, ``drawn_text``, ``render_bounded``, ``BoundedProcess``); ``device`` for the GPU and its dtype;
``architecture.base_format`` and ``layers.weight_formats`` for adapters of a quantized base (:mod:`quantized_base`).
"""
