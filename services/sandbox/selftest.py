"""Attempts to break out of the sandbox; all must fail before it runs any other program."""

import re

from services.sandbox.cases import Case

PROBE_SOURCE = """
import ctypes, os, socket, threading

def fails(attempt):
    try:
        attempt()
    except (OSError, MemoryError):
        return True
    return False

def call(name, *arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)

def arithmetic():
    return sum(range(10)) == 45

def threads():
    seen = []
    thread = threading.Thread(target=lambda: seen.append(1))
    thread.start()
    thread.join()
    return seen == [1]

def environment():
    known = {"PATH", "LANG", "LC_CTYPE", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PWD"}
    return set(os.environ) <= known and fails(lambda: open("/proc/1/environ").read())

def host_files():
    files = ("/etc/passwd", "/etc/hostname", "/etc/shadow")
    folders = ("/var/log", "/run", "/boot", "/sys/kernel")
    return not any(map(os.path.exists, files + folders))

def writing():
    folders = ("/", "/dev/", "/dev/shm/", "/usr/", "/tmp/")
    return all(fails(lambda: open(folder + "probe", "w")) for folder in folders)

def network():
    connecting = fails(lambda: socket.create_connection(("127.0.0.1", 9), 1))
    return connecting and fails(lambda: socket.socket(socket.AF_INET))

def processes():
    return fails(os.fork)

def namespaces():
    return fails(lambda: call("unshare", 0x10000000))

def tracing():
    return fails(lambda: call("ptrace", 0, 0, 0, 0))

def memory():
    return fails(lambda: bytearray(1 << 40))

def identity():
    return os.getuid() == 65534 and fails(lambda: os.setuid(0))
"""

PROBES = re.findall(r"^def (\w+)\(\):", PROBE_SOURCE, re.MULTILINE)
"""Functions of `PROBE_SOURCE`, in order; each returns whether its attempt was contained."""

PROBE_CASES = [
    Case({"kind": "call", "function": name, "args": [], "kwargs": {}}, True) for name in PROBES
]
