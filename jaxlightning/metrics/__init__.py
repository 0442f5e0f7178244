"""What `self.log` feeds: rules, reductions, and the values that loggers and callbacks see."""

from jaxlightning.metrics._batch_size import extract_batch_size as extract_batch_size
from jaxlightning.metrics._connector import LoggerConnector as LoggerConnector
from jaxlightning.metrics._logging import log_value as log_value
from jaxlightning.metrics._table import print_results as print_results
