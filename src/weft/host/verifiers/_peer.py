"""Calls between the process that runs a program and the one that runs its tests.

This module imports nothing from weft, since the launcher loads this file by its path.

Plain values are sent as JSON with their type, and arrive as new objects of the built-in types;
nothing that comes from the program is unpickled or evaluated. Any other object stays in its
process, and the other process gets a `RemoteProxy`, which forwards calls and accesses to attributes
and items. A `RemoteProxy` is unequal to every plain value, so that an object of the program cannot
claim to equal the expected value of a test.
"""

from __future__ import annotations

import base64
import builtins
import collections
import datetime
import decimal
import fractions
import functools
import io
import json
import operator
import os
import pickle
import struct
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

MAX_BYTES = 64 << 20  # size limit of a message
MAX_PRINTED = 1 << 20  # maximum number of characters of output forwarded at a time
SAFE_INTEGER = 1 << 62  # larger integers are sent as hexadecimal text
CALLABLE_TYPES = (types.FunctionType, types.MethodType, type)  # that a program may call
DUNDERS = ("__name__", "__doc__", "__qualname__")  # special attributes that proxies forward
# Names of predicates of texts, numbers and sets. Tests cannot get them from objects of the program:
# such an object in place of a plain value could always return True.
PREDICATES = frozenset(
    name
    for kind in (str, bytes, float, set, range)
    for name in dir(kind)
    if not name.startswith("_") and name.startswith(("is", "startswith", "endswith"))
) | {"equals", "equal"}
# Types that are sent as text -> their parsers
TEXTUAL: dict[str, Callable[[str], Any]] = {
    "Decimal": decimal.Decimal,
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
}
# Operators that proxies forward, by their names in the module `operator`
OPERATORS = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and_",
    "or_",
    "xor",
    "lt",
    "le",
    "gt",
    "ge",
)


class ProtocolError(Exception):
    """Raised for a message that cannot be read, or that requests a forbidden operation."""


class RemoteProxy:
    """Proxy that forwards operations, such as calls, to an object in another process."""

    def __init__(self, peer: ObjectPeer, number: int) -> None:
        object.__setattr__(self, "_weft", (peer, number))

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return _ask(self, "call", *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in DUNDERS:
            raise AttributeError(name)
        return _ask(self, "getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "setattr", name, value)

    def __iter__(self) -> Iterator[Any]:
        items = _ask(self, "iter")
        while (item := _ask(items, "next")) != []:
            yield item[0]

    def __next__(self) -> Any:
        item = _ask(self, "next")
        if not item:
            raise StopIteration
        return item[0]

    def __len__(self) -> int:
        return int(_ask(self, "len"))

    def __bool__(self) -> bool:
        return bool(_ask(self, "bool"))

    def __getitem__(self, key: Any) -> Any:
        return _ask(self, "getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        _ask(self, "setitem", key, value)

    def __str__(self) -> str:
        return str(_ask(self, "str"))

    def __repr__(self) -> str:
        return str(_ask(self, "repr"))

    def __enter__(self) -> Any:
        return _ask(self, "enter")

    def __exit__(self, *error: Any) -> None:
        _ask(self, "exit")

    def __eq__(self, other: Any) -> Any:
        if _is_remote(other):
            return bool(_ask(self, "eq", other))
        return NotImplemented

    def __hash__(self) -> int:
        return hash(_locate(self)[1])

    def __instancecheck__(self, value: Any) -> bool:
        return _is_remote(value) and bool(_ask(self, "isinstance", value))


def _build_operator(name: str) -> Callable[[RemoteProxy, Any], Any]:
    def combine(self: RemoteProxy, other: Any) -> Any:
        return _ask(self, name, other) if _is_remote(other) else NotImplemented

    return combine


for _name in OPERATORS:
    setattr(RemoteProxy, f"__{_name.strip('_')}__", _build_operator(_name))


def _is_remote(value: Any) -> bool:
    return type(value) is RemoteProxy


def _locate(remote: Any) -> tuple[ObjectPeer, int]:
    location: tuple[ObjectPeer, int] = object.__getattribute__(remote, "_weft")
    return location


def _ask(remote: Any, operation: str, /, *args: Any, **kwargs: Any) -> Any:
    peer, number = _locate(remote)
    if peer.guarded and operation == "getattr" and args[0] in PREDICATES:
        raise AttributeError(
            f"{args[0]!r} of an object of the program is not available: only plain values have it"
        )
    return peer.request(operation, number, args, kwargs)


def _next(items: Any) -> list[Any]:
    try:
        return [next(items)]
    except StopIteration:
        return []


# Operation of a request -> function that performs it on the object
OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda target, /, *args, **kwargs: target(*args, **kwargs),
    "getattr": getattr,
    "setattr": setattr,
    "iter": iter,
    "next": _next,
    "len": len,
    "bool": bool,
    "str": str,
    "repr": repr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "eq": operator.eq,
    "enter": lambda target: target.__enter__(),
    "exit": lambda target: target.__exit__(None, None, None),
    "isinstance": lambda target, value: isinstance(value, target),
    **{name: getattr(operator, name) for name in OPERATORS},
}


class ObjectPeer:
    """One end of the channel between a process that runs a program and a process that tests it.

    At the tests' end, `guarded` is true and the program's access is restricted. The program can
    then use only those objects of the tests that were sent to it: functions, classes and instances
    of classes that the tests define, and generators. Attributes whose names start with an
    underscore are inaccessible.

    A message is a JSON list:

    - request: ["?", operation, object number, arguments, keyword arguments]
    - result: ["!", value, printed output, changed arguments]
    - error: ["x", name of the error's built-in base class, printed output, arguments of the error,
      class of the error or None if this class is built in]
    """

    def __init__(self, descriptor: int, *, guarded: bool) -> None:
        self.guarded = guarded
        self.printed = io.StringIO()
        self._descriptor = descriptor
        self._objects: list[Any] = []  # objects of this end that the other end knows, by number
        self._numbers: dict[int, int] = {}  # id of such an object -> its number
        self._remotes: dict[int, Any] = {}  # number of an object of the other end -> its proxy

    def request(self, operation: str, number: int | None, args: Any, kwargs: Any) -> Any:
        """Ask the other end to perform an operation, and return the result or raise the error.

        `number` identifies the other end's object on which to perform the operation. It is None for
        the operation "names", which requests globals by name. While waiting, this end answers
        requests of the other end. Text that the operation has printed is written to this process's
        standard output, and its changes to mutable arguments are copied into `args`.
        """
        self._send(
            ["?", operation, number, [self.encode(arg) for arg in args], self.encode(kwargs)]
        )
        while (message := self._receive())[0] == "?":
            self._answer_request(message)
        kind, value, printed, *rest = message
        if printed:
            sys.stdout.write(str(printed))
        if kind == "!":
            for index, changed in rest[0].items():
                _replace(args[int(index)], self.decode(changed))
            return self.decode(value)
        raise self._rebuild_error(value, *rest)

    def serve(self, names: dict[str, Any]) -> None:
        """Answer the requests of the other end until it closes the channel.

        `names` are the globals that the other end can request.
        """
        while True:
            message = self._receive()
            if message[1] == "names":
                pairs = []
                for name in self.decode(message[3][0]):
                    if name in names:
                        pairs.append([name, self.encode(names[name])])
                self._send(["!", {"d": pairs}, self._print(), {}])
            else:
                self._answer_request(message)

    def _answer_request(self, message: Any) -> None:
        _, operation, number, encoded_args, encoded_kwargs = message
        try:
            args = [self.decode(arg) for arg in encoded_args]
            kwargs = self.decode(encoded_kwargs)
            target = self._objects[number]
            self._check_allowed(target, operation, args)
            value = self.encode(OPERATIONS[operation](target, *args, **kwargs))
            changed = {}
            if operation == "call" and not self.guarded:
                for index, arg in enumerate(args):
                    if type(arg) in MUTABLE_TYPES:
                        encoded = self.encode(arg)
                        if encoded != encoded_args[index]:
                            changed[index] = encoded
            self._send(["!", value, self._print(), changed])
        except BaseException as error:  # the other side raises it
            text = []
            for arg in error.args:
                is_plain = isinstance(arg, str | int | float | None)
                text.append(self.encode(arg) if is_plain else str(arg)[:1000])
            is_own_class = type(error).__module__ != "builtins"
            kind = {"r": self._register_object(type(error))} if is_own_class else None
            self._send(["x", _find_base_name(type(error)), self._print(), text, kind])

    def _check_allowed(self, target: Any, operation: str, args: Any) -> None:
        if not self.guarded:
            return
        is_allowed = type(target).__module__ == "__main__"
        if operation in ("getattr", "setattr"):
            is_allowed = is_allowed and type(args[0]) is str and not args[0].startswith("_")
        elif operation == "call" and isinstance(target, CALLABLE_TYPES):
            is_allowed = target.__module__ == "__main__"
        elif operation in ("iter", "next") and isinstance(target, types.GeneratorType):
            is_allowed = True
        if not is_allowed:
            raise ProtocolError(f"{operation} is not allowed on this object of the tests")

    def _rebuild_error(self, base: Any, text: Any, kind: Any) -> BaseException:
        error_class = getattr(builtins, str(base), Exception)
        if kind is not None:
            error_class = self._remotes.get(kind["r"], error_class)
        args = [self.decode(value) for value in text]
        try:
            error = error_class(*args)
        except Exception:  # its constructor takes other arguments
            error = RuntimeError(*args)
        return error if isinstance(error, BaseException) else RuntimeError(*args)

    def _print(self) -> str:
        text = self.printed.getvalue()[:MAX_PRINTED]
        self.printed.seek(0)
        self.printed.truncate()
        return text

    # -- values

    def encode(self, value: Any) -> Any:
        """Return the JSON form of a value.

        An object that is not a plain value stays in this process, and is represented by a number.
        """
        if value is None or type(value) is bool:
            return value
        if type(value).__module__ == "numpy" and (packed := _pack_array(value)) is not None:
            return {"a": packed}
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, float):
            return float.__float__(value)
        if isinstance(value, int):
            number = int.__int__(value)
            if -SAFE_INTEGER < number < SAFE_INTEGER:
                return number
            return {"i": hex(number)}
        if isinstance(value, tuple):
            items = [self.encode(item) for item in value]
            fields = getattr(type(value), "_fields", None)
            if fields is None:
                return {"t": items}
            return {"n": [type(value).__name__, list(fields), items]}
        for kind, tag in TAGS.items():
            if isinstance(value, kind):
                return self._encode_container(tag, value)
        if type(value) in (decimal.Decimal, datetime.datetime, datetime.date, datetime.time):
            if isinstance(value, decimal.Decimal):
                text = str(value)
            else:
                text = value.isoformat()
            return {"w": [type(value).__name__, text]}
        if (
            isinstance(value, type)
            and value.__module__ == "builtins"
            and hasattr(builtins, value.__name__)
        ):
            return {"x": value.__name__}
        return self._encode_reference(value)

    def _encode_container(self, tag: str, value: Any) -> Any:
        if tag == "l":
            return [self.encode(item) for item in list.__iter__(value)]
        if tag in "dCO":
            return {tag: [[self.encode(key), self.encode(item)] for key, item in dict.items(value)]}
        if tag in "bB":
            return {tag: base64.b64encode(value).decode()}
        if tag == "q":
            return {tag: [self.encode(value.numerator), self.encode(value.denominator)]}
        if tag == "c":
            return {tag: [value.real, value.imag]}
        if tag == "R":
            return {tag: [self.encode(part) for part in (value.start, value.stop, value.step)]}
        if tag == "T":
            return {tag: [value.days, value.seconds, value.microseconds]}
        if tag == "D":
            return {tag: [value.maxlen, [self.encode(item) for item in value]]}
        return {tag: [self.encode(item) for item in value]}

    def _encode_reference(self, value: Any) -> Any:
        if _is_remote(value):
            return {"y": _locate(value)[1]}
        for number, remote in self._remotes.items():
            if remote is value:  # the local copy of an exception class of the other side
                return {"y": number}
        if self.guarded and getattr(value, "__module__", type(value).__module__) != "__main__":
            try:
                return {"p": base64.b64encode(pickle.dumps(value)).decode()}
            except Exception:  # it cannot be pickled: send a reference to it
                return {"r": self._register_object(value)}
        json_form: dict[str, Any] = {"r": self._register_object(value)}
        if isinstance(value, type) and issubclass(value, BaseException):
            json_form |= {"e": _find_base_name(value), "name": value.__name__}
        return json_form

    def _register_object(self, value: Any) -> int:
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)  # kept alive, so that its id is not reused
        return number

    def decode(self, value: Any) -> Any:
        """Return the value that a JSON form represents.

        Raises `ProtocolError` for an unknown form.
        """
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "r" in value:
            return self._decode_remote(value)
        ((tag, content),) = value.items()
        if tag == "y":
            return self._objects[content]
        if tag == "p" and not self.guarded:
            return pickle.loads(base64.b64decode(content))
        if tag == "x" and isinstance(builtin_class := getattr(builtins, content), type):
            return builtin_class
        if tag == "n":
            name, fields, items = content
            return collections.namedtuple(name, fields)(*self.decode(items))
        if tag not in BUILDERS:
            raise ProtocolError(f"unknown kind of value {tag!r:.20}")
        return BUILDERS[tag](self.decode(content))

    def _decode_remote(self, value: dict[str, Any]) -> Any:
        number = int(value["r"])
        if number not in self._remotes:
            if "e" in value:
                base = getattr(builtins, str(value["e"]))
                self._remotes[number] = type(str(value["name"]), (base,), {})
            else:
                self._remotes[number] = RemoteProxy(self, number)
        return self._remotes[number]

    # -- messages: length in four bytes, then JSON

    def _send(self, message: Any) -> None:
        content = json.dumps(message).encode()
        if len(content) > MAX_BYTES:
            raise ProtocolError(
                f"a message has {len(content)} bytes; at most {MAX_BYTES} are allowed"
            )
        left = memoryview(struct.pack("<I", len(content)) + content)
        while left:
            left = left[os.write(self._descriptor, left) :]

    def _receive(self) -> Any:
        (size,) = struct.unpack("<I", self._read(4))
        if size > MAX_BYTES:
            raise ProtocolError(f"a message has {size} bytes; at most {MAX_BYTES} are allowed")
        return json.loads(self._read(size))

    def _read(self, size: int) -> bytes:
        parts = []
        while size:
            part = os.read(self._descriptor, min(size, 1 << 20))
            if not part:
                raise EOFError("the other process has ended")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


# Type of a container or number -> tag of its JSON form; subclasses come before their base classes
TAGS: dict[type, str] = {
    list: "l",
    collections.Counter: "C",
    collections.OrderedDict: "O",
    dict: "d",
    set: "s",
    frozenset: "f",
    bytes: "b",
    bytearray: "B",
    fractions.Fraction: "q",
    complex: "c",
    range: "R",
    datetime.timedelta: "T",
    collections.deque: "D",
}
# Tag -> function that builds the value from its decoded content
BUILDERS: dict[str, Callable[[Any], Any]] = {
    "t": tuple,
    "s": set,
    "f": frozenset,
    "d": dict,
    "C": lambda pairs: collections.Counter(dict(pairs)),
    "O": collections.OrderedDict,
    "b": base64.b64decode,
    "B": lambda text: bytearray(base64.b64decode(text)),
    "i": lambda text: int(text, 16),
    "q": lambda parts: fractions.Fraction(*parts),
    "c": lambda parts: complex(*parts),
    "R": lambda parts: range(*parts),
    "T": lambda parts: datetime.timedelta(*parts),
    "D": lambda parts: collections.deque(parts[1], parts[0]),
    "w": lambda parts: TEXTUAL[parts[0]](parts[1]),
    "a": lambda parts: _unpack_array(*parts),
}
MUTABLE_TYPES = (list, dict, set, bytearray, collections.deque)  # types whose changes are sent back


def _replace(old: Any, new: Any) -> None:
    """Replace the content of `old` with the content of `new`, in place.

    `old` is a mutable argument of a call, and `new` is its state after the call.
    """
    if isinstance(old, list):
        old[:] = new
    else:
        old.clear()
        (old.extend if isinstance(old, (bytearray, collections.deque)) else old.update)(new)


def _find_base_name(kind: type) -> str:
    """Return the name of the nearest built-in base class of the exception class `kind`."""
    return next(
        base.__name__ for base in kind.__mro__ if getattr(builtins, base.__name__, None) is base
    )


def _pack_array(value: Any) -> list[Any] | None:
    """Return a numpy array or scalar as [dtype, shape, bytes in base64, is scalar].

    Returns None for other objects, and if the elements are not Booleans, numbers or strings.
    """
    numpy = sys.modules["numpy"]
    array = numpy.asarray(value)
    if array.dtype.kind not in "biufcSU" or not isinstance(value, (numpy.ndarray, numpy.generic)):
        return None
    content = base64.b64encode(numpy.ascontiguousarray(array).tobytes()).decode()
    return [array.dtype.str, list(array.shape), content, isinstance(value, numpy.generic)]


@functools.cache
def _import_numpy() -> Any:
    import numpy

    return numpy


def _unpack_array(dtype: str, shape: list[int], content: str, is_scalar: bool) -> Any:
    if dtype[1:2] not in "biufcSU":
        raise ProtocolError(f"unknown kind of array {dtype!r:.20}")
    array = _import_numpy().frombuffer(base64.b64decode(content), dtype).reshape(shape).copy()
    return array[()] if is_scalar else array
