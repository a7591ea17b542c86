"""How does a thread sleep until nothing has happened for a while, without being woken by what happens? On a kernel timer.

    alarm = Alarm(0.001)
    alarm.set()         # ring in 1 ms; setting it again starts anew
    alarm.clear()       # do not ring
    alarm.wait()        # in the other thread: returns when it has rung

`set` and `clear` are one system call each, 1 us, and wake nobody; a lock with a time-out would wake the thread each time, which
costs 15 us of CPU time (timerfd_create(2); Python has it in its os module from 3.13 on).
"""

from __future__ import annotations

import ctypes
import os
import select
import time


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Setting(ctypes.Structure):
    """itimerspec: rings once."""

    _fields_ = (("interval", _Timespec), ("value", _Timespec))


_libc = ctypes.PyDLL(None, use_errno=True)  # the calls never block, so Python's lock is kept: giving it up costs more
_settime = _libc.timerfd_settime
_settime.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
CLOEXEC = os.O_CLOEXEC


class Alarm:
    """A timer that one thread waits for and others set."""

    def __init__(self, after_s: float) -> None:
        """Raises OSError when the kernel gives no timer."""
        self._fd = _libc.timerfd_create(time.CLOCK_MONOTONIC, CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._later, self._never, self._now = _setting(round(after_s * 1e9)), _setting(0), _setting(1)
        self._addresses = [ctypes.addressof(each) for each in (self._later, self._never, self._now)]

    def set(self) -> None:
        """Ring after the time that was given, counted from now."""
        _settime(self._fd, 0, self._addresses[0], None)

    def clear(self) -> None:
        """Do not ring, also not for what has rung and not yet been waited for."""
        _settime(self._fd, 0, self._addresses[1], None)

    def ring(self) -> None:
        """Ring at once."""
        _settime(self._fd, 0, self._addresses[2], None)

    def wait(self, at_most_s: float | None = None) -> bool:
        """Return when it has rung since the last `wait`, or after `at_most_s`; whether it has rung."""
        if at_most_s is not None and not select.select([self._fd], [], [], at_most_s)[0]:
            return False
        os.read(self._fd, 8)
        return True

    def close(self) -> None:
        """Give the timer back; nobody may be waiting, and nobody may use it any more."""
        os.close(self._fd)


def _setting(nanoseconds: int) -> _Setting:
    return _Setting(value=_Timespec(*divmod(nanoseconds, 10**9)))
