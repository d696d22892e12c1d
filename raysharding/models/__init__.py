"""Modules on meta, built from config.json or a callable; key mapping, wrap plan, initial values.

Only this package imports transformers, and only when a model needs it.
"""

from raysharding.models.adapters import Adapted, AdapterNames, adapter_files
from raysharding.models.blocks import Run
from raysharding.models.build import ModelSource, build_module, make_contiguous, parameters_on_meta
from raysharding.models.config_files import config_files
from raysharding.models.conversion import class_name
from raysharding.models.initial import Initialiser, missing_rules
from raysharding.models.inputs import MASKED_LABEL, InputBounds
from raysharding.models.key_mapping import KeyMap, Target, differing_ties, map_keys, misfit
from raysharding.models.names import clean_name
from raysharding.models.saved_names import SavedTensor, saved_layout
from raysharding.models.wrap import (
    ignored_modules,
    ignored_parameters,
    input_and_output,
    is_cut,
    lowers_precision,
    stays_in_full_precision,
    unfreed_groups,
    wrap_groups,
)

__all__ = [
    "MASKED_LABEL",
    "Adapted",
    "AdapterNames",
    "Initialiser",
    "InputBounds",
    "KeyMap",
    "ModelSource",
    "Run",
    "SavedTensor",
    "Target",
    "adapter_files",
    "build_module",
    "class_name",
    "clean_name",
    "config_files",
    "differing_ties",
    "ignored_modules",
    "ignored_parameters",
    "input_and_output",
    "is_cut",
    "lowers_precision",
    "make_contiguous",
    "map_keys",
    "misfit",
    "missing_rules",
    "parameters_on_meta",
    "saved_layout",
    "stays_in_full_precision",
    "unfreed_groups",
    "wrap_groups",
]
