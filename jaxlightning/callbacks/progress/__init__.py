"""Progress bars."""

from jaxlightning.callbacks.progress.progress_bar import ProgressBar as ProgressBar
from jaxlightning.callbacks.progress.progress_bar import get_standard_metrics as get_standard_metrics
from jaxlightning.callbacks.progress.rich_progress import RichProgressBar as RichProgressBar
from jaxlightning.callbacks.progress.rich_progress import RichProgressBarTheme as RichProgressBarTheme
from jaxlightning.callbacks.progress.tqdm_progress import TQDMProgressBar as TQDMProgressBar
