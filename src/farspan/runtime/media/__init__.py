"""The roads data can take between ranks."""

from farspan.runtime.media.gloo import GlooMedium as GlooMedium
from farspan.runtime.media.local import LocalMedium as LocalMedium
from farspan.runtime.media.medium import Medium as Medium
from farspan.runtime.media.medium import Sending as Sending
from farspan.runtime.media.medium import TransferError as TransferError
from farspan.runtime.media.medium import Work as Work
from farspan.runtime.media.nccl import NcclMedium as NcclMedium
from farspan.runtime.media.roads import Roads as Roads
from farspan.runtime.media.same_host import SameHostMedium as SameHostMedium

__all__ = [
    "GlooMedium",
    "LocalMedium",
    "Medium",
    "NcclMedium",
    "Roads",
    "SameHostMedium",
    "Sending",
    "TransferError",
    "Work",
]
