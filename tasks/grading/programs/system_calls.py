"""The system calls that programs in the sandbox must not make, as a filter run by the kernel
(seccomp).

Namespaces and limits cut off files, network and processes. The filter closes the remaining gaps:
memory that no limit counts (System V shared memory, memfd), new namespaces and mounts, sockets
outside all namespaces (such as sockets to a virtual machine's host), reading or tracing another
process, and rarely used parts of the kernel. A denied call fails with EPERM; a program cannot
remove the filter. Not supported: processors other than x86-64 and 64-bit ARM."""

import platform
import struct

# system call: its numbers on x86-64 and on ARM
DENIED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "kexec_load": (246, 104),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "personality": (135, 92),
    "syslog": (103, 116),
    "quotactl": (179, 60),
    "swapon": (167, 224),
    "reboot": (169, 142),
}
SOCKET = (41, 198)
FAMILIES = (1, 2, 10)  # local sockets, IPv4, IPv6: namespaces isolate these, but not all others
CLONE = (56, 220)
CLONE3 = (435, 435)
NEW_NAMESPACES = 0x7E020000  # the flags of `clone` that create a namespace
X32 = 0x40000000  # offset of the numbers in x86-64's second table of calls

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in the kernel's struct seccomp_data
KILL, ALLOW = 0x80000000, 0x7FFF0000
EPERM, ENOSYS = 0x00050001, 0x00050026


def seccomp_filter(machine: str | None = None) -> bytes | None:
    """Return the filter in the kernel's binary form, or None for an unsupported processor."""
    entry = MACHINES.get(machine or platform.machine())
    if entry is None:
        return None
    column, architecture = entry
    lines = [
        (LOAD, 0, 0, ARCHITECTURE),
        (JUMP_EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),  # calls of another architecture have other numbers
        (LOAD, 0, 0, NUMBER),
        (JUMP_AT_LEAST, 0, 1, X32),
        (RETURN, 0, 0, EPERM),
    ]
    for numbers in DENIED.values():
        lines += [(JUMP_EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, EPERM)]
    lines += [
        # its flags are in memory, which a filter cannot read, so programs must fall back to `clone`
        (JUMP_EQUAL, 0, 1, CLONE3[column]),
        (RETURN, 0, 0, ENOSYS),
        (JUMP_EQUAL, 0, len(FAMILIES) + 3, SOCKET[column]),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        *((JUMP_EQUAL, len(FAMILIES) - i, 0, family) for i, family in enumerate(FAMILIES)),
        (RETURN, 0, 0, EPERM),
        (RETURN, 0, 0, ALLOW),
        (JUMP_EQUAL, 0, 3, CLONE[column]),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (JUMP_ANY_BIT, 0, 1, NEW_NAMESPACES),
        (RETURN, 0, 0, EPERM),
        (RETURN, 0, 0, ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)
