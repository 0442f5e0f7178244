"""One `fit` for a train step that somebody wrote by hand, on the loops of the Trainer.

- `_forms`: what a step's arguments and results are
- `_held`: what it carries, and how that is saved
- `_program`, `_evaluation`: the one call per batch
- `_engine`, `_module`: what the loops see
- `_fit`, `_checkpoints`: the function, and the trainer that it makes
"""

from jaxlightning.functional._fit import fit as fit
from jaxlightning.functional._fit import load_state as load_state
from jaxlightning.functional._state import TrainState as TrainState

__all__ = ["TrainState", "fit", "load_state"]
