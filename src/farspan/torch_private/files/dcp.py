"""The classes of which the metadata of torch.distributed.checkpoint are made."""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["DcpClasses", "dcp_classes"]

_METADATA = "torch.distributed.checkpoint.metadata"
_NAMES = (
    "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
    "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpClasses:
    """What may be in a pickle of DCP's metadata.

    Attributes:
        allowed: By module and name, as a pickle names them.
        metadata: Of the whole.
        tensor: Of a tensor.
    """

    allowed: Mapping[tuple[str, str], Any]
    metadata: type
    tensor: type


def dcp_classes() -> DcpClasses:
    """Dataclasses, enumerations, and names of dtypes and layouts: nothing that does anything when it is called."""
    from torch.distributed.checkpoint import filesystem, metadata

    layouts: dict[str, Any] = {str(item): item for item in (torch.strided, torch.sparse_coo, torch.sparse_csr)}

    def layout_of(name: str) -> Any:
        return layouts[name]

    allowed: dict[tuple[str, str], Any] = {
        (_METADATA, name): getattr(metadata, name) for name in _NAMES if hasattr(metadata, name)
    }
    allowed |= {
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
        ("torch", "Size"): torch.Size,
        ("torch", "device"): torch.device,
        ("torch.serialization", "_get_layout"): layout_of,
        ("collections", "OrderedDict"): collections.OrderedDict,
    }
    for name in ("Path", "PosixPath", "WindowsPath"):
        allowed["pathlib", name] = allowed["pathlib._local", name] = pathlib.PurePosixPath
    dtypes = {name: item for name, item in vars(torch).items() if isinstance(item, torch.dtype)}
    allowed |= {("torch", name): item for name, item in dtypes.items()}
    return DcpClasses(allowed=allowed, metadata=metadata.Metadata, tensor=metadata.TensorStorageMetadata)
