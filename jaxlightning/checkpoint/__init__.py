"""Checkpoints: one directory, one atomic commit, no pickle."""

from jaxlightning.checkpoint._connector import CheckpointConnector as CheckpointConnector
from jaxlightning.checkpoint._discover import newest_checkpoint as newest_checkpoint
from jaxlightning.checkpoint._errors import CheckpointError as CheckpointError
from jaxlightning.checkpoint._errors import IncompleteCheckpointError as IncompleteCheckpointError
from jaxlightning.checkpoint._errors import NotACheckpointError as NotACheckpointError
from jaxlightning.checkpoint._loading import load_datamodule_from_checkpoint as load_datamodule_from_checkpoint
from jaxlightning.checkpoint._loading import load_module_from_checkpoint as load_module_from_checkpoint
from jaxlightning.checkpoint._warm_start import load_weights as load_weights
