"""Modules on meta, built from config.json or a callable; key mapping, wrap plan, initial values.

Only this package imports transformers, and only when a model needs it.
"""

from raysharding.models.adapters import Adapted as Adapted
from raysharding.models.adapters import AdapterNames as AdapterNames
from raysharding.models.adapters import adapter_files as adapter_files
from raysharding.models.blocks import Run as Run
from raysharding.models.build import ModelSource as ModelSource
from raysharding.models.build import build_module as build_module
from raysharding.models.build import make_contiguous as make_contiguous
from raysharding.models.build import parameters_on_meta as parameters_on_meta
from raysharding.models.config_files import config_files as config_files
from raysharding.models.conversion import class_name as class_name
from raysharding.models.initial import Initialiser as Initialiser
from raysharding.models.initial import missing_rules as missing_rules
from raysharding.models.inputs import MASKED_LABEL as MASKED_LABEL
from raysharding.models.inputs import InputBounds as InputBounds
from raysharding.models.key_mapping import KeyMap as KeyMap
from raysharding.models.key_mapping import Target as Target
from raysharding.models.key_mapping import differing_ties as differing_ties
from raysharding.models.key_mapping import map_keys as map_keys
from raysharding.models.key_mapping import misfit as misfit
from raysharding.models.names import clean_name as clean_name
from raysharding.models.saved_names import SavedTensor as SavedTensor
from raysharding.models.saved_names import saved_layout as saved_layout
from raysharding.models.wrap import ignored_modules as ignored_modules
from raysharding.models.wrap import ignored_parameters as ignored_parameters
from raysharding.models.wrap import input_and_output as input_and_output
from raysharding.models.wrap import is_cut as is_cut
from raysharding.models.wrap import lowers_precision as lowers_precision
from raysharding.models.wrap import stays_in_full_precision as stays_in_full_precision
from raysharding.models.wrap import unfreed_groups as unfreed_groups
from raysharding.models.wrap import wrap_groups as wrap_groups
