"""Linux protections for a process that runs untrusted code, applied through `ctypes`.

This module imports nothing from weft, since the launcher loads this file by its path.

`enter` applies the requested protections to the calling process, and raises `OSError` if the system
refuses one. `weft.host.verifiers.code` determines once which protections work.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import resource
import signal
import site
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass

NOBODY = 65534  # id of a user and group that own no files
# Flags and options of the kernel, from its headers
NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (1 << bit for bit in (17, 26, 27, 28, 29, 30))
MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
EPERM = 1

# Name of a system call -> its numbers on x86-64 and on ARM64
CALLS: Mapping[str, tuple[int, int]] = {
    "capset": (126, 91),
    "pivot_root": (155, 41),
    "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
}
# System calls that the protection `seccomp` refuses; a computation never needs them. Without them a
# program cannot open a socket, access another process, leave its process group, or get a new
# namespace, mount, key, or memory that outlives it.
DENIED: Mapping[str, tuple[int, int]] = {
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "setsid": (112, 157),
    "setpgid": (109, 154),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
}
# Machine -> its architecture number in seccomp
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32 = 0x40000000  # on x86-64, the numbers of the same calls are repeated from here on

# Landlock's rights: execute 1, write 2, read a file 4, read a folder 8; higher bits create and
# remove files.
LANDLOCK_READ = 1 | 4 | 8
LANDLOCK_DEVICE = 2 | 4
# Landlock's version -> all its rights; later versions add rights that are not needed here
LANDLOCK_ALL = {
    1: (1 << 13) - 1,
    2: (1 << 14) - 1,
    3: (1 << 15) - 1,
}
O_PATH = 1 << 21

DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
# Folders and files of the system that a program can read
SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/nix/store",
    "/gnu/store",
    "/etc/ld.so.cache",
    "/etc/localtime",
)


@dataclass(frozen=True)
class IsolationSettings:
    """Protections to apply to a process, with their parameters.

    Attributes:
        protections: Names of the protections, which are described in `_sandbox.PROTECTIONS`.
        limits: Resource limits, keyed by their names in the module `resource`.
        folder: Empty folder in which the process works. With the protection `files`, it is instead
            the mount point of a new root file system, and the process works in the `/tmp` of this
            file system.
        disk_mb: Maximum size in MiB of the `/tmp` that the protection `files` creates.
    """

    protections: frozenset[str]
    limits: Mapping[str, int]
    folder: str
    disk_mb: int


def list_readable_paths() -> list[str]:
    """Return the folders and files that a Python program needs to read.

    These are the system's libraries and the Python installation of this process. Raises `OSError`
    if one of them is `/`.
    """
    paths: list[str] = []
    for path in [
        *SYSTEM,
        sys.base_prefix,
        sys.base_exec_prefix,
        sys.prefix,
        sys.exec_prefix,
        *site.getsitepackages(),
    ]:
        is_covered = any(path == other or path.startswith(other + "/") for other in paths)
        if not is_covered and os.path.exists(path):
            paths.append(path)
    if "/" in paths:
        raise OSError("Python is installed in /, so no file can be hidden")
    return paths


def set_death_with_parent() -> None:
    """Make the kernel kill this process when its parent ends."""
    _call_prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose parent has ended, so that they can be killed."""
    _call_prctl(PR_SET_CHILD_SUBREAPER, 1)


def list_children() -> list[int]:
    """Return the process ids of this process's children, or [] if the system does not list them."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return [int(number) for number in file.read().split()]
    except OSError:
        return []


def hide_memory() -> None:
    """Prevent processes of the same user from tracing this process or reading its memory.

    They cannot read the environment of this process, either.
    """
    with contextlib.suppress(OSError):
        _call_prctl(PR_SET_DUMPABLE, 0)


def enter(settings: IsolationSettings) -> None:
    """Apply the protections and resource limits in `settings` to this process.

    Raises `OSError` if the system does not support or permit a protection. With the protection
    `namespaces`, this function returns in a grandchild of this process. This process and its child
    wait for the grandchild and exit after it. The child is the first process of the new PID
    namespace: when it ends, the kernel kills all processes in the namespace.
    """
    # Namespaces and files
    if "namespaces" in settings.protections:
        _unshare()
        _fork_and_wait()
        set_death_with_parent()
    if "files" in settings.protections:
        _isolate_files(settings)
    else:
        os.chdir(settings.folder)
    if "namespaces" in settings.protections:
        _fork_and_wait()
    # Access rights of the process
    if "landlock" in settings.protections:
        _restrict_file_access(os.getcwd())
    if "user" in settings.protections and os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    if sys.platform == "linux":
        set_death_with_parent()  # again, since changing the user resets it
        _call_prctl(PR_SET_NO_NEW_PRIVS, 1)
        # Drop all capabilities.
        _call_system("capset", struct.pack("<Ii", 0x20080522, 0), bytes(24))
    if "seccomp" in settings.protections:
        _refuse_calls()
    # Limits of resources
    for name, value in settings.limits.items():
        with contextlib.suppress(ValueError, OSError):  # a lower hard limit is in force
            resource.setrlimit(getattr(resource, name), (value, value))


def _unshare() -> None:
    """Move this process into new namespaces.

    An ordinary user can create them only together with a new user namespace, so one is created as
    well. For root, a user namespace is created only if the other namespaces cannot be created
    without it.
    """
    flags = NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET
    uid = os.geteuid()
    gid = os.getegid()
    if uid == 0:
        with contextlib.suppress(OSError):
            _check_result(_load_libc().unshare(flags))
            return
    _check_result(_load_libc().unshare(flags | NEWUSER))
    inner_id = 0 if uid == 0 else NOBODY
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inner_id} {uid} 1"),
        ("gid_map", f"{inner_id} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def _fork_and_wait() -> None:
    """Fork and continue in the child process; the parent exits when the child exits."""
    child = os.fork()
    if child:
        with contextlib.suppress(OSError):
            while os.wait()[0] != child:
                pass
        os._exit(0)


def _isolate_files(settings: IsolationSettings) -> None:
    """Change to a new root directory without /proc.

    The new root contains the paths of `list_readable_paths` (read-only), four devices, and an empty
    /tmp of limited size.
    """
    root = settings.folder
    _mount("none", "/", "", MS_REC | MS_PRIVATE)
    _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    # Bind-mount the readable folders and the devices.
    for path in (*list_readable_paths(), *DEVICES):
        mount_point = root + path
        os.makedirs(os.path.dirname(mount_point), exist_ok=True)
        if os.path.islink(path) and path in SYSTEM and os.path.isdir(path):
            os.symlink(os.readlink(path), mount_point)
            continue
        if os.path.isdir(path):
            os.makedirs(mount_point, exist_ok=True)
        else:
            os.close(os.open(mount_point, os.O_CREAT | os.O_WRONLY, 0o644))
        _mount(path, mount_point, "", MS_BIND | MS_REC)
    # Remount all of them read-only, except the devices; a bind mount ignores this flag.
    os.mkdir(f"{root}/tmp")
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        mount_points = [
            re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), line.split(" ")[4])
            for line in file
        ]
    for mount_point in mount_points:
        if mount_point == root or mount_point.startswith(root + "/"):
            mount_flags = os.statvfs(mount_point).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)
            is_device = mount_point.removeprefix(root) in DEVICES
            _mount(
                "none",
                mount_point,
                "",
                MS_REMOUNT | MS_BIND | MS_NOSUID | mount_flags | (0 if is_device else MS_RDONLY),
            )
    # Mount /tmp, and make the new root the only one.
    size = f"size={settings.disk_mb}m,nr_inodes=4096,mode=1777"
    _mount("tmpfs", f"{root}/tmp", "tmpfs", MS_NOSUID | MS_NODEV, size)
    os.chdir(root)
    _call_system("pivot_root", b".", b".")
    _check_result(_load_libc().umount2(b".", MNT_DETACH))
    os.chdir("/tmp")


def _restrict_file_access(work: str) -> None:
    """Restrict the process's file access with Landlock.

    The process keeps full access to the folder `work`. Elsewhere, it can only read the paths of
    `list_readable_paths` and use the devices in `DEVICES`.
    """
    # Create a set of rules for the rights that this version of Landlock knows.
    version = _call_system("landlock_create_ruleset", None, 0, 1)
    rights = LANDLOCK_ALL[min(version, 3)]
    rule_fields = [rights]
    if version >= 4:
        rule_fields.append(1 | 2)  # bind and connect TCP sockets
    if version >= 6:
        rule_fields.append(1 | 2)  # abstract sockets and signals
    content = struct.pack(f"<{len(rule_fields)}Q", *rule_fields)
    rules = _call_system("landlock_create_ruleset", content, len(content), 0)
    # Add a rule for each allowed path, then enter the rules.
    allowed = [(path, rights & LANDLOCK_READ) for path in list_readable_paths()]
    allowed += [(path, LANDLOCK_DEVICE) for path in DEVICES] + [(work, rights)]
    for path, right in allowed:
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(path, O_PATH | os.O_CLOEXEC)
            right = right if os.path.isdir(path) else right & ~8
            _call_system("landlock_add_rule", rules, 1, struct.pack("<Qi", right, descriptor), 0)
            os.close(descriptor)
    _call_prctl(PR_SET_NO_NEW_PRIVS, 1)
    _call_system("landlock_restrict_self", rules, 0)
    os.close(rules)


def _refuse_calls() -> None:
    """Install a seccomp filter that makes the system calls in `DENIED` fail with EPERM.

    System calls of another architecture kill the process.
    """
    # Opcodes and return values of the filter
    machine = platform.machine()
    column = list(AUDIT).index(machine)
    load = 0x20
    equal = 0x15
    at_least = 0x35
    return_ = 0x06
    kill = 0x80000000
    refuse = 0x00050000 | EPERM
    allow = 0x7FFF0000
    # Check the architecture, then compare the number of the call with each denied one.
    numbers = sorted(pair[column] for pair in DENIED.values())
    tests = [(at_least, X32)] * (machine == "x86_64") + [(equal, number) for number in numbers]
    code = [(load, 0, 0, 4), (equal, 1, 0, AUDIT[machine]), (return_, 0, 0, kill), (load, 0, 0, 0)]
    for left, (kind, value) in zip(range(len(tests), 0, -1), tests, strict=True):
        code.append((kind, left, 0, value))  # jump to the last line, which refuses
    code += [(return_, 0, 0, allow), (return_, 0, 0, refuse)]
    # Install the filter.
    lines = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *line) for line in code))
    filter_ = struct.pack("@HP", len(code), ctypes.addressof(lines))
    _call_prctl(
        PR_SET_SECCOMP, 2, ctypes.cast(ctypes.create_string_buffer(filter_), ctypes.c_void_p)
    )


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    words = [os.fsencode(word) for word in (source, target, kind)]
    _check_result(
        _load_libc().mount(*words, ctypes.c_ulong(flags), os.fsencode(options) or None), target
    )


def _call_prctl(option: int, *values: object) -> None:
    converted = []
    for value in values:
        converted.append(
            value if isinstance(value, ctypes.c_void_p) else ctypes.c_ulong(int(str(value)))
        )
    _check_result(
        _load_libc().prctl(option, *converted, *[ctypes.c_ulong(0)] * (4 - len(converted)))
    )


def _call_system(name: str, *values: object) -> int:
    """Make a system call for which the C library has no wrapper function."""
    column = list(AUDIT).index(platform.machine())
    converted: list[object] = []
    for value in values:
        converted.append(ctypes.c_long(value) if isinstance(value, int) else value)
    return _check_result(_load_libc().syscall(ctypes.c_long(CALLS[name][column]), *converted))


def _load_libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check_result(result: int, path: str = "") -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path or None)
    return result
