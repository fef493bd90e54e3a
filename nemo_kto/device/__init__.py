import os

from nemo_kto.device.imports import prepare_imports

# before CUDA starts, which reads it then; a value of the user's own stays
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # kernels run in the order in which they were started
# before megatron-core is imported by any module of this package
prepare_imports()
