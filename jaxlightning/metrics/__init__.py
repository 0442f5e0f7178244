"""What `self.log` feeds, and metric objects with torchmetrics' names.

- `metric`, `aggregation`, `classification`, `confusion`, `auroc`, `regression`, `collection`: metric objects
- `_fx_rules`, `_values`, `_batch_size`, `_logging`: what a call of `self.log` may be, and what it means
- `_results`, `_host_value`, `_refs`: what is logged, on the device and on the host
- `_connector`, `_dictionaries`, `_emission`, `_table`: when loggers, callbacks, the bar and the user see it
"""

from jaxlightning.metrics._batch_size import extract_batch_size as extract_batch_size
from jaxlightning.metrics._connector import LoggerConnector as LoggerConnector
from jaxlightning.metrics._logging import log_value as log_value
from jaxlightning.metrics._table import print_results as print_results
from jaxlightning.metrics.aggregation import MaxMetric as MaxMetric
from jaxlightning.metrics.aggregation import MeanMetric as MeanMetric
from jaxlightning.metrics.aggregation import MinMetric as MinMetric
from jaxlightning.metrics.aggregation import SumMetric as SumMetric
from jaxlightning.metrics.auroc import AUROC as AUROC
from jaxlightning.metrics.auroc import BinaryAUROC as BinaryAUROC
from jaxlightning.metrics.auroc import MulticlassAUROC as MulticlassAUROC
from jaxlightning.metrics.auroc import MultilabelAUROC as MultilabelAUROC
from jaxlightning.metrics.classification import Accuracy as Accuracy
from jaxlightning.metrics.classification import BinaryAccuracy as BinaryAccuracy
from jaxlightning.metrics.classification import BinaryF1Score as BinaryF1Score
from jaxlightning.metrics.classification import BinaryPrecision as BinaryPrecision
from jaxlightning.metrics.classification import BinaryRecall as BinaryRecall
from jaxlightning.metrics.classification import F1Score as F1Score
from jaxlightning.metrics.classification import MulticlassAccuracy as MulticlassAccuracy
from jaxlightning.metrics.classification import MulticlassF1Score as MulticlassF1Score
from jaxlightning.metrics.classification import MulticlassPrecision as MulticlassPrecision
from jaxlightning.metrics.classification import MulticlassRecall as MulticlassRecall
from jaxlightning.metrics.classification import MultilabelAccuracy as MultilabelAccuracy
from jaxlightning.metrics.classification import MultilabelF1Score as MultilabelF1Score
from jaxlightning.metrics.classification import MultilabelPrecision as MultilabelPrecision
from jaxlightning.metrics.classification import MultilabelRecall as MultilabelRecall
from jaxlightning.metrics.classification import Precision as Precision
from jaxlightning.metrics.classification import Recall as Recall
from jaxlightning.metrics.collection import MetricCollection as MetricCollection
from jaxlightning.metrics.confusion import BinaryConfusionMatrix as BinaryConfusionMatrix
from jaxlightning.metrics.confusion import ConfusionMatrix as ConfusionMatrix
from jaxlightning.metrics.confusion import MulticlassConfusionMatrix as MulticlassConfusionMatrix
from jaxlightning.metrics.confusion import MultilabelConfusionMatrix as MultilabelConfusionMatrix
from jaxlightning.metrics.metric import Metric as Metric
from jaxlightning.metrics.metric import MetricFunctions as MetricFunctions
from jaxlightning.metrics.regression import MeanAbsoluteError as MeanAbsoluteError
from jaxlightning.metrics.regression import MeanSquaredError as MeanSquaredError
from jaxlightning.metrics.regression import R2Score as R2Score
