import os

from nemo_kto.device.imports import prepare_imports

# CUDA reads this variable when it starts; a value that the user has set is kept
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # kernels run in the order in which they were started
# must run before any module of this package imports megatron-core
prepare_imports()
