"""Decorators that make a method a `Handle` (`handle`, `driver_handle`); and `blocking`, for one that only waits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

from raysharding.group.call import Call, Handle
from raysharding.group.events import refuse_to_wait

P = ParamSpec("P")
T = TypeVar("T")


def blocking(method: Callable[P, T]) -> Callable[P, T]:
    """Have a method that is no `handle` refuse to wait on a supervision thread, as those do."""

    @wraps(method)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        refuse_to_wait(f"{method.__name__}()")
        return method(*args, **kwargs)

    return checked


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


class driver_handle(Generic[P]):
    """Descriptor, for what is no part of the ranks' queue: `.remote(...)` runs it on a thread, a plain call does not.

    So the plain call works while the interpreter ends, when Python starts no threads any more.
    """

    def __init__(self, run: Callable[Concatenate[Any, P], Any]) -> None:
        self._run = run
        self.__doc__ = run.__doc__
        self.__name__ = run.__name__

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type) -> Handle[P]: ...

    def __get__(self, instance: object | None, owner: type) -> Self | Handle[P]:
        if instance is None:
            return self
        run = MethodType(self._run, instance)

        def submit(*args: P.args, **kwargs: P.kwargs) -> Call:
            return Call.in_thread(self.__name__, partial(run, *args, **kwargs))

        return Handle(submit, run)
