"""Small ELF files: what an engine looks like to the loader, without one."""

import struct
from pathlib import Path

X86_64 = 62
AARCH64 = 183
_LOAD_ADDRESS = 0x10_000
_HEADERS_BYTES = 64 + 2 * 56


def machine_of(path: Path) -> int:
    """The processor that an ELF file is for."""
    return int.from_bytes(path.read_bytes()[18:20], "little")


HERE = machine_of(Path("/proc/self/exe"))


def build_elf(
    path: Path, *needed: str, rpath: str = "", runpath: str = "", soname: str = "", machine: int = HERE
) -> Path:
    """Write a shared library that needs others; no code is in it."""
    strings = b"\0"
    entries = []
    for tag, texts in ((1, needed), (15, [rpath]), (29, [runpath]), (14, [soname])):
        for text in filter(None, texts):
            entries.append((tag, len(strings)))
            strings += text.encode() + b"\0"
    dynamic_bytes = (len(entries) + 3) * 16
    strings_offset = _HEADERS_BYTES + dynamic_bytes
    entries += [(5, _LOAD_ADDRESS + strings_offset), (10, len(strings)), (0, 0)]
    total_bytes = strings_offset + len(strings)
    identity = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    raw = struct.pack("<16sHHIQQQIHHHHHH", identity, 3, machine, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    raw += struct.pack("<IIQQQQQQ", 1, 6, 0, _LOAD_ADDRESS, _LOAD_ADDRESS, total_bytes, total_bytes, 4096)
    raw += struct.pack(
        "<IIQQQQQQ", 2, 6, _HEADERS_BYTES, _LOAD_ADDRESS + _HEADERS_BYTES, 0, dynamic_bytes, dynamic_bytes, 8
    )
    raw += b"".join(struct.pack("<qQ", *entry) for entry in entries) + strings
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)
    return path


def build_cache(path: Path, entries: dict[str, str]) -> Path:
    """Write what ldconfig writes, after the cache of older systems."""
    before = b"ld.so-1.7.0\0" + struct.pack("=I", 0)
    header_bytes, entry_bytes = 48, 24
    strings, packed = b"", b""
    strings_start = header_bytes + entry_bytes * len(entries)
    for name, target in entries.items():
        key = strings_start + len(strings)
        strings += name.encode() + b"\0"
        value = strings_start + len(strings)
        strings += target.encode() + b"\0"
        packed += struct.pack("=iIIIQ", 0x303, key, value, 0, 0)
    header = struct.pack("=20sII20x", b"glibc-ld.so.cache1.1", len(entries), len(strings))
    path.write_bytes(before + header + packed + strings)
    return path
