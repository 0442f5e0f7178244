"""Callbacks: what hooks into a run without being part of the model."""

from jaxlightning.callbacks.callback import Callback as Callback
from jaxlightning.callbacks.checkpoint import Checkpoint as Checkpoint
from jaxlightning.callbacks.early_stopping import EarlyStopping as EarlyStopping
from jaxlightning.callbacks.early_stopping import EarlyStoppingReason as EarlyStoppingReason
from jaxlightning.callbacks.finetuning import BackboneFinetuning as BackboneFinetuning
from jaxlightning.callbacks.finetuning import BaseFinetuning as BaseFinetuning
from jaxlightning.callbacks.gradient_accumulation_scheduler import (
    GradientAccumulationScheduler as GradientAccumulationScheduler,
)
from jaxlightning.callbacks.lambda_function import LambdaCallback as LambdaCallback
from jaxlightning.callbacks.lr_monitor import LearningRateMonitor as LearningRateMonitor
from jaxlightning.callbacks.model_checkpoint import ModelCheckpoint as ModelCheckpoint
from jaxlightning.callbacks.model_summary import ModelSummary as ModelSummary
from jaxlightning.callbacks.on_exception_checkpoint import OnExceptionCheckpoint as OnExceptionCheckpoint
from jaxlightning.callbacks.prediction_writer import BasePredictionWriter as BasePredictionWriter
from jaxlightning.callbacks.prediction_writer import WriteInterval as WriteInterval
from jaxlightning.callbacks.progress import ProgressBar as ProgressBar
from jaxlightning.callbacks.progress import RichProgressBar as RichProgressBar
from jaxlightning.callbacks.progress import RichProgressBarTheme as RichProgressBarTheme
from jaxlightning.callbacks.progress import TQDMProgressBar as TQDMProgressBar
from jaxlightning.callbacks.rich_model_summary import RichModelSummary as RichModelSummary
from jaxlightning.callbacks.timer import Timer as Timer
