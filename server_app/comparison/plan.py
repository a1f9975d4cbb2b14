"""What is compared: the settings and seeds of every run, from a command and a preset."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from kindred.data import DATASETS, PARTITIONS, load_federation
from kindred.data.loading import KEYS
from kindred.server_app.config import Config, ConfigError
from kindred.server_app.presets import Preset
from kindred.server_app.run_files import what_data

SHARED = (*KEYS, "seed", "output-dir", "resume")  # settings in which methods that are compared cannot differ
BESIDE = ("output-dir", "resume", "checkpoint-every", "keep-checkpoints")  # settings that change no result
IN_ROUNDS = ("num-rounds", "alpha-decay-every", "warmup-rounds")  # what a scale shrinks, besides images
LEAST_ROUNDS, LEAST_IMAGES = 2, 10  # below which a scale does not go


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is compared.

    Attributes
    ----------
    common : Config
        What all methods have.
    configs : dict
        The methods' names, in order, and the settings of each with the first seed.
    own : dict
        name -> the settings, kebab-case, that were given for this method alone.
    seeds : list of int
    reference : str
        The name that the others are tested against.
    scale : float
    scaled : dict
        setting -> its value before and after scaling.
    preset : Preset, optional
    changed : dict
        setting, or name:setting -> what the command says in place of the preset.
    """

    common: Config
    configs: dict[str, Config]
    own: dict[str, dict[str, Any]]
    seeds: list[int]
    reference: str
    scale: float
    scaled: dict[str, list[float]]
    preset: Preset | None
    changed: dict[str, Any]

    @property
    def what(self) -> str:
        """The preset, or the data."""
        return self.preset.name if self.preset else what_data(self.common.run_config())

    @property
    def title(self) -> str:
        """In a line: what is compared, with which seeds, at which scale."""
        seeds = f"seed{'s' if len(self.seeds) > 1 else ''} {', '.join(map(str, self.seeds))}"
        return f"{self.what}, {seeds}" + (f", scale {self.scale:g}" if self.scale != 1 else "")

    @property
    def runs(self) -> list[tuple[str, Config]]:
        """The name and the settings of every run, seed by seed, so that there is soon something whole."""
        return [(name, replace(config, seed=seed)) for seed in self.seeds for name, config in self.configs.items()]

    @property
    def folder(self) -> Path:
        """Where the comparison is written: always the same for the same runs and reference."""
        runs = [(name, run_hash(config.run_config())) for name, config in self.configs.items()]
        key = sha256(json.dumps([runs, self.seeds, self.reference, self.scale]).encode()).hexdigest()[:8]
        return Path(self.common.output_dir) / f"compare-{self.what.replace(', ', '-')}-{key}"


def make_plan(
    names: Sequence[str],
    given: Mapping[str, Any],
    own: Mapping[str, Mapping[str, Any]],
    *,
    seeds: Sequence[int] = (),
    reference: str = "",
    scale: float = 1.0,
    preset: Preset | None = None,
) -> Plan:
    """Put together what a command and a preset say; what the command says counts.

    Parameters
    ----------
    names : sequence of str
        Methods, or names whose own settings say which method they are. None: the preset's.
    given : mapping
        Settings for all, kebab-case.
    own : mapping
        name -> settings for it alone.
    seeds : sequence of int
        None: the preset's, else 0.
    reference : str
        "": the preset's if it is among the names, else the first.
    scale : float
        More than 0, at most 1: the part of the rounds and of the images that is taken.
    preset : Preset, optional

    Raises
    ------
    ConfigError, DataError
        What cannot be compared.
    """
    from_preset = preset.strategies if preset else {}
    names = list(dict.fromkeys(names or from_preset))
    if not names:
        raise ConfigError(
            "--strategies is not given, allowed: names of `kindred strategies`, separated by commas; or give a --preset"
        )
    for name in names:
        if not re.fullmatch(r"[\w.+-]+", name):
            raise ConfigError(f"--strategies has {name!r}, allowed: letters, digits and . _ + -")
    if not 0 < scale <= 1:
        raise ConfigError(f"--scale is {scale:g}, allowed: more than 0, at most 1")
    if stray := [name for name in own if name not in names]:
        raise ConfigError(f"--set {stray[0]}: is for no method that is compared; these are {', '.join(names)}")
    for key, instead in (("strategy", "--strategies"), ("seed", "--seeds"), ("resume", "the command again")):
        if key in given or key != "strategy" and any(key in alone for alone in own.values()):
            raise ConfigError(f"--set {key} is not for a comparison: use {instead}")
    reference = reference or (preset.reference if preset and preset.reference in names else names[0])
    if reference not in names:
        raise ConfigError(f"--reference is {reference!r}, allowed: {', '.join(names)}")
    seeds = list(dict.fromkeys(seeds)) or (preset.seeds if preset else [0])

    base = dict(preset.settings) if preset else {}
    common = Config.from_run_config({**base, **given, "seed": seeds[0]}).absolute()
    configs, own_settings = {}, {}
    for name in names:
        alone = dict(own.get(name, {}))
        if shared := [key for key in alone if key in SHARED]:
            raise ConfigError(
                f"--set {name}:{shared[0]} is for one method alone, allowed: for all, --set "
                f"{shared[0]}={alone[shared[0]]}; what is compared has the same data and seeds"
            )
        listed = {key: value for key, value in from_preset.get(name, {}).items() if key not in given}
        settings = {"strategy": name, **base, **listed, **given, **alone}
        configs[name] = Config.from_run_config({**settings, "seed": seeds[0]}).absolute()
        own_settings[name] = [key for key in {**listed, **alone} if key != "strategy"]

    before = common
    if scale != 1:
        images = images_a_client(common)
        common = shrunk(common, scale, images)
        configs = {name: shrunk(config, scale, images) for name, config in configs.items()}
        old, new = before.run_config() | {"samples-per-client": images}, common.run_config()
        scaled = {key: [old[key], new[key]] for key in ("num-rounds", "samples-per-client")}
    changed = {key: value for key, value in given.items() if preset and key not in (*BESIDE, "data-dir")}
    changed |= {f"{name}:{key}": value for name in own if preset for key, value in own[name].items()}
    return Plan(
        common=common, configs=configs, seeds=list(seeds), reference=reference, scale=scale,
        own={name: {key: configs[name].settings()[key] for key in keys} for name, keys in own_settings.items()},
        scaled=scaled if scale != 1 else {}, preset=preset, changed=changed,
    )  # fmt: skip


def images_a_client(config: Config) -> float:
    """What samples-per-client says, or where it is 0 what the clients have on average, of what it counts."""
    if config.samples_per_client:
        return config.samples_per_client
    federation = load_federation(config.run_config())
    return round(float((federation.sizes if PARTITIONS[config.partition].total else federation.train_sizes).mean()), 1)


def shrunk(config: Config, scale: float, images: float) -> Config:
    """The settings with a part of the rounds, and of `images` images a client."""

    def part(number: float, least: int) -> int:
        return min(int(number), max(least, round(scale * number)))

    return Config.from_run_config(
        {
            **config.run_config(),
            **{key: part(config.run_config()[key], LEAST_ROUNDS if key == "num-rounds" else 1) for key in IN_ROUNDS},
            "samples-per-client": part(images, LEAST_IMAGES),
        }
    )


def run_hash(settings: Mapping[str, Any], images: str | None = None) -> str:
    """The name of a run: of its images (`app.images_of`) and of all settings that its results depend on.

    These are all but where folders lie and how the state is kept. Of a run that has no record of its images a data-dir
    counts where it says which they are.
    """
    beside = (*BESIDE, "data-dir") if images or DATASETS[settings["dataset"]].num_classes else BESIDE
    kept = {key: value for key, value in settings.items() if key not in beside} | ({"images": images} if images else {})
    return sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
