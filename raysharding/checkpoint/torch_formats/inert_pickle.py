"""`unpickle`: a pickle read as data. Classes are replaced by records of their arguments, and nothing is called.

torch writes a checkpoint's metadata, and the frame of every `torch.save` file, as a pickle: a program that may call any
function of the machine. Here each admitted name stands for a class made for this one reading, which only keeps what it
is given; every other name is refused. No code of torch runs, so what is read does not depend on its version either.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Mapping
from typing import Any, Final, Self

from raysharding.errors import CheckpointError

MAX_TUPLE_ITEMS: Final = 4096
"""Items of a tuple, those of tuples within it counted each time they appear. Hashing one visits them all, and its depth
is the depth of C's stack: a file of 1 MB could hang this process or crash it."""
_ERRORS: Final = (
    pickle.UnpicklingError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
)
"""What Python's unpickler raises where the bytes are no pickle."""


class Record:
    """What an object of an admitted class becomes: what it was made from, and none of its behaviour."""

    __slots__ = ("args", "state")

    args: tuple[Any, ...]
    """Arguments of the call."""
    state: Any
    """What `__setstate__` would have been given; `None` where it was not to be called."""

    def __new__(cls, *args: Any) -> Self:
        """Keep the arguments; not in `__init__`: a pickle can make an object by `__new__` alone."""
        record = super().__new__(cls)
        record.args, record.state = args, None
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state

    @property
    def kind(self) -> str:
        """Module and name of the class that the pickle asked for."""
        return type(self).__name__


def unpickle(
    data: bytes,
    admitted: Mapping[tuple[str, str], Any],
    path: str,
    persistent_load: Callable[[Any], Any] | None = None,
) -> Any:
    """Read one pickle as data.

    Args:
        data: The pickle. Bytes after it are ignored.
        admitted: (module, name) → the immutable value that the name stands for, or `Record` for a class or function
            whose objects become records.
        path: Names the file in errors.
        persistent_load: Turns a persistent id into a value; without it a pickle with such an id is refused.

    Raises:
        CheckpointError: a name that is not admitted, or bytes that are no pickle.
    """
    try:
        return _Unpickler(data, admitted, path, persistent_load).load()
    except CheckpointError:
        raise
    except _ERRORS as error:
        what = f"is not a pickle that can be read as data ({type(error).__name__}: {error})"
        raise CheckpointError(what, path=path) from error


# Python's own, not the C one: there a memo index of 4 bytes makes it touch 64 GiB.
class _Unpickler(pickle._Unpickler):
    def __init__(
        self,
        data: bytes,
        admitted: Mapping[tuple[str, str], Any],
        path: str,
        persistent_load: Callable[[Any], Any] | None,
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._admitted = admitted
        self._path = path
        self._load_persistent = persistent_load
        # Made anew for each reading: a pickle can write attributes of whatever it can name.
        self._classes: dict[str, type[Record]] = {}
        self._nested: dict[int, tuple[tuple[Any, ...], int]] = {}  # id → a tuple with tuples in it, items in all

    def find_class(self, module: str, name: str) -> Any:
        """Give what stands for a name, in the place of importing it."""
        found = self._admitted.get((module, name))
        if found is None:
            what = f"names {module}.{name}, which no checkpoint of tensors needs: it was not called, nor was anything"
            raise CheckpointError(f"{what}; is the file from a source that you trust?", path=self._path)
        if found is not Record:
            return found
        kind = f"{module}.{name}"
        if kind not in self._classes:
            self._classes[kind] = type(kind, (Record,), {"__slots__": ()})
        return self._classes[kind]

    def persistent_load(self, pid: Any) -> Any:
        """Resolve a persistent id."""
        if self._load_persistent is None:
            raise pickle.UnpicklingError("a persistent id where none belongs")
        return self._load_persistent(pid)

    def get_extension(self, code: int) -> None:
        """Refuse copyreg's extension registry, which belongs to the process and not to the file."""
        raise pickle.UnpicklingError(f"extension code {code}")

    def _check_tuple(self) -> None:
        made = self.stack[-1]  # type: ignore[attr-defined]  # typeshed leaves out the machine's own state
        inner = [item for item in made if type(item) is tuple]
        items = len(made) + sum(self._nested[id(item)][1] if id(item) in self._nested else len(item) for item in inner)
        if items > MAX_TUPLE_ITEMS:
            raise pickle.UnpicklingError(f"a tuple of more than {MAX_TUPLE_ITEMS} items")
        if inner:
            self._nested[id(made)] = made, items


def _then_check(make: Callable[[Any], None]) -> Callable[[Any], None]:
    def made_and_checked(unpickler: _Unpickler) -> None:
        make(unpickler)
        unpickler._check_tuple()

    return made_and_checked


_Unpickler.dispatch = pickle._Unpickler.dispatch | {
    code[0]: _then_check(pickle._Unpickler.dispatch[code[0]])
    for code in (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)
}
