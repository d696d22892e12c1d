"""Modules on meta, built from config.json or a callable; key mapping, wrap plan, initial values.

Only this package imports transformers, and only when a model needs it.
"""

from raysharding.models.adapter_merge import AdapterMerge, adapter_merges, plain_names
from raysharding.models.adapters import (
    Adapted,
    AdapterNames,
    adapter_files,
    adapter_scale,
    all_names,
    first_magnitude,
    magnitude_layer,
)
from raysharding.models.build import build_module, import_model, make_contiguous, name_base, override_config, path_of
from raysharding.models.config_files import config_files
from raysharding.models.conversion import is_transformers_model, kept_in_float32
from raysharding.models.initial import Initialiser, missing_rules
from raysharding.models.inputs import InputBounds
from raysharding.models.key_mapping import KeyMap, Target, category, differing_ties, map_keys, misfit
from raysharding.models.saved_names import RunIndex, SavedTensor, saved_layout
from raysharding.models.stand_in import class_name, clean_name
from raysharding.models.wrap import (
    full_precision_groups,
    ignored_modules,
    input_and_output,
    is_shardable,
    low_dtype,
    stays_in_full_precision,
    unfreed_groups,
    whole_parameters,
    wrap_groups,
)
