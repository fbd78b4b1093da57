"""Flax Linen: importing this module lets `flax.serialization` save jaxmp's states.

After `import jaxmp.linen`, `flax.serialization.to_state_dict`, `to_bytes` and their inverses take
loss scales, optimizer states and `TrainState`s. A state dict holds the arrays; the static options
of a loss scale (period, factor, floor, ...) come from the target, as with any Flax dataclass.
"""

import dataclasses
from typing import Any

from flax import serialization

from jaxmp import _tree
from jaxmp.loss_scale import DynamicLossScale, NoOpLossScale, StaticLossScale
from jaxmp.optim._mixed_precision import GradientNames
from jaxmp.train import TrainState

__all__: list[str] = []


def _register(cls: type, data_fields: tuple[str, ...]) -> None:
    def to_state_dict(obj: Any) -> dict[str, Any]:
        return {name: serialization.to_state_dict(getattr(obj, name)) for name in data_fields}

    def from_state_dict(target: Any, state: dict[str, Any]) -> Any:
        missing = sorted(set(data_fields) - set(state))
        unknown = sorted(set(state) - set(data_fields))
        if missing or unknown:
            raise ValueError(
                f"The state dict of a {cls.__name__} lacks {missing or 'nothing'} and has unknown "
                f"fields {unknown or 'none'}. Restore into a target made as the saved one was."
            )
        restored = {
            name: serialization.from_state_dict(getattr(target, name), state[name], name=name)
            for name in data_fields
        }
        return _tree.replace_state(target, **restored)

    serialization.register_serialization_state(cls, to_state_dict, from_state_dict, override=True)


_register(NoOpLossScale, ())
_register(GradientNames, ())
_register(StaticLossScale, ())
_register(DynamicLossScale, ("loss_scale", "counter", "hysteresis_left", "skip_streak"))
_register(TrainState, tuple(field.name for field in dataclasses.fields(TrainState)))
