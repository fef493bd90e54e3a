"""The command `nemo-kto import`: .nemo archives and Megatron checkpoints as Hugging Face folders.

It uses the core by ``architecture`` (read_architecture, mappings and shapes of weights), ``model_files`` (write_shards,
copy_companions, check_tokenizer), ``huggingface`` (NewFolder, check_target, FileWeights, ENGINE_NAMES) and
``checkpoint.safe_loading``, which reads files without running their code.
"""
