"""The modules of NNX models by path, and the scopes of names and policies that they compute in."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxmp import _tree
from jaxmp._dtypes import FLOAT32, HALF_DTYPES, dtype_name
from jaxmp._modules import Found, ModuleRules, own_dtype
from jaxmp.autocast._region import policy_scope
from jaxmp.policy import Policy, get_policy


def is_wrapped(module: Any) -> bool:
    return "module_rules" in vars(type(module))


def subclass(cls: Any, namespace: dict[str, Any]) -> Any:
    """Returns a subclass that instances of the class can become: it has no other bases."""
    names = ("__module__", "__qualname__", "__doc__")
    alike = {name: getattr(cls, name) for name in names}
    is_pytree = getattr(cls, "_pytree__is_pytree", True)
    return type(cls)(cls.__name__, (cls,), alike | namespace, pytree=is_pytree)


def modules_of(model: Any) -> dict[str, Any]:
    """Returns the modules by path, each module before those inside."""

    def order(item: tuple[Any, Any]) -> Any:
        return [(isinstance(key, str), key) for key in item[0]]

    found = sorted(nnx.iter_modules(model), key=order)
    return {"/".join(map(str, path)): module for path, module in found}


def is_container(module: Any) -> bool:
    return isinstance(module, nnx.List | nnx.Dict)


def leaves_by_module(model: Any, modules: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {path: {} for path in modules}
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        owner, name = "/".join(map(str, path[:-1])), str(path[-1])
        leaves = [leaf for leaf in jax.tree.leaves(variable) if hasattr(leaf, "dtype")]
        if leaves:
            found.setdefault(owner, {})[name] = leaves[0]
    return found


def find_all(
    rules: ModuleRules, modules: Mapping[str, Any], leaves: Mapping[str, Mapping[str, Any]]
) -> dict[str, Found]:
    found: dict[str, Found] = {}
    for path, module in modules.items():
        parent = found.get(parent_of(path, found)) if path else None
        names = [f"{path}/{name}".lstrip("/") for name in leaves.get(path, {})]
        found[path] = rules.find(path, module, _own_dtype(module), names, parent)
    return found


def _own_dtype(module: Any) -> np.dtype | None:
    """Returns the dtype that a module was told to compute in; some have f32 if told nothing."""
    dtype = own_dtype(module)
    is_default = isinstance(module, nnx.Embed | nnx.SimpleCell) and dtype == FLOAT32
    return None if is_default else dtype


def parent_of(path: str, modules: Mapping[str, Any]) -> str:
    """Returns the path of the innermost module that a module is in."""
    outer = path.rpartition("/")[0]
    while outer and outer not in modules:
        outer = outer.rpartition("/")[0]
    return outer


def enter_scopes(model: Any, rules: ModuleRules, outer: Policy) -> None:
    """Lets the modules of a fresh copy of a model enter scopes of their names and policies.

    Args:
        model: a copy that nobody else has.
        rules: for its modules.
        outer: the policy of what stands in no module.
    """
    if is_wrapped(model):
        model.__class__ = vars(type(model))["wrapped_class"]
    modules = {path: m for path, m in modules_of(model).items() if not _is_opaque(m)}
    found = find_all(rules, modules, leaves_by_module(model, modules))
    has_policies = any(each.policy != outer for each in found.values())
    for path, module in modules.items():
        parent = parent_of(path, modules)
        name = path[len(parent) :].lstrip("/")
        policy = found[path].policy
        above = found[parent].policy if path else rules.policy
        narrows = policy.output_dtype in HALF_DTYPES and policy.output_dtype != above.output_dtype
        if is_wrapped(module):
            continue  # it computes under its own policy
        module.__class__ = _scoped_class(vars(type(module)).get("scoped_class", type(module)))
        # Static and text, so that it survives nnx.split and nnx.merge inside.
        module._jaxmp_name = name
        module._jaxmp_policy = str(policy) if has_policies else ""
        module._jaxmp_output = dtype_name(policy.output_dtype) if narrows else ""


def _is_opaque(module: Any) -> bool:
    """Whether a module is left as it is: it has no calls, or takes all attributes for its own."""
    return is_container(module) or isinstance(module, nnx.bridge.ToNNX)


@functools.lru_cache(maxsize=1024)
def _scoped_class(cls: Any) -> Any:
    """Returns a class whose methods are computed in the scope of the module's name and policy."""
    methods = {name: _in_scope(name, getattr(cls, name)) for name in _method_names(cls)}
    return subclass(cls, {"scoped_class": cls} | methods)


def _method_names(cls: type) -> Iterator[str]:
    own = cls.__mro__[: cls.__mro__.index(nnx.Module)]
    names = dict.fromkeys(name for base in own for name in vars(base))
    for name in names:
        is_public = name == "__call__" or not name.startswith("_")
        first = next(vars(base)[name] for base in own if name in vars(base))
        if is_public and inspect.isfunction(first):
            yield name


def _in_scope(name: str, fun: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fun)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        path = self._jaxmp_name
        label = path if name == "__call__" or not path else f"{path}.{name}"
        with contextlib.ExitStack() as scopes:
            if label:
                scopes.enter_context(jax.named_scope(label))
            if self._jaxmp_policy:
                scopes.enter_context(policy_scope(get_policy(self._jaxmp_policy)))
            results = fun(self, *args, **kwargs)
            output = self._jaxmp_output
            return _tree.cast_floats(results, jnp.dtype(output)) if output else results

    return method
