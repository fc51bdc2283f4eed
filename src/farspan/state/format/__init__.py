"""The files of a checkpoint, without torch: manifest, safetensors files with checksums, an atomic commit.

docs/design/2026-11-24-checkpoint-format.md describes them. To read one:

    folder = newest("checkpoints")
    manifest = read_manifest(folder)
    with Reader(folder, manifest) as reader:
        reader.read("model/head.weight", memory)   # verified; a memoryview of manifest.tensors[name].size_bytes bytes
    verify(folder)                                 # all that is wrong with it
"""

from farspan.state.format.file import Part, Written, write_file
from farspan.state.format.folder import Draft, begin, candidates, commit, committed, discard, is_checkpoint, newest
from farspan.state.format.folder import has_name_of_one as has_name_of_one
from farspan.state.format.folder import make_root as make_root
from farspan.state.format.folder import point_to as point_to
from farspan.state.format.folder import remove_drafts as remove_drafts
from farspan.state.format.folder import serial_of as serial_of
from farspan.state.format.folder import step_in as step_in
from farspan.state.format.lock import Lock, hold
from farspan.state.format.manifest import Manifest, Piece, StoredFile, StoredTensor
from farspan.state.format.read import Damage, Reader, damaged, read_manifest, verify

__all__ = [
    "Damage",
    "Draft",
    "Lock",
    "Manifest",
    "Part",
    "Piece",
    "Reader",
    "StoredFile",
    "StoredTensor",
    "Written",
    "begin",
    "candidates",
    "commit",
    "committed",
    "damaged",
    "discard",
    "has_name_of_one",
    "hold",
    "is_checkpoint",
    "make_root",
    "newest",
    "point_to",
    "read_manifest",
    "remove_drafts",
    "serial_of",
    "step_in",
    "verify",
    "write_file",
]
