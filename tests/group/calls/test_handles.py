"""What notebooks, `help` and `inspect` show of a group's methods. What mypy sees: `tests/group/typing_checks.py`."""

from __future__ import annotations

import inspect
import pydoc
import typing
from typing import Any

import pytest
import torch
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell

from raysharding import Call, CopyReport, FitReport, LoadReport, SaveReport, ShardedModelGroup
from raysharding.group import Handle
from raysharding.group.cluster import StatusReport
from raysharding.group.launch import RestartReport

RESULTS = {
    "forward": Any,
    "generate": Any,
    "call": Any,
    "train_step": dict[str, float],
    "forward_backward": dict[str, float],
    "optim_step": dict[str, float],
    "zero_grad": None,
    "clip_grad_norm_": float,
    "fit": FitReport,
    "evaluate": dict[str, float],
    "save": SaveReport | None,
    "load": LoadReport,
    "predict": Any,
    "copy_to": CopyReport,
    "state_dict": dict[str, torch.Tensor],
    "wait_for_save": None,
    "restart": RestartReport,
    "status": StatusReport,
    "shutdown": None,
}


def test_every_handle_is_listed() -> None:
    handles = {name for name in dir(ShardedModelGroup) if isinstance(getattr(ShardedModelGroup, name), Handle)}
    assert handles == RESULTS.keys()


@pytest.mark.parametrize("name", RESULTS)
def test_a_handle_has_the_signature_of_its_method(group: ShardedModelGroup, name: str) -> None:
    handle, unbound = getattr(group, name), getattr(ShardedModelGroup, name)
    signature, remote = inspect.signature(handle), inspect.signature(handle.remote)

    assert signature.return_annotation == RESULTS[name]
    assert remote.return_annotation == Call[RESULTS[name]]  # type: ignore[valid-type]
    assert remote.parameters == signature.parameters
    assert not any(isinstance(one.annotation, str) for one in signature.parameters.values())
    assert "self" not in signature.parameters
    assert ["self", *signature.parameters] == list(inspect.signature(unbound).parameters)
    assert handle.__doc__ == unbound.__doc__ == handle.remote.__doc__
    for shown, whole in ((handle, signature), (handle.remote, remote)):
        hints = {name: one.annotation for name, one in whole.parameters.items()} | {"return": whole.return_annotation}
        assert typing.get_type_hints(shown) == hints | {"return": hints["return"] or type(None)}


def test_a_method_of_the_class_takes_the_group_as_functions_do(group: ShardedModelGroup) -> None:
    assert ShardedModelGroup.state_dict(group, "0.bias").keys() == {"0.bias"}


def test_help_shows_signature_and_text(group: ShardedModelGroup) -> None:
    for shown in (group.state_dict, ShardedModelGroup.state_dict):
        text = pydoc.plain(pydoc.render_doc(shown))
        assert "keys: str | collections.abc.Sequence[str] | None = None) -> dict[str, torch.Tensor]" in text
        assert "Gather full tensors to the driver" in text


def test_a_notebook_shows_signature_and_completes_arguments(group: ShardedModelGroup) -> None:
    names = {"group": group, "ShardedModelGroup": ShardedModelGroup}
    shell: Any = InteractiveShell(colors="nocolor", user_ns=names)
    for name in ("group.fit", "group.fit.remote", "ShardedModelGroup.fit"):
        shown = shell.object_inspect_mime(name)["text/plain"]
        assert "    batch_size: int,\n" in shown
        assert "Train over data: each rank reads its own rows" in shown
        assert "P.args" not in shown
        assert ("Call[" in shown) is name.endswith("remote")
        assert completions(shell, f"{name}(batch") == {"batch_size="}
    assert completions(shell, "group.fit.r") == {"remote"}
    assert "result" in completions(shell, "group.fit.remote([], batch_size=1).")


def completions(shell: Any, text: str) -> set[str]:
    with provisionalcompleter():
        return {one.text for one in shell.Completer.completions(text, len(text))}
