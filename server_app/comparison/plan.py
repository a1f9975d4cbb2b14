"""Plan a comparison: the settings and seeds of every run, from a command and a preset."""

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
from kindred.server_app.config import Config, ConfigError, is_used_by
from kindred.server_app.presets import Preset
from kindred.server_app.run_files import what_data

from .variation import BESIDE, NAME, Variant, Variation, variants_of

SHARED = (*KEYS, "seed", "metric", "output-dir", "resume")  # settings that are the same for all compared methods
IN_ROUNDS = ("num-rounds", "alpha-decay-every", "warmup-rounds")  # shrunk by a scale, as the samples are
LEAST_ROUNDS, LEAST_SAMPLES = 2, 10  # a scale goes no lower


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A plan of a comparison: every method with its settings, and the seeds.

    Attributes
    ----------
    common : Config
        The settings that all methods share.
    configs : dict
        name -> settings of the method with the first seed; in the order of the methods.
    own : dict
        name -> the settings, kebab-case, that were given for this method alone.
    seeds : list of int
    reference : str
        The name of the method that the others are tested against.
    scale : float
        The fraction of the rounds and of the samples that is used.
    scaled : dict
        setting -> its values before and after scaling.
    preset : Preset, optional
    changed : dict
        setting, or name:setting -> the command's value, which replaces the preset's.
    variation : Variation, optional
        The setting that is varied. Then a name in `configs` is that of a variant, such as "federico-3".
    variants : dict
        name -> its variant, for every name in `configs`.
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
    variation: Variation | None
    variants: dict[str, Variant]

    @property
    def what(self) -> str:
        """Name of the preset, or of the data if there is no preset."""
        return self.preset.name if self.preset else what_data(self.common.run_config())

    @property
    def title(self) -> str:
        """Line that names the preset or the data, the varied setting, the seeds and the scale."""
        what = f"{self.what}, {self.variation.text}" if self.variation else self.what
        seeds = f"seed{'s' if len(self.seeds) > 1 else ''} {', '.join(map(str, self.seeds))}"
        return f"{what}, {seeds}" + (f", scale {self.scale:g}" if self.scale != 1 else "")

    @property
    def runs(self) -> list[tuple[str, Config]]:
        """Name and settings of every run, seed by seed: all methods of a seed are complete before the next seed."""
        return [(name, replace(config, seed=seed)) for seed in self.seeds for name, config in self.configs.items()]

    def compared_with(self, other: str, name: str) -> str | None:
        """Return the compared name that `other` means for `name`: itself, or its variant with the same value."""
        if other in self.configs:
            return other
        same = Variant(other, self.variants[name].value).name
        return same if same in self.configs else None

    @property
    def folder(self) -> Path:
        """Folder of the comparison's files: always the same for the same runs and reference."""
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
    vary: Mapping[str, Sequence[Any]] | None = None,
) -> Plan:
    """Return the plan from a command and a preset; the command's values take precedence.

    Parameters
    ----------
    names : sequence of str
        Methods, or names whose own settings name the method. If empty, the preset's.
    given : mapping
        Settings of all methods, kebab-case.
    own : mapping
        name -> settings of this method alone.
    seeds : sequence of int
        If empty, the preset's, else 0.
    reference : str
        A method, whose variant with the same value is meant, or a variant. "": the preset's if it is among the
        names, else the first.
    scale : float
        The fraction of the rounds and of the samples that is used: more than 0, at most 1.
    preset : Preset, optional
    vary : mapping, optional
        A setting -> the values that it takes in turn, for every method that uses it; by default the preset's.

    Raises
    ------
    ConfigError, DataError
        These methods and settings cannot be compared; the text says why.
    """
    from_preset = preset.strategies if preset else {}
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(
            f"--strategies has {twice[0]} {names.count(twice[0])} times, allowed: once; for a variant with settings of "
            f"its own give a name of your own, with --set NAME:strategy={twice[0]}"
        )
    if repeated := [seed for seed in seeds if seeds.count(seed) > 1]:
        raise ConfigError(f"--seeds has {repeated[0]} {seeds.count(repeated[0])} times, allowed: once")
    names = list(names or from_preset)
    if not names:
        raise ConfigError(
            "--strategies is not given, allowed: names of `kindred strategies`, separated by commas; or give a --preset"
        )
    for name in names:
        if not re.fullmatch(NAME, name):
            raise ConfigError(f"--strategies has {name!r}, allowed: letters, digits and . _ + -")
    if not 0 < scale <= 1:
        raise ConfigError(f"--scale is {scale:g}, allowed: more than 0, at most 1")
    if stray := [name for name in own if name not in names]:
        raise ConfigError(f"--set {stray[0]}: names no compared method, allowed: {', '.join(names)}")
    for key, instead in (("strategy", "--strategies"), ("seed", "--seeds"), ("resume", "the command again")):
        if key in given or key != "strategy" and any(key in alone for alone in own.values()):
            raise ConfigError(f"--set {key} is not allowed in a comparison: use {instead}")
    listed_vary = {key: values for key, values in preset.vary.items() if key not in given} if preset else {}
    variation = Variation.of(vary or listed_vary)
    for alone in (given, *own.values()):
        if variation and variation.setting in alone:
            raise ConfigError(f"{variation.setting} is given twice: by --vary and by --set")
    seeds = list(seeds) or (preset.seeds if preset else [0])

    base = dict(preset.settings) if preset else {}
    common = Config.from_run_config({**base, **given, "seed": seeds[0]}).absolute()
    configs: dict[str, Config] = {}
    own_settings, variants = {}, {}
    for name in names:
        alone = dict(own.get(name, {}))
        if shared := [key for key in alone if key in SHARED]:
            raise ConfigError(
                f"--set {name}:{shared[0]} is for one method only, allowed: for all, --set "
                f"{shared[0]}={alone[shared[0]]}; all compared methods have the same data, seeds and metric"
            )
        listed = {key: value for key, value in from_preset.get(name, {}).items() if key not in given}
        settings = {"strategy": name, **base, **listed, **given, **alone}
        for variant, varied in variants_of(variation, name, settings["strategy"]):
            if variant.name in configs:
                raise ConfigError(f"--vary gives two methods the name {variant.name}: rename one")
            configs[variant.name] = Config.from_run_config({**settings, **varied, "seed": seeds[0]}).absolute()
            if idle := [key for key in alone if not is_used_by(key, settings["strategy"])]:
                raise ConfigError(f"--set {name}:{idle[0]} is given, but {settings['strategy']} does not use {idle[0]}")
            own_settings[variant.name] = [key for key in {**listed, **alone, **varied} if key != "strategy"]
            variants[variant.name] = variant
    varied_methods = {variant.of for variant in variants.values() if variant.value is not None}
    if variation and not varied_methods:
        raise ConfigError(f"--vary {variation.setting}: none of {', '.join(names)} uses this setting")
    # Of several varied methods one is compared with the others value by value; of one, a variant with the others.
    named = list(dict.fromkeys([*(names if len(varied_methods) > 1 else ()), *configs]))
    if not reference:
        reference = preset.reference if preset and preset.reference in named else named[0]
    if reference not in named:
        raise ConfigError(f"--reference is {reference!r}, allowed: {', '.join(named)}")

    before = common
    if scale != 1:
        samples = samples_a_client(common)
        common = shrunk(common, scale, samples)
        configs = {name: shrunk(config, scale, samples) for name, config in configs.items()}
        old, new = before.run_config() | {"samples-per-client": samples}, common.run_config()
        scaled = {key: [old[key], new[key]] for key in ("num-rounds", "samples-per-client")}
    changed = {key: value for key, value in given.items() if preset and key not in (*BESIDE, "data-dir")}
    changed |= {f"{name}:{key}": value for name in own if preset for key, value in own[name].items()}
    if preset and vary and variation:
        changed["varied"] = variation.text
    return Plan(
        common=common, configs=configs, seeds=list(seeds), reference=reference, scale=scale,
        own={name: {key: configs[name].settings()[key] for key in keys} for name, keys in own_settings.items()},
        scaled=scaled if scale != 1 else {}, preset=preset, changed=changed, variation=variation, variants=variants,
    )  # fmt: skip


def samples_a_client(config: Config) -> float:
    """Return samples-per-client, or if it is 0 the clients' mean number of the samples that it counts."""
    if config.samples_per_client:
        return config.samples_per_client
    federation = load_federation(config.run_config())
    return round(float((federation.sizes if PARTITIONS[config.partition].total else federation.train_sizes).mean()), 1)


def shrunk(config: Config, scale: float, samples: float) -> Config:
    """Return the settings with the fraction `scale` of the rounds, and of `samples` samples a client."""

    def part(number: float, least: int) -> int:
        return min(int(number), max(least, round(scale * number)))

    return Config.from_run_config(
        {
            **config.run_config(),
            **{key: part(config.run_config()[key], LEAST_ROUNDS if key == "num-rounds" else 1) for key in IN_ROUNDS},
            "samples-per-client": part(samples, LEAST_SAMPLES),
        }
    )


def run_hash(settings: Mapping[str, Any], samples: str | None = None) -> str:
    """Return the hash of a run's samples (`app.samples_of`) and of all settings that its results depend on.

    These are all settings except paths of folders and how the state is kept. If a run has no record of its samples,
    data-dir counts where it decides which these are.
    """
    beside = (*BESIDE, "data-dir") if samples or DATASETS[settings["dataset"]].num_classes else BESIDE
    kept = {key: value for key, value in settings.items() if key not in beside} | (
        {"images": samples} if samples else {}
    )
    return sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
