"""What `torch.optim.swa_utils` has for `configure_optimizers`; averaging itself is a callback's work."""

from jaxlightning.optim.lr_scheduler._cycles import SWALR as SWALR
