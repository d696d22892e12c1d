"""`wrap_groups`: chooses the modules that become FSDP groups of their own.

Note: requirements of a group.
    FSDP2 gathers a group's parameters when one of its modules runs forward, and frees them afterwards. So a module is
    a group only if it runs its own forward (a `ModuleList` does not), a parameter must not belong to two groups, the
    trainable parameters of a group share one dtype, and code may read a parameter only while the parameter's group is
    gathered. Models often read the weights of embeddings and heads from elsewhere, so these stay in the root's group,
    which is gathered during the whole forward and backward, unless the model's own FSDP plan names them.

    FSDP2 also reduces the gradients of a group as one tensor.

`whole_parameters`: finds the parameters that no group shards, among them small ones of another dtype than their group.

`ignored_modules`: finds the modules that FSDP ignores, from the names, modules or predicate that the user gave.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from raysharding.config import Sharding
from raysharding.errors import PlanError
from raysharding.models.conversion import is_transformers_model, kept_in_float32
from raysharding.models.stand_in import class_name
from raysharding.torch_internals import BatchNorm


def is_shardable(parameter: nn.Parameter) -> bool:
    """Return True if FSDP2 shards this parameter. One of 0 dims or without elements stays whole on every rank."""
    return parameter.ndim > 0 and parameter.numel() > 0


MAX_WHOLE_BYTES = 1 << 20
"""Largest parameter that stays whole where its dtype is not its group's: scales, sinks, biases, norms, most routers.
Groups of their own would cost two messages each a step, and many are read without a call of the module that holds them.
"""

_Held = Mapping[str, Mapping[str, nn.Parameter]]
"""Module name → FQN → parameter."""
_Kind = Callable[[nn.Parameter], torch.dtype | None]
"""The dtype of a parameter that must be equal in a group; `None` if the parameter's does not matter."""


def _kinds(root: nn.Module, sharding: Sharding) -> tuple[_Kind, _Kind]:
    """Return the dtypes by which groups are separated: that of the computation, and that of trained parameters."""
    low, exact = low_dtype(sharding), set[torch.Tensor]()
    if low is not None:
        models = filter(is_transformers_model, root.modules())
        exact.update(tensor for model in models for tensor in kept_in_float32(model, low))

    def computed(parameter: nn.Parameter) -> torch.dtype | None:
        return parameter.dtype if parameter in exact else low

    def trained(parameter: nn.Parameter) -> torch.dtype | None:
        return parameter.dtype if parameter.requires_grad else None

    return computed, trained


def whole_parameters(root: nn.Module, sharding: Sharding, groups: Iterable[tuple[str, ...]]) -> set[nn.Parameter]:
    """Return the parameters that stay whole on every rank. No collective.

    These are those of ignored modules, those of 0 dims or without elements, and small ones of another dtype than their
    group's.

    Args:
        root: The root module, before `fully_shard`.
        sharding: The sharding; `ignored_modules` and `mixed_precision` are read.
        groups: Result of `wrap_groups`.
    """
    whole = ignored_parameters(root, sharding)
    whole.update(parameter for parameter in root.parameters() if not is_shardable(parameter))
    tree = _Tree(root, whole)
    for kind in _kinds(root, sharding):
        for names in (*groups, ("",)):
            held = tree.held(names, groups, kind)
            main = _main_dtype(held, kind)
            others = [(name, one) for name, owned in held.items() for one in owned.values() if kind(one) != main]
            whole.update(one for name, one in others if _may_be_whole(root, name, one))
    return whole


def _may_be_whole(root: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Return True for a small parameter, and for a table that is read without a call, as Voxtral's of sinusoids."""
    is_table = isinstance(root.get_submodule(name), nn.Embedding) and not parameter.requires_grad
    return is_table or parameter.nbytes <= MAX_WHOLE_BYTES


def _main_dtype(held: _Held, kind: _Kind) -> torch.dtype | None:
    """Return the dtype of the most elements; of two equal halves, the narrower one."""
    num_elements: Counter[torch.dtype | None] = Counter()
    for parameter in (one for parameters in held.values() for one in parameters.values()):
        num_elements[kind(parameter)] += parameter.numel()
    return max(num_elements, key=lambda dtype: (num_elements[dtype], -dtype.itemsize if dtype else 0), default=None)


def _split_by_dtype(tree: _Tree, groups: Sequence[tuple[str, ...]], kind: _Kind) -> list[tuple[str, ...]]:
    """Put modules whose parameters have another dtype than their group's into groups of their own.

    Args:
        tree: The module tree.
        groups: Groups that share no parameters; the root's group is implied.
        kind: The dtype that counts.

    Returns:
        The groups, and new groups for the modules split off: T5 in fp16 keeps every `wo` in fp32, for example. Where
        the parameters of modules inside have the group's dtype, these are split off, too. Small parameters of another
        dtype are left to `whole_parameters`.

    Raises:
        PlanError: A large parameter of another dtype is in a module with others, or in one that is not called.
    """
    result: list[tuple[str, ...]] = []
    for names in groups:
        # A group whose modules have one dtype each is partitioned.
        parts: dict[frozenset[torch.dtype | None], list[str]] = {}
        for name in names:
            owned = tree.held([name], groups, kind).values()
            parts.setdefault(frozenset(kind(one) for some in owned for one in some.values()), []).append(name)
        is_parted = all(len(dtypes) == 1 for dtypes in parts)
        result += map(tuple, parts.values()) if is_parted else [names]
    for names in [*result, ("",)]:
        result += [(split,) for split in dict.fromkeys(_leaving(tree, names, groups, kind))]
    return result


def _leaving(tree: _Tree, names: tuple[str, ...], groups: Sequence[tuple[str, ...]], kind: _Kind) -> Iterator[str]:
    """Yield the modules that must leave a group."""
    held = tree.held(names, groups, kind)
    main = _main_dtype(held, kind)
    for name, parameters in held.items():
        others = {fqn: one for fqn, one in parameters.items() if kind(one) != main}
        large = next((fqn for fqn, one in others.items() if not _may_be_whole(tree.root, name, one)), None)
        if large is None:
            continue
        inside = [one for one in held if one.startswith(f"{name}.")]  # would leave the group together with `name`
        leaving = [name, *(one for one in inside if any(kind(item) == main for item in held[one].values()))]
        if name in names or len(others) < len(parameters) or not all(_runs_forward(tree.root, one) for one in leaving):
            every = {fqn: kind(one) for parameters in held.values() for fqn, one in parameters.items()}
            other = next(fqn for fqn, dtype in every.items() if dtype == main)
            raise PlanError(
                f"{large} is {every[large]} and {other} is {main}, but both would be in one FSDP group, which must "
                "have one dtype: load with dtype=torch.float32 (or another that the model keeps throughout) and "
                "without mixed_precision, or freeze one"
            )
        yield from leaving


def _runs_forward(root: nn.Module, name: str) -> bool:
    """Return True if a module is called, so that hooks of its forward can gather its parameters."""
    module, parent = root.get_submodule(name), root.get_submodule(name.rpartition(".")[0])
    # MultiheadAttention reads the weight of its out_proj without a call of out_proj.
    if name == "" or isinstance(parent, nn.MultiheadAttention) or type(module).forward is nn.Module.forward:
        return False
    return not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)


def ignored_modules(root: nn.Module, sharding: Sharding) -> set[nn.Module]:
    """Return the modules that `Sharding.ignored_modules` selects, with all modules inside them. No collective.

    Args:
        root: The root module.
        sharding: The sharding; only `ignored_modules` is read.

    Raises:
        PlanError: A pattern matches no name, a module is not in the tree, or the root is selected.
    """
    wanted = sharding.ignored_modules
    if isinstance(wanted, str | nn.Module):
        wanted = (wanted,)
    modules = dict(root.named_modules())
    if isinstance(wanted, Sequence):
        chosen = [module for item in wanted for module in _named(root, modules, item)]
    else:
        chosen = [module for name, module in modules.items() if name and wanted(module)]
    if any(module is root for module in chosen):
        raise PlanError("ignored_modules: includes the root, so nothing would be left to shard; name parts of the root")
    return {inner for module in chosen for inner in module.modules()}


def _named(root: nn.Module, modules: dict[str, nn.Module], item: str | nn.Module) -> list[nn.Module]:
    if isinstance(item, nn.Module):
        if not any(module is item for module in modules.values()):
            raise PlanError(
                f"ignored_modules: the given {type(item).__name__} is not part of this {type(root).__name__}; a module "
                "that was sent to another process is a copy: name it by a regular expression"
            )
        return [item]
    matching = [module for name, module in modules.items() if name and re.fullmatch(item, name)]
    if not matching:
        names = ", ".join(name for name in list(modules)[1:6])
        raise PlanError(f"ignored_modules: {item!r} matches no module's whole name; examples of names: {names}")
    return matching


def ignored_parameters(root: nn.Module, sharding: Sharding) -> set[nn.Parameter]:
    """Return the parameters of `ignored_modules`, including those shared with other modules. No collective."""
    modules = ignored_modules(root, sharding)
    return {parameter for module in modules for parameter in module._parameters.values() if parameter is not None}


Groups = tuple[tuple[str, ...], ...]


def wrap_groups(module: nn.Module, sharding: Sharding, candidates: Iterable[tuple[str, ...]] | None = None) -> Groups:
    """Choose the FSDP groups of a module. Changes nothing; the result is the same on every rank.

    Args:
        module: The root, before `fully_shard`, on meta or real.
        sharding: The sharding; `wrap`, `min_num_params`, `ignored_modules` and `mixed_precision` are read.
        candidates: FQNs of modules that should be groups, in place of those that `wrap` selects.

    Returns:
        One tuple of FQNs for each `fully_shard` call, inner modules first. The root is not included: it takes all
        remaining parameters. Parameters of 0 dims or without elements, which are not sharded, and those of ignored
        modules are disregarded.

    Raises:
        PlanError: A class name or an ignored module is not in the tree, or a group would mix trainable dtypes.
    """
    tree = _Tree(module, ignored_parameters(module, sharding))
    wanted = _candidates(tree, sharding) if candidates is None else candidates
    if low_dtype(sharding) is not None:  # what must not share a group with modules that compute in low precision
        wanted = [*((name,) for name, one in tree.modules.items() if stays_in_full_precision(one)), *wanted]
    groups: list[tuple[str, ...]] = []
    seen: set[str] = set()
    for names in wanted:
        group = tree.wrappable(name for name in names if name not in seen)
        seen.update(group)
        groups += [group] if group else []
    groups = _settle_shared(tree, groups)
    for kind in _kinds(module, sharding):
        groups = _split_by_dtype(tree, groups, kind)
    order = {name: index for index, name in enumerate(tree.modules)}
    # A module must be sharded before the module that contains it.
    groups.sort(key=lambda names: (-max(name.count(".") for name in names), order[names[0]]))
    return tuple(groups)


def unfreed_groups(module: nn.Module, sharding: Sharding, groups: Iterable[tuple[str, ...]]) -> set[tuple[str, ...]]:
    """Return the groups, besides the root's, that keep their full parameters from forward to backward.

    If `sharding` has the default `wrap` and `reshard_after_forward`, transformers' plan selects these groups: the final
    norm and the head, which end the forward and begin the backward, and so would be gathered again at once.

    Args:
        module: As for `wrap_groups`.
        sharding: The sharding; `wrap` and `reshard_after_forward` are read.
        groups: Result of `wrap_groups`.
    """
    if sharding.wrap != "auto" or sharding.reshard_after_forward is not None:
        return set()
    plan = _fsdp_styles(module)
    return {names for names in groups if all(plan.get(_with_wildcards(name)) == "keep_full_weight" for name in names)}


def low_dtype(sharding: Sharding) -> torch.dtype | None:
    """Return the dtype that groups compute in, if it is another than the stored dtype."""
    policy = sharding.mixed_precision
    return policy if isinstance(policy, torch.dtype) else getattr(policy, "param_dtype", None)


def full_precision_groups(
    module: nn.Module, sharding: Sharding, groups: Iterable[tuple[str, ...]]
) -> set[tuple[str, ...]]:
    """Return the groups that compute in their stored dtype under mixed precision.

    These hold BatchNorm, or what transformers keeps in float32, as Ernie 4.5's routers.

    Args:
        module: The root module, before `fully_shard`.
        sharding: The sharding; `mixed_precision` is read.
        groups: Result of `wrap_groups`; the root's group, under `("",)`, is implied.
    """
    low = low_dtype(sharding)
    if low is None:
        return set()
    kind, _ = _kinds(module, sharding)
    tree = _Tree(module, ignored_parameters(module, sharding))
    return {
        names
        for names in (*groups, ("",))
        if all(stays_in_full_precision(module.get_submodule(name)) for name in names)
        or _main_dtype(tree.held(names, groups, kind), kind) not in (None, low)
    }


def stays_in_full_precision(module: nn.Module) -> bool:
    """Return True if mixed precision excludes a module: FSDP1's `_module_classes_to_ignore`, which is BatchNorm."""
    return isinstance(module, BatchNorm)


class _Tree:
    """A module tree, indexed by each module's first name.

    Args:
        root: The root module.
        ignored: Parameters that belong to no group.
    """

    def __init__(self, root: nn.Module, ignored: set[nn.Parameter]) -> None:
        self.root = root
        self.ignored = ignored
        self.modules: dict[str, nn.Module] = dict(root.named_modules())
        self.name_of: dict[int, str] = {id(module): name for name, module in self.modules.items()}

    def wrappable(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the names whose modules run their own forward and have a parameter to shard."""
        known = (name for name in dict.fromkeys(names) if name in self.modules and _runs_forward(self.root, name))
        return tuple(name for name in known if any(map(self.is_shardable, self.modules[name].parameters())))

    def is_shardable(self, parameter: nn.Parameter) -> bool:
        """Return True if FSDP2 shards this parameter and it is not ignored."""
        return is_shardable(parameter) and parameter not in self.ignored

    def held(self, names: Iterable[str], groups: Iterable[tuple[str, ...]], kind: _Kind) -> _Held:
        """Return the parameters of one group, without those of groups inside it, for which `kind` has a dtype."""
        held: dict[str, dict[str, nn.Parameter]] = {}
        members = {name for group in groups for name in group}
        pending = list(names)
        while pending:
            name = pending.pop(0)
            module, dot = self.root.get_submodule(name), f"{name}." if name else ""
            parameters = {dot + key: one for key, one in module._parameters.items() if one is not None}
            held[name] = {fqn: one for fqn, one in parameters.items() if self.is_shardable(one) and kind(one)}
            pending[:0] = [dot + child for child, _ in module.named_children() if dot + child not in members]
        return {name: parameters for name, parameters in held.items() if parameters}

    def inside(self, name: str, other: str) -> bool:
        """Return True if module `name` is inside module `other`."""
        return other == "" or name.startswith(other + ".")


# --- candidates -----------------------------------------------------------------------------------------------------


def _candidates(tree: _Tree, sharding: Sharding) -> list[tuple[str, ...]]:
    wrap = sharding.wrap
    if wrap == "none":
        return []
    if wrap == "auto":
        return _fsdp_plan(tree) or _no_split_modules(tree) or _list_elements(tree)
    if wrap == "size":
        return _by_size(tree, sharding.min_num_params)
    if callable(wrap):
        return [(name,) for name, module in tree.modules.items() if name and wrap(module)]
    assert not isinstance(wrap, str), "Sharding validates the names"
    return _by_class(tree, wrap)


def _fsdp_plan(tree: _Tree) -> list[tuple[str, ...]]:
    """Return the groups of transformers' plan, if it names this model's repeated layers; otherwise `[]`."""
    plan = _fsdp_styles(tree.root)
    styles = {name: plan.get(_with_wildcards(name)) for name in tree.modules}
    if not any(style is not None and "*" in _with_wildcards(name) for name, style in styles.items()):
        return []
    freed = [name for name, style in styles.items() if style == "free_full_weight"]
    kept = [name for name, style in styles.items() if style == "keep_full_weight"]
    modules = input_and_output(tree.root)
    embedding, head = (tree.name_of.get(id(module)) for module in modules)
    held = [set(module.parameters()) for module in modules if module is not None and id(module) in tree.name_of]
    if len(held) == 2 and held[0] & held[1]:
        # The root keeps its gathered parameters until the end of backward, as the plan requests here.
        freed = [name for name in freed if name != embedding]
        kept = []
    # One group, gathered once at the end of forward: `fully_shard([norm, lm_head])`. A norm alone gets no group.
    return [(name,) for name in freed] + ([tuple(kept)] if head is not None and head in kept else [])


def _fsdp_styles(root: nn.Module) -> Mapping[str, str]:
    """Return transformers' plan: module name, with `*` for layer numbers → handling of its parameters after forward."""
    return (getattr(root, "fsdp_plan", None) or {}) if is_transformers_model(root) else {}


def _with_wildcards(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def input_and_output(root: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """Return a model's input and output embeddings; `None` for each that it lacks."""
    embeddings: list[nn.Module | None] = []
    for method in ("get_input_embeddings", "get_output_embeddings"):
        try:
            embeddings.append(getattr(root, method)())
        except (AttributeError, NotImplementedError):
            embeddings.append(None)  # a model without embeddings, such as one for images
    return embeddings[0], embeddings[1]


def _no_split_modules(tree: _Tree) -> list[tuple[str, ...]]:
    """Return the modules whose classes transformers declares unsplittable, except embeddings, which the root keeps."""
    names = set(getattr(tree.root, "_no_split_modules", None) or ()) if is_transformers_model(tree.root) else set()
    names = {name for name in names if "Embedding" not in name}
    return [(name,) for name, module in tree.modules.items() if name and class_name(module) in names]


def _list_elements(tree: _Tree) -> list[tuple[str, ...]]:
    """Return the elements of the outermost `ModuleList`s. Skips inner lists: experts may run on some ranks only."""
    groups: list[tuple[str, ...]] = []
    for name, module in tree.modules.items():
        if not isinstance(module, nn.ModuleList) or any(tree.inside(name, other) for (other,) in groups):
            continue
        groups += [(tree.name_of[id(element)],) for element in module if not isinstance(element, nn.Embedding)]
    return groups


def _by_size(tree: _Tree, min_num_params: int) -> list[tuple[str, ...]]:
    """Return the innermost modules with enough ungrouped parameters, as torch's `size_based_auto_wrap_policy` does."""
    groups: list[tuple[str, ...]] = []
    taken: set[int] = set()

    def visit(name: str) -> None:
        module = tree.modules[name]
        for child_name, child in module.named_children():
            full_name = f"{name}.{child_name}" if name else child_name
            if tree.name_of[id(child)] == full_name and not isinstance(module, nn.MultiheadAttention):
                visit(full_name)
        left = {
            id(parameter): parameter.numel()
            for parameter in module.parameters()
            if id(parameter) not in taken and parameter not in tree.ignored
        }
        if name and sum(left.values()) >= min_num_params and tree.wrappable([name]):
            groups.append((name,))
            taken.update(left)

    visit("")
    return groups


def _by_class(tree: _Tree, wanted: Sequence[str]) -> list[tuple[str, ...]]:
    present = {class_name(module) for name, module in tree.modules.items() if name}
    unknown = [name for name in wanted if name not in present]
    if unknown:
        raise PlanError(
            f"wrap names {', '.join(map(repr, unknown))}, but no module of {class_name(tree.root)} has that class; "
            f"the modules' classes are {', '.join(sorted(present))}"
        )
    return [(name,) for name, module in tree.modules.items() if name and class_name(module) in wanted]


# --- shared parameters ----------------------------------------------------------------------------------------------


def _settle_shared(tree: _Tree, groups: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Merge groups that share a parameter; drop a group that shares a parameter with a module that contains it."""
    while shared := next((owners for owners in _owners(tree, groups).values() if len(owners) > 1), None):
        outer = {index for index in shared if index is None or _contains_another(tree, groups, index, shared)}
        if outer:  # the innermost owners are dropped: the modules that contain them take their parameters
            groups = [names for index, names in enumerate(groups) if index not in shared - outer]
            continue
        first, *others = sorted(index for index in shared if index is not None)
        groups[first] = tuple(name for index in (first, *others) for name in groups[index])
        groups = [names for index, names in enumerate(groups) if index not in others]
    return groups


def _owners(tree: _Tree, groups: Sequence[tuple[str, ...]]) -> dict[int, set[int | None]]:
    """Return parameter id → indices of the groups that hold it under any of its names; `None` is the root."""
    index_of = {name: index for index, names in enumerate(groups) for name in names}
    owner_of: dict[str, int | None] = {}
    owners: dict[int, set[int | None]] = {}
    # With repeats: a module that has a second name also belongs to the group that contains the second name.
    for name, module in tree.root.named_modules(remove_duplicate=False):
        parent = owner_of.get(name.rpartition(".")[0]) if name else None
        owner_of[name] = index_of.get(tree.name_of[id(module)], parent)
        for parameter in module._parameters.values():
            if parameter is not None and tree.is_shardable(parameter):
                owners.setdefault(id(parameter), set()).add(owner_of[name])
    return owners


def _contains_another(tree: _Tree, groups: Sequence[tuple[str, ...]], index: int, owners: Iterable[int | None]) -> bool:
    others = [other for other in owners if other is not None and other != index]
    return any(tree.inside(inner, outer) for other in others for inner in groups[other] for outer in groups[index])
