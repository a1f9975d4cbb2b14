"""The data of a federation: the samples, and how they are divided among clients."""

from .dataset import Dataset
from .federation import Federation, SiteData
from .inputs import Inputs
from .loading import load_clients, load_federation
from .partition_figure import partition_figure
from .partitions import PARTITIONS
from .sites import Sites, read_site
from .sources import DATASETS, DataError
from .task import Task

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "DataError",
    "Dataset",
    "Federation",
    "Inputs",
    "SiteData",
    "Sites",
    "Task",
    "load_clients",
    "load_federation",
    "partition_figure",
    "read_site",
]
