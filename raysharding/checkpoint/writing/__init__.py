"""Atomic saves: planned files in a staging directory, a manifest, one rename, and the removal of older saves."""

from raysharding.checkpoint.writing.commit import (
    check_claim,
    check_destination,
    check_files,
    check_writable,
    commit_files,
    commit_staging,
    create_staging,
    is_left_over,
    remove_staging,
)
from raysharding.checkpoint.writing.file_plan import (
    file_names,
    file_order,
    folders_of,
    make_folder,
    plan_files,
    write_file,
    write_index,
)
from raysharding.checkpoint.writing.manifest import Manifest, check_manifest, mismatches, read_manifest, write_manifest
from raysharding.checkpoint.writing.retention import (
    check_numbered,
    is_checkpoint,
    newest_after,
    newest_save,
    remove_left_overs,
    remove_older,
    remove_unfinished,
)
from raysharding.checkpoint.writing.save_files import is_save_name, is_weight_name
from raysharding.checkpoint.writing.save_record import SaveRecord, read_save_record
from raysharding.checkpoint.writing.writer import FileWriter
