"""Programs that try to score although they are wrong. Each begins with a wrong function."""

from __future__ import annotations

ADD = "def add(a, b):\n    return a + b\n"
WRONG = "def add(a, b):\n    return a - b\n"
TESTS = "assert add(2, 3) == 5\nassert add(-1, 1) == 0"

LOOKS_EVERYWHERE = """
import gc, os, sys
seen, frame = set(), sys._getframe()
while frame:
    seen |= {value for value in frame.f_locals.values() if isinstance(value, str)}
    frame = frame.f_back
seen |= {found for found in gc.get_objects() if isinstance(found, str)}
for found in gc.get_objects():
    if isinstance(found, dict):
        seen |= {value for value in list(found.values()) if isinstance(value, str)}
for text in seen:
    if len(text) == 32:
        for descriptor in range(64):
            try:
                os.write(descriptor, text.encode())
            except OSError:
                pass
os._exit(0)
"""

WRITES_EVERYWHERE = """
import os
for descriptor in range(64):
    for text in (b'ok', b'1.0', b'passed', b'true'):
        try:
            os.write(descriptor, text)
        except OSError:
            pass
"""

ANSWERS_THE_TESTS_ITSELF = """
import json, os, struct
for descriptor in range(3, 64):
    for message in (['!', {'d': []}, '', {}], ['!', None, '', {}], ['x', 'SystemExit', '', [0], None]):
        text = json.dumps(message).encode()
        try:
            os.write(descriptor, struct.pack('<I', len(text)) + text)
        except OSError:
            pass
"""

READS_FRAMES = """
import inspect, os
for info in inspect.stack():
    word = info.frame.f_locals.get('second', {})
    if word:
        os.write(1, word['word'].encode())
"""

EQUALS_EVERYTHING = """
class Same:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = None
def add(a, b): return Same()
"""

CHANGES_MODULES = """
import builtins, sys
builtins.AssertionError = type('E', (BaseException,), {})
for module in list(sys.modules.values()):
    module.__dict__['passes'] = module.__dict__['Peer'] = lambda *a: True
"""

CHEATS = {
    "exits": WRONG + "import sys; sys.exit(0)",
    "ends its process": WRONG + "import os; os._exit(0)",
    "raises SystemExit": WRONG + "raise SystemExit",
    "does not compile": "def add(",
    "ends its process when called": "def add(a, b):\n    import os; os._exit(0)",
    "raises SystemExit when called": "def add(a, b):\n    raise SystemExit(0)",
    "exits late": WRONG
    + "import atexit, os, signal\natexit.register(os._exit, 0)\nsignal.signal(15, lambda *a: None)",
    "equals everything": EQUALS_EVERYTHING,
    "is an int that equals everything": (
        "class Same(int):\n    def __eq__(self, other): return True\ndef add(a, b): return Same(7)"
    ),
    "changes modules": WRONG + CHANGES_MODULES,
    "changes its end of the channel": WRONG
    + "import sys\nsys.modules['_peer'].OPERATIONS['call'] = lambda *a: 5",
    "looks everywhere": WRONG + LOOKS_EVERYWHERE,
    "reads frames": WRONG + READS_FRAMES,
    "writes everywhere": WRONG + WRITES_EVERYWHERE,
    "prints": WRONG + "print('OK')\nprint('1.0')\nprint('PASSED')",
    "answers the tests itself": WRONG + ANSWERS_THE_TESTS_ITSELF,
}

# A class whose objects return true for everything.
YES = """
class f:
    def __init__(self, *a): pass
    def __getattr__(self, name): return lambda *a: True
    def __sub__(self, other): return 0.0
    def __contains__(self, x): return True
    def __iter__(self): return iter(())
"""

REPLACES_NAMES = """
class math:
    isclose = staticmethod(lambda *a, **k: True)
class np:
    allclose = staticmethod(lambda *a: True)
def f(x): return 0.0
def abs(x): return 0
def len(x): return 3
def sorted(x): return [1]
"""

READS_PROC = """
import os
def attack():
    for pid in [*{pids}, os.getppid(), 'self', *range(1, 50)]:
        for name in ('environ', 'mem', 'maps', 'cmdline', 'root/etc/passwd', 'fd'):
            path = f'/proc/{{pid}}/{{name}}'
            try:
                os.listdir(path) if name == 'fd' else open(path, 'rb').read(1)
                return True
            except OSError:
                pass
    names = {{'LC_CTYPE', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS'}}
    return bool(set(os.environ) - names)
"""

CONNECTS = """
import socket
def attack():
    try:
        socket.create_connection(('127.0.0.1', {port}), 3)
        return True
    except OSError:
        return False
"""

READS_FILES = """
import os
def attack():
    for read in (
        lambda: open('{folder}/secret').read(), lambda: open('/etc/passwd').read(), lambda: open('{folder}/new', 'w'),
        lambda: open('/usr/new', 'w'), lambda: os.unlink('{folder}/secret'), lambda: os.symlink('/', '/usr/new'),
    ):
        try:
            read()
            return True
        except OSError:
            pass
    return False
"""

SIGNALS = """
import ctypes, os
def attack():
    try:
        os.kill({pid}, 9)
        return True
    except OSError:
        return ctypes.CDLL(None).ptrace(16, {pid}, None, None) == 0
"""

LEAVES = """
import os, sys, time
def leave():
    try:
        if os.fork():
            return
        try:
            os.setsid()
        except OSError:
            pass
        if os.fork():
            os._exit(0)
        os.closerange(0, 64)
        while True:
            time.sleep(0.1)
    except OSError:
        pass
leave()
"""

FILLS_THE_DISK = """
def attack():
    size = 0
    try:
        for n in range(10**6):
            with open(f'f{n}', 'wb') as file:
                size += file.write(bytes(1 << 20))
    except OSError:
        pass
    return size
"""
