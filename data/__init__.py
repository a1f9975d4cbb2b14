"""Images, and who has which of them: the data of a federation."""

from .federation import Federation, SiteData, load_federation
from .partitions import PARTITIONS
from .picture import partition_figure
from .sources import DATASETS, DataError

__all__ = ["DATASETS", "PARTITIONS", "DataError", "Federation", "SiteData", "load_federation", "partition_figure"]
