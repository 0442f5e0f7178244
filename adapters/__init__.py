"""Adapters from foreign data loaders to sources of numpy batches.

`as_source(loader)` is the one door: it recognises torch, torchvision, tf.data, grain, Hugging Face datasets, arrays and
any iterable by the module names of the object's class, and imports a framework only when it met one of its objects.
"""

from ._leaves import to_channels_last as to_channels_last
from ._registry import as_source as as_source
from ._registry import register_adapter as register_adapter
from ._registry import unregister_adapter as unregister_adapter
from ._source import BatchIterator as BatchIterator
from ._source import Source as Source
from ._source import SourceOptions as SourceOptions
from .arrays import ArrayLoader as ArrayLoader
from .bucketing import BucketLoader as BucketLoader
from .bucketing import bucketed as bucketed
from .graphs import is_graphs_tuple as is_graphs_tuple
from .graphs import pad_graphs as pad_graphs
from .in_memory import InMemory as InMemory
from .in_memory import RowReader as RowReader
from .lightning_objects import combined_parts as combined_parts
from .lightning_objects import is_lightning_datamodule as is_lightning_datamodule
from .mapped import MappedSource as MappedSource
from .mapped import mapped as mapped
from .prefetch import Prefetcher as Prefetcher
from .prefetch import prefetched as prefetched
from .tf_data import hide_tensorflow_accelerators as hide_tensorflow_accelerators
