"""The gain of a client by federating: its model's scores beside those of a model that it trained alone.

Both models are compared on the same test samples. A sample has a score, higher being better, see
`Objective.sample_scores`. Where scores are 0 and 1, McNemar's exact test compares the samples that one model alone
predicts rightly; other scores are compared by Wilcoxon's signed-rank test of their differences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kindred.lazy import lazy
from kindred.objectives import Objective

if TYPE_CHECKING:
    from scipy import special, stats
else:
    special, stats = lazy("scipy.special"), lazy("scipy.stats")  # the latter takes half a second to import

ERROR = 0.05
"""One less the coverage of intervals."""
RESAMPLES = 2000


@dataclass(frozen=True)
class Gain:
    """The comparison of a client's two models on its test samples.

    Attributes
    ----------
    samples : int
        n, 1 or more.
    federated, alone : float
        Mean scores.
    deviation : float
        Standard deviation of the samples' differences, federated less alone.
    low, high : float
        Ends of the bootstrap interval of the mean difference.
    p : float
        Two-sided p value of no difference; 1 if all scores are equal.
    """

    samples: int
    federated: float
    alone: float
    deviation: float
    low: float
    high: float
    p: float

    @property
    def gain(self) -> float:
        """Mean difference of the scores."""
        return self.federated - self.alone


def gain_of_predictions(
    objective: Objective, federated: np.ndarray, alone: np.ndarray, targets: np.ndarray, seed: int
) -> Gain:
    """Compare what a client's two models predict, (n, k) each, for samples with these targets; see `gain_of`."""
    ours, lone = (objective.sample_scores(each, targets).astype(np.float64) for each in (federated, alone))
    return gain_of(ours, lone, seed)


def gain_of(federated: np.ndarray, alone: np.ndarray, seed: int) -> Gain:
    """Compare the scores, (n,) each, of a client's two models on the same samples; `seed` is the bootstrap's."""
    differences = np.round(federated - alone, 12)  # rounding errors are no differences
    low, high = interval(resampled_means(differences, np.random.default_rng(seed)))
    return Gain(
        samples=len(differences),
        federated=float(federated.mean()),
        alone=float(alone.mean()),
        deviation=float(differences.std()),
        low=low,
        high=high,
        p=p_value(federated, alone),
    )


def p_value(federated: np.ndarray, alone: np.ndarray) -> float:
    """Return the two-sided p value of scores, (n,) each; 1 without any difference.

    It is 1, too, where the signed ranks and the mean of the differences favour different models.
    """
    differences = np.round(federated - alone, 12)
    differences = differences[differences != 0]
    if not len(differences):
        return 1.0
    if np.isin(federated, (0, 1)).all() and np.isin(alone, (0, 1)).all():
        fewer = min((differences > 0).sum(), (differences < 0).sum())
        return min(1.0, float(2 * special.bdtr(fewer, len(differences), 0.5)))  # as `stats.binomtest`
    signed_ranks = stats.rankdata(np.abs(differences)) @ np.sign(differences)
    return float(stats.wilcoxon(differences).pvalue) if signed_ranks * differences.sum() > 0 else 1.0


def resampled_means(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the means, (RESAMPLES,), of samples of size n drawn with replacement from values (n,)."""
    distinct, counts = np.unique(values, return_counts=True)  # a mean depends on the number of each value alone
    return rng.multinomial(len(values), counts / len(values), RESAMPLES) @ distinct / len(values)


def interval(means: np.ndarray) -> tuple[float, float]:
    """Return the ends of the percentile interval of resampled means."""
    low, high = np.quantile(means, (ERROR / 2, 1 - ERROR / 2))
    return float(low), float(high)
