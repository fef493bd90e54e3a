"""The configuration files; installed as the package nemo_kto.conf, where Hydra finds them."""
