"""Learning-rate schedulers with torch's names and numbers."""

from jaxlightning.optim.lr_scheduler._base import LRScheduler as LRScheduler
from jaxlightning.optim.lr_scheduler._base import LRScheduler as _LRScheduler  # noqa: F401  (torch's old name)
from jaxlightning.optim.lr_scheduler._base import ScheduleLR as ScheduleLR
from jaxlightning.optim.lr_scheduler._compose import ChainedScheduler as ChainedScheduler
from jaxlightning.optim.lr_scheduler._compose import SequentialLR as SequentialLR
from jaxlightning.optim.lr_scheduler._cycles import SWALR as SWALR
from jaxlightning.optim.lr_scheduler._cycles import CosineAnnealingWarmRestarts as CosineAnnealingWarmRestarts
from jaxlightning.optim.lr_scheduler._cycles import CyclicLR as CyclicLR
from jaxlightning.optim.lr_scheduler._cycles import OneCycleLR as OneCycleLR
from jaxlightning.optim.lr_scheduler._decay import ConstantLR as ConstantLR
from jaxlightning.optim.lr_scheduler._decay import CosineAnnealingLR as CosineAnnealingLR
from jaxlightning.optim.lr_scheduler._decay import ExponentialLR as ExponentialLR
from jaxlightning.optim.lr_scheduler._decay import LambdaLR as LambdaLR
from jaxlightning.optim.lr_scheduler._decay import LinearLR as LinearLR
from jaxlightning.optim.lr_scheduler._decay import MultiplicativeLR as MultiplicativeLR
from jaxlightning.optim.lr_scheduler._decay import MultiStepLR as MultiStepLR
from jaxlightning.optim.lr_scheduler._decay import PolynomialLR as PolynomialLR
from jaxlightning.optim.lr_scheduler._decay import StepLR as StepLR
from jaxlightning.optim.lr_scheduler._plateau import ReduceLROnPlateau as ReduceLROnPlateau
