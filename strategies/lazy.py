"""Lazy imports of packages that take long to import: they are imported at their first use."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any


def lazy(name: str) -> Any:
    """Return a stand-in for a module, which imports it at the first access to one of its attributes.

    Usage; type checkers read the first branch and Python the second:

        if TYPE_CHECKING:
            import torch
        else:
            torch = lazy("torch")

    Code that runs while a file is imported, such as a decorator or a base class, must not use a stand-in. Threads may
    share a stand-in: Python imports the module once, and the other threads wait. Its copies and pickles are stand-ins
    too.

    Parameters
    ----------
    name : str
        The module's full name: "torch.nn.functional".
    """
    return _StandIn(name)


class _StandIn:
    __slots__ = ("_module", "_name")
    _module: ModuleType | None
    _name: str

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "_module", None)
        object.__setattr__(self, "_name", name)

    def __getattr__(self, attribute: str) -> Any:  # called for all attributes that the class has not: the module's
        if self._module is None:
            object.__setattr__(self, "_module", import_module(self._name))
        return getattr(self._module, attribute)

    def __setattr__(self, attribute: str, value: Any) -> None:
        setattr(import_module(self._name), attribute, value)

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]  # vars() is the module's
        return self.__getattr__("__dict__")

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return lazy, (self._name,)

    def __repr__(self) -> str:
        return f"lazy({self._name!r})"
