"""The `handle` decorator: a method that submits a call becomes a `Handle` on the instance."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, Self, overload

from raysharding.group.call import Call, Handle

P = ParamSpec("P")


class handle(Generic[P]):
    """Descriptor: `instance.method` is a `Handle` that blocks when called, with `.remote(...)` beside it."""

    def __init__(self, submit: Callable[Concatenate[Any, P], Call]) -> None:
        self._submit = submit
        self.__doc__ = submit.__doc__
        self.__name__ = submit.__name__

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type) -> Handle[P]: ...

    def __get__(self, instance: object | None, owner: type) -> Self | Handle[P]:
        if instance is None:
            return self
        return Handle(MethodType(self._submit, instance))
