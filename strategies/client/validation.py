"""The client half of a site that only validates: it evaluates the model that it receives and replies with numbers."""

from __future__ import annotations

from flwr.app import MetricRecord, RecordDict

from kindred.messages import METRICS, NUM_TEST_EXAMPLES

from .evaluation import evaluate
from .visit import Visit

NEVER_TRAINS = "this site only validates (validate-only is true), so it refuses to train"


def validation(visit: Visit) -> RecordDict:
    """Return all metrics of the received model on the site's test data. Nothing is saved at the site.

    Raises
    ------
    ValueError
        The model does not fit the site's network.
    """
    found = evaluate(visit.model(), *visit.site.test, visit.objective, names=visit.objective.reports)
    return RecordDict({METRICS: MetricRecord({**found, NUM_TEST_EXAMPLES: len(visit.site.test[1])})})
