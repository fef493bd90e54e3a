"""Files of models, read without torch: folders, adapters, tokenizers, headers of safetensors, the hub, content hashes."""
