import os

from nemo_kto.device.patches import install_import_hook

# CUDA reads this variable when it starts; a value that the user has set is kept
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # kernels run in the order in which they were started
# must run before any module of this package imports megatron-core
install_import_hook()
