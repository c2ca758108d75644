"""What a compiler that was killed leaves in the cache of torch.compile.

The cache takes a library for whole as soon as its file is there, and the linker writes straight into that file: one
that was killed half-way, by Ctrl-C or for want of memory, would be loaded, in vain, by every later run.
"""

import struct
import time
from contextlib import suppress
from pathlib import Path

IN_PROGRESS_S = 5.0
"""Files that were written to so recently may be those of a linker that is still at work."""


def remove_torn_libraries() -> int:
    """Remove libraries and object files that end too early from the cache of this user; return how many."""
    # Imports the compiler, which takes a second that a run without it need not spend.
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    files = [path for suffix in ("so", "o") for path in Path(cache_dir()).rglob(f"*.{suffix}")]
    removed = 0
    for path in files:
        with suppress(OSError):  # of another process that cleans up too
            if time.time() - path.stat().st_mtime >= IN_PROGRESS_S and _is_torn(path):
                path.unlink()
                removed += 1
    return removed


def _is_torn(path: Path) -> bool:
    """Tell whether a file is empty, not begun, or an ELF file without its end, where the table of sections stands."""
    with path.open("rb") as file:
        header = file.read(64)
    if not header.strip(b"\0"):
        return True
    if header[:4] != b"\x7fELF":
        return False  # of a system that has another format
    if len(header) < 64:
        return True
    (offset,) = struct.unpack_from("<Q", header, 40)
    entry_size, entries = struct.unpack_from("<HH", header, 58)
    return path.stat().st_size < offset + entry_size * entries
