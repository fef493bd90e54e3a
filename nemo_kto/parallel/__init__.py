from nemo_kto.parallel.cpu import silence_warnings

silence_warnings()  # before megatron-core is imported by any module of this package
