"""What isinstance says of the optimizer and the schedule that a configuration names."""
from typing import Any


class ConfiguredType(type):
    """The metaclass of DeepSpeed's optimizers and schedules: an object whose `configured_class` is one of them counts as an instance of it."""

    def __instancecheck__(cls, instance: Any) -> bool:
        kind = getattr(instance, "configured_class", None)
        return super().__instancecheck__(instance) or (isinstance(kind, type) and issubclass(kind, cls))
