"""Copying one open file into another: shared blocks where the file system can, else inside the kernel, else by hand."""

import errno
import fcntl
import os

FICLONE = 0x40049409
SMALL_BYTES = 128 << 10
PART_BYTES = 1 << 20
_CANNOT = {errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.EPERM, errno.ETXTBSY}


class Copier:
    """Copies between two file systems, and remembers what these two cannot do."""

    def __init__(self) -> None:
        self._clones = True
        self._in_kernel = True

    def copy(self, source: int, target: int, size: int) -> int:
        """Fill the empty `target` with the `size` bytes of `source`; how many there really were."""
        if size <= SMALL_BYTES:
            return _by_hand(source, target)
        if self._clones:
            try:
                fcntl.ioctl(target, FICLONE, source)
                return os.fstat(target).st_size
            except OSError as error:
                if error.errno not in _CANNOT:
                    raise
                self._clones = False
        done = self._through_kernel(source, target, size) if self._in_kernel else 0
        return done + _by_hand(source, target)

    def _through_kernel(self, source: int, target: int, size: int) -> int:
        done = 0
        while done < size:
            try:
                count = os.copy_file_range(source, target, size - done)
            except OSError as error:
                if error.errno not in _CANNOT:
                    raise
                self._in_kernel = False
                break
            if not count:
                break
            done += count
        return done


def _by_hand(source: int, target: int) -> int:
    """Whatever is left of `source`, from where it stands."""
    done = 0
    while part := os.read(source, PART_BYTES):
        done += len(part)
        view = memoryview(part)
        while view:
            view = view[os.write(target, view) :]
    return done
