"""Break one behaviour of a row at a time, in a copy of the package, and see that the row's test notices.

python tests/conformance/mutations.py [ROW ...]      # all by default; one line each; exit code 1 if one survives
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PROJECT = TESTS.parent


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One edit that breaks a row: `old` becomes `new` in a file of the package, and `test` has to fail."""

    row: str
    file: str
    old: str
    new: str
    test: str


_FLAGS = "trainer/test_flags.py::test_flags_do_what_they_do_in_lightning"
_EPOCH_LOOP = "loops/training_epoch_loop.py"
_LOGGED = "metrics/test_logging_on_trainer.py::test_the_recorded_runs_give_the_same_logs"

MUTATIONS = [
    Mutation(
        "TF14",
        "loops/validation_schedule.py",
        "return 0 if every is None or every == math.inf else int(every)",
        "return 0 if every is None or every == math.inf else int(every) + 1",
        f"{_FLAGS}[val_check_interval_0.3]",
    ),
    Mutation(
        "TF16",
        "loops/validation_schedule.py",
        "index = loop.total_batch_idx if trainer.check_val_every_n_epoch is None else loop.batch_idx",
        "index = loop.batch_idx",
        f"{_FLAGS}[val_check_interval_7_no_epoch]",
    ),
    Mutation(
        "TF19",
        "loops/validation_schedule.py",
        "time.monotonic() - trainer._last_val_time >= interval",
        "time.monotonic() - trainer._last_val_time >= 2 * interval",
        "conformance/test_trainer_flags.py::test_validation_by_the_clock",
    ),
    Mutation(
        "TF41",
        "trainer_callbacks.py",
        "os.path.normpath(os.path.expanduser(text))",
        "os.path.normpath(text)",
        "conformance/test_trainer_flags.py::test_the_root_directory_is_expanded_and_normalised",
    ),
    Mutation(
        "LP06",
        _EPOCH_LOOP,
        "if not plateau and self._num_ready_batches_reached():",
        "if not plateau and (self._num_ready_batches_reached() or self._steps_reached()):",
        "optim/test_golden_optimization.py::test_learning_rates_after_every_batch",
    ),
    Mutation(
        "LP10",
        "loops/fit_loop.py",
        'f"`Trainer.fit` stopped: `max_steps={self.max_steps!r}` reached."',
        'f"`Trainer.fit` stopped."',
        "conformance/test_loops.py::test_the_reason_of_an_end_is_announced",
    ),
    Mutation(
        "LP12",
        _EPOCH_LOOP,
        "if response == -1:",
        "if response == -2:",
        f"{_FLAGS}[on_train_batch_start_minus1]",
    ),
    Mutation(
        "LP08",
        "loops/fit_loop.py",
        "return epochs_met and steps_met",
        "return epochs_met or steps_met",
        f"{_FLAGS}[should_stop_mid_epoch_min_steps]",
    ),
    Mutation(
        "GA01",
        _EPOCH_LOOP,
        "apply = current.ready % accumulate == 0 or progress.is_last_batch or current.ready == max_batches",
        "apply = current.ready % accumulate == 0",
        f"{_FLAGS}[acc3_remainder]",
    ),
    Mutation(
        "GA06",
        "callbacks/gradient_accumulation_scheduler.py",
        "if start <= epoch)]",
        "if start < max(epoch, 1))]",
        f"{_FLAGS}[accumulation_scheduler]",
    ),
    Mutation(
        "HK15",
        "loops/fit_loop.py",
        'call_callback_hooks(trainer, "on_train_epoch_end", monitoring_callbacks=False)\n'
        '        call_lightning_module_hook(trainer, "on_train_epoch_end")\n',
        'call_lightning_module_hook(trainer, "on_train_epoch_end")\n'
        '        call_callback_hooks(trainer, "on_train_epoch_end", monitoring_callbacks=False)\n',
        "conformance/test_hooks.py::test_monitoring_callbacks_come_after_the_module",
    ),
    Mutation(
        "LG29",
        "loops/fit_loop.py",
        'call_callback_hooks(trainer, "on_train_epoch_end", monitoring_callbacks=True)',
        'call_callback_hooks(trainer, "on_train_epoch_end", monitoring_callbacks=False)',
        "conformance/test_hooks.py::test_monitoring_callbacks_come_after_the_module",
    ),
    Mutation(
        "HK01",
        "loops/fit_loop.py",
        'call_callback_hooks(self.trainer, "on_train_end")\n'
        '        call_lightning_module_hook(self.trainer, "on_train_end")\n',
        'call_lightning_module_hook(self.trainer, "on_train_end")\n'
        '        call_callback_hooks(self.trainer, "on_train_end")\n',
        "trainer/test_hook_order.py::test_compiled_fit_calls_every_hook_in_lightnings_order[fit_no_val]",
    ),
    Mutation(
        "HK33",
        _EPOCH_LOOP,
        "window_start = self._window_count == 0 or batch_idx % accumulate == 0",
        "window_start = batch_idx % accumulate == 1 or self._window_count == 0",
        "conformance/test_hooks.py::test_gradients_are_zeroed_once_per_window",
    ),
    Mutation(
        "LG03",
        "metrics/_fx_rules.py",
        "_EPOCH = _Rule(default=(False, True), free=False)",
        "_EPOCH = _Rule(default=(False, True), free=True)",
        "conformance/test_logging.py::test_where_logging_is_allowed[module]",
    ),
    Mutation(
        "LG02",
        "metrics/_fx_rules.py",
        "_EVAL_BATCH = _Rule(default=(False, True), free=True)",
        "_EVAL_BATCH = _Rule(default=(True, True), free=True)",
        "metrics/test_log_rules.py::test_every_hook_allows_what_it_allows_in_lightning",
    ),
    Mutation(
        "LG30",
        "metrics/_sending.py",
        "(trainer.fit_loop.epoch_loop._batches_that_stepped + 1) % every == 0",
        "trainer.fit_loop.epoch_loop._batches_that_stepped % every == 0",
        f"{_LOGGED}[base_log2-csv_alone]",
    ),
    Mutation(
        "LG33",
        "metrics/_sending.py",
        "% every == 0 or bool(trainer.should_stop)",
        "% every == 0",
        "metrics/test_logged_values.py::test_fast_dev_run_and_a_stop_log_every_step",
    ),
    Mutation(
        "LG34",
        "metrics/_emission.py",
        'metrics.setdefault("epoch", epoch)',
        'metrics.setdefault("epoch", epoch + 1)',
        f"{_LOGGED}[base_log2-csv_alone]",
    ),
    Mutation(
        "LG39",
        "loops/fit_loop.py",
        "epoch_loop._batches_that_stepped -= 1\n",
        "epoch_loop._batches_that_stepped -= 0\n",
        f"{_LOGGED}[base_log2-csv_alone]",
    ),
    Mutation(
        "LG44",
        "metrics/_entries.py",
        'suffix = f"/dataloader_idx_{meta.dataloader_idx}"',
        'suffix = f"/loader_{meta.dataloader_idx}"',
        f"{_LOGGED}[two_val_loaders-csv_alone]",
    ),
    Mutation(
        "LG20",
        "metrics/_batch_size.py",
        "if found is None:\n        if scalars:\n            return 1",
        "if found is None:\n        if True:\n            return 1",
        "metrics/test_log_rules.py::test_the_batch_size_is_inferred_where_lightning_infers_it",
    ),
    Mutation(
        "DL03",
        "loops/fit_loop.py",
        '"max_size_cycle",',
        '"min_size",',
        "loops/test_dataloaders.py::test_collections_give_lightnings_batches[fit|list|default]",
    ),
    Mutation(
        "PR05",
        "loops/prediction_loop.py",
        "results = self.predictions if self.return_predictions else None",
        "results = self.predictions",
        "loops/test_dataloaders.py::test_predictions_and_writers_get_lightnings_values",
    ),
    Mutation(
        "PR03",
        "metrics/_table.py",
        'f"{stage} metric".capitalize()',
        'f"{stage} result".capitalize()',
        "conformance/test_results.py::test_results_are_printed_as_a_table",
    ),
    Mutation(
        "DM09",
        "datamodule.py",
        "if size is None else size}",
        "if size is None else size + 1}",
        "conformance/test_datamodules.py::test_a_datamodule_describes_itself_and_can_be_pickled",
    ),
    Mutation(
        "ES01",
        "callbacks/early_stopping.py",
        "trainer.val_check_interval == 1.0 and trainer.check_val_every_n_epoch == 1",
        "trainer.val_check_interval == 1.0",
        "conformance/test_callbacks_and_loggers.py::test_early_stopping_checks_once_where_lightning_does",
    ),
    Mutation(
        "ES09",
        "callbacks/early_stopping.py",
        'self.patience = state_dict["patience"]',
        "pass",
        "conformance/test_callbacks_and_loggers.py::test_any_of_several_stops_and_each_has_a_key_of_its_own",
    ),
    Mutation(
        "PB02",
        "callbacks/progress/progress_bar.py",
        "version[-4:]",
        "version[-5:]",
        "callbacks/test_golden.py::test_a_bar_gets_the_metrics_of_lightning_in_every_hook",
    ),
    Mutation(
        "LO02",
        "loggers/_versions.py",
        'f"version_{version}"',
        'f"run_{version}"',
        "loggers/test_csv_logger.py::test_the_directories_are_lightnings",
    ),
    Mutation(
        "LP30",
        "trainer_properties.py",
        "math.ceil(batches / self.accumulate_grad_batches)",
        "math.floor(batches / self.accumulate_grad_batches)",
        "trainer/test_states.py::test_the_number_of_steps_is_estimated_in_configure_optimizers",
    ),
    Mutation(
        "LM01",
        "callbacks/lr_monitor.py",
        'base = f"lr-{optimizer.name}" if config.name is None else config.name',
        'base = f"lr-{optimizer.name}"',
        "callbacks/test_golden.py::test_the_learning_rates_of_lightning_are_logged",
    ),
]


def copy_of_the_package(place: Path) -> Path:
    """A copy that is imported when `place` comes first on the path."""
    leave = shutil.ignore_patterns("__pycache__")
    # A checkout may have a link to the adapters inside the package.
    shutil.copytree(
        PROJECT / "jaxlightning", place / "jaxlightning", ignore=shutil.ignore_patterns("__pycache__", "adapters")
    )
    shutil.copytree(PROJECT / "adapters", place / "jaxlightning" / "adapters", ignore=leave)
    return place


_RUN = """
import sys
import pytest

file, test = sys.argv[1:]
try:
    code = pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:cov", test])
except BaseException:
    sys.exit(8)
import jaxlightning
sys.exit(code if jaxlightning.__file__ == file else 9)
"""
"""Runs one test; 9 when it was not the copy of the package that was tested, 8 when pytest itself fails."""


def survives(mutation: Mutation) -> str | None:
    """Apply a mutation and run its test; return what the test said when it passed all the same."""
    with tempfile.TemporaryDirectory() as name:
        place = copy_of_the_package(Path(name))
        file = place / "jaxlightning" / mutation.file
        text = file.read_text()
        if text.count(mutation.old) != 1:
            raise ValueError(f"{mutation.row}: `{mutation.old}` is {text.count(mutation.old)} times in {mutation.file}")
        file.write_text(text.replace(mutation.old, mutation.new))
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "XLA_FLAGS"))}
        environment["PYTHONPATH"] = str(place)
        command = [sys.executable, "-c", _RUN, str(place / "jaxlightning" / "__init__.py"), mutation.test]
        done = subprocess.run(command, env=environment, cwd=TESTS, capture_output=True, text=True, check=False)
    # 1: some test failed. Anything else (no test was found, the file does not import) proves nothing.
    return None if done.returncode == 1 else f"exit code {done.returncode}\n{done.stdout[-1500:]}"


def main() -> int:
    """Run the mutations of the rows named, or all."""
    wanted = sys.argv[1:]
    alive = 0
    for mutation in MUTATIONS:
        if not wanted or mutation.row in wanted:
            said = survives(mutation)
            alive += said is not None
            print(mutation.row, "is noticed" if said is None else f"SURVIVES: {said}", flush=True)
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
