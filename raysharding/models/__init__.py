"""From config.json or a callable to a module on meta; key mapping, wrap plan, initial values.

transformers is imported only in this package, and only when a model needs it.
"""

from raysharding.models.blocks import Run
from raysharding.models.build import ModelSource, build_module, parameters_on_meta
from raysharding.models.config_files import write_config_files
from raysharding.models.initial import initial_value
from raysharding.models.key_mapping import KeyMap, Target, map_keys
from raysharding.models.wrap import wrap_groups

__all__ = [
    "KeyMap",
    "ModelSource",
    "Run",
    "Target",
    "build_module",
    "initial_value",
    "map_keys",
    "parameters_on_meta",
    "wrap_groups",
    "write_config_files",
]
