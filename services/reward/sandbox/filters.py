"""Filters of the system calls that a program in the sandbox cannot make, compiled for the kernel (seccomp BPF)."""

import errno
import os
from functools import cache
from typing import Any

from services.reward.sandbox.command import unavailable

_CLONE_NEW = 0x7E020080  # every CLONE_NEW* namespace flag of clone
_CLONE_THREAD = 0x00010000
_AF_UNIX = 1
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX
_FORBIDDEN = {
    "keys, tracing, kernel interfaces with a history of holes": "add_key keyctl request_key bpf perf_event_open "
    "io_uring_setup io_uring_enter io_uring_register userfaultfd ptrace process_vm_readv process_vm_writev process_madvise "
    "pidfd_getfd kcmp lookup_dcookie fanotify_init",
    "namespaces and mounts": "unshare setns mount umount2 pivot_root chroot move_mount open_tree fsopen fsconfig fsmount "
    "fspick mount_setattr name_to_handle_at open_by_handle_at",
    "memory and messages that no limit of a process counts": "memfd_create memfd_secret shmget shmat shmctl msgget msgsnd "
    "msgrcv msgctl semget semop semctl semtimedop mq_open mq_unlink",
    "the machine itself": "init_module finit_module delete_module kexec_load kexec_file_load reboot swapon swapoff acct "
    "quotactl syslog personality settimeofday clock_settime clock_adjtime adjtimex sethostname setdomainname vhangup iopl "
    "ioperm",
}
_PROCESSES = ("fork", "vfork")


@cache
def base_filter() -> bytes:
    """Returns the filter of the whole sandbox. Raises ConfigError where pyseccomp or libseccomp is missing."""
    seccomp = _library()
    rules = seccomp.SyscallFilter(seccomp.ALLOW)
    denied = seccomp.ERRNO(errno.EPERM)
    for name in " ".join(_FORBIDDEN.values()).split():
        _add(rules, denied, name)
    # clone3 takes its flags from memory, which a filter cannot read; without it the C library uses clone.
    _add(rules, seccomp.ERRNO(errno.ENOSYS), "clone3")
    for flag in (1 << bit for bit in range(32) if _CLONE_NEW & (1 << bit)):
        _add(rules, denied, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, flag, flag))
    _add(rules, denied, "socket", seccomp.Arg(0, seccomp.NE, _AF_UNIX))
    for request in _TERMINAL_INPUT:
        _add(rules, denied, "ioctl", seccomp.Arg(1, seccomp.MASKED_EQ, 0xFFFFFFFF, request))
    return _compiled(rules)


@cache
def threads_only_filter() -> bytes:
    """Returns the filter of a program: it may start threads, but no process. Raises ConfigError as `base_filter` does."""
    seccomp = _library()
    rules = seccomp.SyscallFilter(seccomp.ALLOW)
    denied = seccomp.ERRNO(errno.EPERM)
    for name in _PROCESSES:
        _add(rules, denied, name)
    _add(rules, denied, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, _CLONE_THREAD, 0))
    return _compiled(rules)


def _library() -> Any:
    try:
        import pyseccomp
    except (ImportError, OSError, RuntimeError) as error:
        remedy = "apt-get install libseccomp2 and pip install 'rlhf-math[services]'"
        raise unavailable(f"pyseccomp does not work: {error}", remedy) from None
    return pyseccomp


def _add(rules: Any, action: int, name: str, *arguments: Any) -> None:
    try:
        rules.add_rule(action, name, *arguments)
    except (OSError, ValueError) as error:  # the kernel or libseccomp lacks this call
        if name in ("clone", "socket", "ptrace", "unshare"):
            raise unavailable(f"libseccomp cannot forbid {name}: {error}", "install a newer libseccomp2") from None


def _compiled(rules: Any) -> bytes:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as program, os.fdopen(writer, "wb") as into:
        rules.export_bpf(into)  # a few kilobytes: less than a pipe holds
        into.close()
        return program.read()
