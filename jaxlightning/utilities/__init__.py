"""Small things that every part of the package uses."""

from typing import TYPE_CHECKING, Any

from jaxlightning.utilities.exceptions import MisconfigurationException as MisconfigurationException
from jaxlightning.utilities.exceptions import SIGTERMException as SIGTERMException
from jaxlightning.utilities.parsing import AttributeDict as AttributeDict
from jaxlightning.utilities.rank_zero import rank_zero_debug as rank_zero_debug
from jaxlightning.utilities.rank_zero import rank_zero_deprecation as rank_zero_deprecation
from jaxlightning.utilities.rank_zero import rank_zero_info as rank_zero_info
from jaxlightning.utilities.rank_zero import rank_zero_only as rank_zero_only
from jaxlightning.utilities.rank_zero import rank_zero_warn as rank_zero_warn
from jaxlightning.utilities.seed import isolate_rng as isolate_rng
from jaxlightning.utilities.seed import seed_everything as seed_everything
from jaxlightning.utilities.warnings import PossibleUserWarning as PossibleUserWarning

if TYPE_CHECKING:
    from jaxlightning.compile.anomaly import load_batch as load_batch
    from jaxlightning.optim import grad_norm as grad_norm
    from jaxlightning.utilities.combined_loader import CombinedLoader as CombinedLoader


def __getattr__(name: str) -> Any:
    # Lightning keeps them here; what they belong to imports this package.
    if name == "load_batch":
        from jaxlightning.compile.anomaly import load_batch

        return load_batch
    if name == "grad_norm":
        from jaxlightning.optim import grad_norm

        return grad_norm
    if name == "CombinedLoader":
        from jaxlightning.utilities.combined_loader import CombinedLoader

        return CombinedLoader
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
