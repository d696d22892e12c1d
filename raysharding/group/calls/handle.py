"""`Handle`: a group method that blocks, or returns a `Call`.

The decorators `handle` and `driver_handle` make handles of methods; `blocking` marks a method that only blocks.

Note [Signatures]: notebooks, `help` and `inspect.signature` show a handle as a function with the method's parameters
and the type of the result; `remote` has the same parameters, and returns a `Call`. The annotations are objects and not
strings: a name such as `'FitReport'` means nothing where the reader is. mypy sees the same by `P` and `T`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, update_wrapper, wraps
from types import MethodType, NoneType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, get_args, overload, runtime_checkable

from raysharding.group.calls.call import Call
from raysharding.group.calls.callback_thread import refuse_to_wait

P = ParamSpec("P")
T = TypeVar("T")


@runtime_checkable
class Handle(Protocol[P, T]):
    """A method of the group, run by all ranks: `group.x(...)` blocks, `group.x.remote(...)` returns a `Call`."""

    __name__: str
    """Name of the method."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run on all ranks and return the result."""

    @property
    def remote(self) -> Callable[P, Call[T]]:
        """Submits to all ranks and returns a `Call` without waiting for the ranks.

        The arguments are copied now: later changes do not reach the ranks. `remote` waits only while the arguments of
        the calls in the queue take more than 256 MiB, until an earlier call has begun. The group lives at least until
        the call has ended.
        """


class _Method(Generic[P, T]):
    """Descriptor: both `group.x` and `ShardedModelGroup.x` are a `Handle`."""

    def __init__(
        self,
        method: Callable[..., Any],
        run: Callable[Concatenate[Any, P], T],
        submit: Callable[Concatenate[Any, P], Call[T]],
        signature: inspect.Signature,
        result: Any,
    ) -> None:
        """Wrap a method.

        Args:
            method: The method, for its name and text.
            run: Runs the method and returns its result.
            submit: Begins the method and returns the call.
            signature: Signature of the method, with its annotations evaluated.
            result: Type of the result.
        """
        self._method, self._run, self._submit = method, run, submit
        _, *parameters = signature.parameters.values()
        self._unbound = signature.replace(return_annotation=None if result is NoneType else result)
        self._bound = self._unbound.replace(parameters=parameters)
        self._hints = {one.name: one.annotation for one in parameters} | {"return": self._bound.return_annotation}
        vars(submit)["__signature__"] = signature.replace(return_annotation=Call[result])
        submit.__annotations__ = self._hints | {"return": Call[result]}
        self.__doc__ = method.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> Handle[Concatenate[Any, P], T]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> Handle[P, T]: ...

    def __get__(self, instance: object | None, owner: type) -> Any:
        is_bound = instance is not None
        run = MethodType(self._run, instance) if is_bound else self._run

        def call(*args: Any, **kwargs: Any) -> Any:
            return run(*args, **kwargs)

        update_wrapper(call, self._method, ("__module__", "__name__", "__qualname__", "__doc__"), ())
        call.__annotations__ = self._hints
        remote = MethodType(self._submit, instance) if is_bound else self._submit
        vars(call).update(remote=remote, __signature__=self._bound if is_bound else self._unbound)
        return call


def handle(submit: Callable[Concatenate[Any, P], Call[T]]) -> _Method[P, T]:
    """Make a `Handle` of a method that begins a call."""

    def run(group: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        refuse_to_wait(f"{submit.__name__}()")
        return submit(group, *args, **kwargs).result()

    signature = inspect.signature(submit, eval_str=True)
    (result,) = get_args(signature.return_annotation)
    return _Method(submit, run, submit, signature, result)


def driver_handle(run: Callable[Concatenate[Any, P], T]) -> _Method[P, T]:
    """Make a `Handle` of a method outside the ranks' queue: `.remote(...)` runs it on a thread, a plain call does not.

    A plain call therefore also works during interpreter shutdown, when Python starts no new threads.
    """

    @wraps(run)
    def submit(group: Any, /, *args: P.args, **kwargs: P.kwargs) -> Call[T]:
        return Call.in_thread(run.__name__, partial(run, group, *args, **kwargs))

    signature = inspect.signature(run, eval_str=True)
    return _Method(run, run, submit, signature, signature.return_annotation)


def blocking(method: Callable[P, T]) -> Callable[P, T]:
    """Make a method that is not a `handle` refuse to wait on a callback thread, as handles do."""

    @wraps(method)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        refuse_to_wait(f"{method.__name__}()")
        return method(*args, **kwargs)

    return checked
