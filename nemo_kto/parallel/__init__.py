from nemo_kto.parallel import cpu

cpu.quieten()  # before megatron-core is imported by any module of this package
