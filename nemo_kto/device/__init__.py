from nemo_kto.device import environment
from nemo_kto.device.patches import install_import_hook

environment.set_defaults(environment.ALWAYS)
# must run before any module of this package imports megatron-core
install_import_hook()
