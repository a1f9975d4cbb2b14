"""Settings: each has its name, default, range and meaning here, for constructors, run configs and documents alike.

A method's own settings are in the method's file. This file has the settings that methods share: those of the clients'
local training and those of the server's rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, NamedTuple

from .errors import Reportable

AUTO = "auto"


class Range(NamedTuple):
    """Allowed values: in words, as a test of a value of the right type, and in the documents' words if these differ."""

    words: str
    holds: Callable[[Any], bool]
    documented: str = ""


def at_least(low: float) -> Range:
    """Range of numbers that are `low` or more."""
    return Range(f"{low:g} or more", lambda value: value >= low)


def above(low: float, high: float = math.inf) -> Range:
    """Range of numbers larger than `low`, and at most `high`."""
    most = "" if high == math.inf else f", at most {_text(high)}"
    return Range(f"more than {_text(low)}{most}", lambda value: low < value <= high)


def or_auto(numbers: Range) -> Range:
    """Range of these numbers, or AUTO."""
    return Range(
        f"{numbers.words}, or {AUTO}",
        lambda value: value == AUTO or (not isinstance(value, str) and numbers.holds(value)),
    )


def within(low: float, high: float) -> Range:
    """Range from `low` to `high`, both included."""
    return Range(f"{_text(low)} to {_text(high)}", lambda value: low <= value <= high)


def _text(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


def between(low: float, high: float) -> Range:
    """Range from `low` to `high`, both excluded."""
    return Range(f"more than {low:g}, less than {high:g}", lambda value: low < value < high)


def one_of(*names: str) -> Range:
    """Range of exactly these names."""
    return Range(", ".join(names), lambda value: value in names)


A_SHARE = above(0, 1)
ANY_TEXT = Range("any text", lambda value: True)
TRUE_OR_FALSE = Range("true or false", lambda value: True)


@dataclass(frozen=True, eq=False)
class Setting:
    """A setting. Methods share one if they name the same object.

    Attributes
    ----------
    name : str
        The name of the Python argument: local_epochs.
    default : bool, int, float or str
    allowed : Range
    meaning : str
        A phrase for the table of settings.
    kind : str
        Its types, such as "float" or "float | str"; by default the type of `default`.
    trial : bool, int, float or str
        Value for the conformance suite, which trains small models on a few samples; by default `default`.
    """

    name: str
    default: Any
    allowed: Range
    meaning: str
    kind: str = ""
    trial: Any = None

    def __post_init__(self) -> None:
        if not self.kind:
            object.__setattr__(self, "kind", type(self.default).__name__)
        if self.trial is None:
            object.__setattr__(self, "trial", self.default)

    @property
    def key(self) -> str:
        """The name in messages, run configs and on the command line: local-epochs."""
        return kebab(self.name)

    def check(self, value: Any, name: str = "") -> Any:
        """Return a value, a whole number for a float as that float.

        Parameters
        ----------
        value : object
        name : str
            What the setting is called where the value is from; by default its name.

        Raises
        ------
        ValueError
            It has another type or is out of range.
        """
        value = float(value) if isinstance(value, Real) and self._is(float) and not isinstance(value, bool) else value
        types = {"bool": bool, "int": Integral, "float": float, "str": str}
        right = any(isinstance(value, types[kind]) for kind in self.kind.split(" | "))
        if isinstance(value, bool) and not self._is(bool):
            right = False
        if not right or (isinstance(value, float) and not math.isfinite(value)) or not self.allowed.holds(value):
            raise ValueError(Reportable(f"{name or self.name} is {value!r}, allowed: {self.allowed.words}"))
        return value

    def _is(self, kind: type) -> bool:
        return kind.__name__ in self.kind.split(" | ")

    def read(self, config: Mapping[str, Any]) -> Any:
        """Return the setting's value in a message's config; the default if it is missing."""
        return config.get(self.key, self.default)

    def parse(self, text: str) -> Any:
        """Parse a text as one of the setting's types; a text that fits none of them is returned unchanged."""
        return parse(text, self.kind)


def parse(text: str, kind: str) -> bool | int | float | str:
    """Parse a text as one of the types in `kind` (see `Setting.kind`); return it unchanged if it fits none."""
    kinds = kind.split(" | ")
    if "bool" in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for read in (int, float):
        if read.__name__ in kinds:
            try:
                return read(text)
            except ValueError:
                pass
    return text


def kebab(name: str) -> str:
    """Return the name of a setting outside Python: local-epochs."""
    return name.replace("_", "-")


# Common names of settings in other libraries.
COMMON_NAMES = {"lr": "learning-rate", "bs": "batch-size", "epochs": "local-epochs", "steps": "local-steps"}


def meant_by(key: str, known: Iterable[str]) -> str | None:
    """Return the known name that a misspelt key probably means; None if none is close."""
    names = list(known)
    if COMMON_NAMES.get(key) in names:
        return COMMON_NAMES[key]
    close = get_close_matches(kebab(key), names, n=1, cutoff=0.7)
    return close[0] if close else None


SEED = Setting("seed", 0, at_least(0), "seed of everything random: data, sampling, models, batches")

# --- Local training -----------------------------------------------------------------------------------

LOCAL_EPOCHS = Setting(
    "local_epochs", 5, within(0, 10_000), "epochs of local training per round; 0: local-steps steps instead"
)
MAX_LOCAL_EPOCHS = Setting(
    "max_local_epochs",
    0,
    within(0, 10_000),
    "if not 0, every client trains in every round for its own number of epochs in place of local-epochs, drawn "
    "uniformly from 1 to this one; without effect where steps are counted, as in PerFed-CKT",
)
LOCAL_STEPS = Setting(
    "local_steps",
    50,
    within(1, 10**6),
    "steps of local training per round (tau), each on images drawn at random: always with PerFed-CKT, else if "
    "local-epochs is 0",
    trial=10,
)
BATCH_SIZE = Setting("batch_size", 10, within(1, 10**6), "images per step")
OPTIMIZER = Setting("optimizer", "adam", one_of("adam", "sgd"), "local optimiser")
LEARNING_RATE = Setting("learning_rate", 0.002, above(0, 1000), "step size of the local optimiser", trial=0.1)
MOMENTUM = Setting("momentum", 0.0, within(0, 1), "momentum of sgd")
WEIGHT_DECAY = Setting(
    "weight_decay",
    0.0,
    within(0, 10**6),
    "weight decay of the local optimiser: each step adds this times the weights to the gradient, as in torch's SGD and "
    "Adam",
)
LABEL_SMOOTHING = Setting(
    "label_smoothing",
    0.0,
    within(0, 1),
    "fraction of each label that local training spreads equally over all classes, or over true and false; without "
    "effect where the target is a number",
)
PRECISION = Setting(
    "precision", "float32", one_of("float32", "bfloat16"), "arithmetic of local training; bfloat16 by autocast"
)
DEVICE = Setting("device", "auto", one_of("auto", "cpu", "cuda"), "where clients train; auto: the GPU if there is one")

SHADOW_LOCAL = Setting(
    "shadow_local",
    False,
    TRUE_OR_FALSE,
    "whether every client also trains a model alone, which never leaves it, and reports which of the two is better: "
    "twice the computing",
)

OPTIMISER_SETTINGS = (OPTIMIZER, LEARNING_RATE, MOMENTUM, WEIGHT_DECAY)
"""Those that a method ignores whose clients take plain steps of gradient descent, with a step size of their own."""

TRAINING = (
    SEED,
    LOCAL_EPOCHS,
    LOCAL_STEPS,
    BATCH_SIZE,
    OPTIMIZER,
    LEARNING_RATE,
    MOMENTUM,
    WEIGHT_DECAY,
    LABEL_SMOOTHING,
    PRECISION,
    DEVICE,
    SHADOW_LOCAL,
)
"""The settings of local training, which every message holds."""

# --- The server's rounds ------------------------------------------------------------------------------

UNIFORM, BY_SIZE = "uniform", "by-size"
SAMPLING = Setting(
    "sampling",
    "default",
    one_of("default", UNIFORM, BY_SIZE),
    "how a round's clients are drawn, without replacement: uniform, or by-size, with probabilities in proportion to "
    "their training images; default: by-size in PerFed-CKT, uniform in all other methods",
)

WAIT_TIMEOUT = Setting("wait_timeout", 300.0, above(0, 10**7), "seconds to wait for enough clients before the run ends")
QUORUM = Setting(
    "quorum",
    0.5,
    Range(
        "a share, more than 0 and up to 1, or a whole number up to 1,000,000",
        lambda value: 0 < value <= 1 or (1 < value <= 10**6 and value == int(value)),
    ),
    "real machines: clients, as a share of those asked (up to 1) or as a number; once so many have answered, the "
    "others have only grace seconds more; 1: wait for all",
)
GRACE = Setting(
    "grace", 600.0, within(0, 10**7), "real machines: seconds that a round waits for the other clients after its quorum"
)
MAX_STRIKES = Setting(
    "max_strikes",
    3,
    within(0, 10**6),
    "rounds in a row in which a client's reply was refused or did not come, after which it is excluded for as many "
    "rounds; 0: never",
)
MAX_CLIENT_SHARE = Setting(
    "max_client_share",
    1.0,
    A_SHARE,
    "largest share of a client in a mean of clients' models that weights them by samples; larger numbers of samples "
    "are lowered to it, and the clients are equal if they are too few; 1: no bound",
)
MAX_UPDATE_NORM = Setting(
    "max_update_norm",
    0.0,
    or_auto(within(0, 1e12)),
    "L2 norm, over the parameters, above which a client's update is refused; 0: no bound; auto: updates above 5 times "
    "the median of comparable ones are scaled down to it. Without effect in PerFed-CKT, whose clients send "
    "probabilities, and auto also in Local",
    kind="float | str",
)
MAX_EMPTY_ROUNDS = Setting(
    "max_empty_rounds", 5, within(1, 10**6), "rounds in a row without a usable answer after which the run ends"
)

STOP_AFTER = Setting(
    "stop_after",
    0,
    within(0, 10**6),
    "rounds in a row without a better mean, over clients, of the metric on validation data, after which the run ends; "
    "0: never",
)

ROUNDS = (
    SEED,
    SAMPLING,
    MAX_LOCAL_EPOCHS,
    WAIT_TIMEOUT,
    QUORUM,
    GRACE,
    MAX_STRIKES,
    MAX_CLIENT_SHARE,
    MAX_UPDATE_NORM,
    MAX_EMPTY_ROUNDS,
    STOP_AFTER,
)
"""Arguments of every strategy that are also settings of a run, under the same names."""

STORE = Setting(
    "store",
    "memory",
    one_of("memory", "disk"),
    "where the server keeps all clients' models; disk: in a file in $XDG_STATE_HOME/kindred (~/.local/state/kindred), "
    "so that memory holds only the models of a round's clients",
)
