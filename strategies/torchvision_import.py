"""Import of torchvision, also beside a torch for which it was not built."""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import TYPE_CHECKING

from kindred.lazy import lazy

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")


@functools.cache
def import_torchvision() -> ModuleType:
    """Import torchvision, also where its compiled operators do not fit the installed torch.

    torchvision's ordinary wheel is built for CUDA. Beside a torch without CUDA its compiled library does
    not load, and its import fails because two operators, `nms` and `qnms`, are unknown. Declaring them is enough for
    torchvision's models, transforms and datasets, which never call them. If torch and torchvision fit each other,
    nothing is changed.

    Returns
    -------
    module
        `torchvision`.

    Raises
    ------
    ImportError
        torchvision is not installed, or fails for another reason.
    """
    # Imported here and not through `lazy`: an import that fails is repaired and repeated.
    try:
        import torchvision  # noqa: PLC0415
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise ImportError(f"torchvision cannot be imported beside torch {torch.__version__}: {error}") from error
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]  # modules that the failed import left behind
        _declare_operators()
        import torchvision  # noqa: PLC0415
    return torchvision


@functools.cache  # keeps the library alive: without it its declarations would be removed
def _declare_operators() -> torch.library.Library:
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library
