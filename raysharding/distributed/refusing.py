"""What an FSDP module refuses while its full parameters are registered in place of its shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

from torch import nn
from torch.distributed.fsdp import FSDPModule

from raysharding.distributed.materializing import is_fsdp_hook
from raysharding.distributed.sharded_module import summoned


def require_idle(modules: Iterable[FSDPModule]) -> None:
    """Make sure that none of the modules is in the middle of a forward or backward; each rank alone.

    Raises:
        RuntimeError: One is; or an exception ended its last forward, or that ran some modules of its group only
            (`model.model(...)` without the head): then FSDP2 keeps its full parameters registered.
    """
    for module in modules:
        state = module._get_fsdp_state()._training_state.name
        if state != "IDLE":
            raise RuntimeError(
                f"{type(module).__name__} is in a forward or backward (state {state}): its full parameters can be had "
                "before or after it; if an exception ended it, or it ran a part of an FSDP group only, call "
                "reset_iter_state() on the root module first"
            )


@contextmanager
def refusing_use(modules: Sequence[FSDPModule]) -> Iterator[None]:
    """Refuse what would let FSDP2 gather, move or cast its own copies of the parameters; each rank alone.

    Forward, backward (of a forward that ran before), `unshard` and `to` raise a RuntimeError. All would go on with the
    shards, and put other parameters in the place of the full ones.

    Args:
        modules: Those whose full parameters are registered, on this rank or on another.
    """
    with ExitStack() as stack:
        for module in modules:
            assert isinstance(module, nn.Module), "FSDP modules are modules"
            summoned.add(module)
            stack.callback(summoned.discard, module)
            # First of all hooks: FSDP2 has not yet noted that a forward began, so nothing has to be put right.
            stack.callback(module.register_forward_pre_hook(_refuse_forward, prepend=True).remove)
            _replace(stack, module, "unshard", _refuser("unshard()"))
            _replace(stack, module, "_apply", _refuser("to(), a cast or a move"))
            state = module._get_fsdp_state()
            _replace(stack, state, "_register_root_post_backward_final_callback", _backward_refuser(state))
        yield


def _replace(stack: ExitStack, holder: object, name: str, function: Callable[..., Any]) -> None:
    """Hide a method of one object until the stack closes; what an outer context hid comes back."""
    before = holder.__dict__.get(name)
    holder.__dict__[name] = function
    if before is None:
        stack.callback(holder.__dict__.pop, name, None)
    else:
        stack.callback(holder.__dict__.__setitem__, name, before)


def _message(what: str) -> str:
    return f"{what} inside summon_full_params would use the shards, not the full parameters: leave the context first"


def _refuse_forward(module: nn.Module, args: Any) -> NoReturn:
    raise RuntimeError(_message(f"a forward of {type(module).__name__}"))


def _refuser(what: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(_message(what))

    return refuse


def _backward_refuser(state: Any) -> Callable[[], NoReturn]:
    idle = state._training_state

    def refuse() -> NoReturn:
        # FSDP2 calls this right after it noted that a backward began, which would be wrong from now on.
        state._training_state = idle
        raise RuntimeError(_message("a backward"))

    return refuse


@contextmanager
def loadable(owners: Iterable[nn.Module]) -> Iterator[None]:
    """Let `load_state_dict` fill full parameters: FSDP2's hooks after it would look for shards; each rank alone.

    Args:
        owners: The modules in whose tables full parameters are.
    """
    paused: list[tuple[Any, dict[int, Any]]] = []
    for owner in owners:
        hooks = owner._load_state_dict_post_hooks
        own = {key: hook for key, hook in hooks.items() if is_fsdp_hook(hook)}
        for key in own:
            del hooks[key]
        paused.append((hooks, own))
    try:
        yield
    finally:
        for hooks, own in paused:
            hooks.update(own)
