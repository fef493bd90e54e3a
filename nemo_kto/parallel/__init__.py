from nemo_kto.parallel.cpu import leave_fusions_uncompiled, silence_warnings

# before megatron-core is imported by any module of this package
silence_warnings()
leave_fusions_uncompiled()
