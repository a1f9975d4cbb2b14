"""Packages that take long to import are imported when they are first used."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any


def lazy(name: str) -> Any:
    """Return a stand-in for a module, which imports it when one of its attributes is first asked for.

    In a file, where type checkers read the first part and Python the second:

        if TYPE_CHECKING:
            import torch
        else:
            torch = lazy("torch")

    What a file does while it is imported itself, such as a decorator or a base class, must not come from a stand-in.
    Threads may share one: Python imports a module once, and the others wait. Copies and pickles are stand-ins too.

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

    def __getattr__(self, attribute: str) -> Any:  # only for what is not found in the class: all of the module's own
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
