"""Where metrics and hyper-parameters are recorded."""

from jaxlightning.loggers._configure import adopt_versions as adopt_versions
from jaxlightning.loggers._configure import call_loggers as call_loggers
from jaxlightning.loggers._configure import configure_loggers as configure_loggers
from jaxlightning.loggers._configure import log_hyperparams as log_hyperparams
from jaxlightning.loggers._configure import logger_positions as logger_positions
from jaxlightning.loggers._configure import logger_version as logger_version
from jaxlightning.loggers._configure import resume_loggers as resume_loggers
from jaxlightning.loggers.csv_logs import CSVLogger as CSVLogger
from jaxlightning.loggers.logger import DummyLogger as DummyLogger
from jaxlightning.loggers.logger import Logger as Logger
from jaxlightning.loggers.logger import rank_zero_experiment as rank_zero_experiment
from jaxlightning.loggers.tensorboard import TensorBoardLogger as TensorBoardLogger
from jaxlightning.loggers.wandb import WandbLogger as WandbLogger
