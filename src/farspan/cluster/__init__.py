"""The machines to plan for: device classes and the links between them. Knows neither torch nor the machines at hand."""

from __future__ import annotations

from farspan.cluster.cluster import Cluster, DeviceClass
from farspan.cluster.known import Speeds as Speeds
from farspan.cluster.known import speeds_of as speeds_of
from farspan.cluster.read import read_cluster
from farspan.cluster.within import within_host

__all__ = ["Cluster", "DeviceClass", "Speeds", "read_cluster", "speeds_of", "within_host"]
