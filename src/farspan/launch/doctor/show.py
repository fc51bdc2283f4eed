"""What has been found out, as short tables of plain text."""

from __future__ import annotations

from farspan.launch.doctor.examine import Clock, Examination
from farspan.launch.doctor.facts import Facts
from farspan.units import format_bytes, format_seconds, format_table

__all__ = ["format_examination"]

_MOST_LINKS = 30


def format_examination(found: Examination) -> str:
    """Returns the tables: versions and clocks, what each host has, and the links."""
    names = list(found.facts)
    parts: list[str] = []
    if names:
        kinds = list(found.versions[names[0]])
        rows = [[name, *(found.versions[name].get(kind, "none") for kind in kinds)] for name in names]
        for row, name in zip(rows, names, strict=True):
            row.append(_clock(found.clocks.get(name)))
        parts.append(format_table(["host", *kinds, "clock"], rows))
        heads = ["host", "cores", "memory free", "devices", "open files", "locked memory"]
        parts.append(format_table(heads, [_resources(name, found.facts[name]) for name in names]))
        heads = ["host", "folder", "free", "file system", "for"]
        rows = [
            [name, folder.path, format_bytes(folder.free_bytes), folder.file_system, folder.use]
            for name in names
            for folder in found.facts[name].folders
        ]
        parts.append(format_table(heads, rows))
    if found.links:
        shown = found.links
        if len(shown) > _MOST_LINKS:
            shown = sorted(shown, key=lambda link: link.bytes_per_s)[:_MOST_LINKS]
        rows = [
            [
                f"{link.source} > {link.destination}",
                link.address or "-",
                *(["-", "-"] if link.error else [format_seconds(link.latency_s), _rate(link.bytes_per_s)]),
            ]
            for link in shown
        ]
        rest = len(found.links) - len(shown)
        parts.append(
            format_table(["from > to", "address", "latency", "bandwidth"], rows)
            + (f"\nand {rest} links that are no slower" if rest else "")
        )
    return "\n\n".join(parts)


def _resources(name: str, facts: Facts) -> list[str]:
    free = f"{format_bytes(facts.free_memory_bytes)} of {format_bytes(facts.memory_bytes)}"
    kinds = [
        f"{each.name} ({format_bytes(each.free_bytes)} of {format_bytes(each.memory_bytes)} free)"
        for each in facts.devices
    ]
    shown = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)) or "no GPU"
    open_files = "any number" if facts.open_files < 0 else str(facts.open_files)
    locked = "any" if facts.locked_bytes < 0 else format_bytes(facts.locked_bytes)
    return [name, str(facts.num_cores), free, shown, open_files, locked]


def _clock(clock: Clock | None) -> str:
    if clock is None:
        return "?"
    if not clock.offset_s and not clock.error_s:
        return "first"
    sign = "+" if clock.offset_s >= 0 else "-"
    return f"{sign}{format_seconds(abs(clock.offset_s))} (+- {format_seconds(clock.error_s)})"


def _rate(bytes_per_s: float) -> str:
    size = bytes_per_s / 1e6
    return f"{size:.0f} MB/s" if size < 1000 else f"{size / 1000:.1f} GB/s"
