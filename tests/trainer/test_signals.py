"""Ctrl-C and SIGTERM: the step finishes, what is due is saved, and the exit code says what happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.tracing import TinyModule, loader

import jaxlightning as pl

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "logger": False,
    "limit_val_batches": 0,
    "max_epochs": 1,
}


class Sender(pl.Callback):
    """Sends a signal to this process in the middle of a batch, as a user would."""

    def __init__(self, number: int, times: int = 1) -> None:
        self.number, self.times = number, times
        self.batches = 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)

    def on_train_batch_end(self, *args: Any) -> None:
        self.batches += 1


@pytest.mark.filterwarnings("ignore:Ctrl-C:UserWarning")
def test_ctrl_c_lets_the_step_finish_and_exits_with_1() -> None:
    sender = Sender(signal.SIGINT)
    trainer = pl.Trainer(callbacks=[sender], enable_checkpointing=False, **QUIET)
    with pytest.raises(SystemExit) as caught:
        trainer.fit(TinyModule(), loader(20))
    assert caught.value.code == 1
    assert (sender.batches, trainer.global_step) == (3, 3)
    assert trainer.interrupted
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.filterwarnings("ignore:Ctrl-C:UserWarning")
def test_a_second_ctrl_c_stops_at_once() -> None:
    sender = Sender(signal.SIGINT, times=2)
    trainer = pl.Trainer(callbacks=[sender], enable_checkpointing=False, **QUIET)
    with pytest.raises(SystemExit):
        trainer.fit(TinyModule(), loader(20))
    assert (sender.batches, trainer.global_step) == (2, 2)


def test_sigterm_saves_one_checkpoint_and_exits_with_143(tmp_path: Path) -> None:
    """DIFFERENCES, LP32."""
    before = signal.getsignal(signal.SIGTERM)
    sender = Sender(signal.SIGTERM)
    trainer = pl.Trainer(callbacks=[sender], default_root_dir=tmp_path, **QUIET)
    with pytest.raises(pl.utilities.exceptions.SIGTERMException) as caught:
        trainer.fit(TinyModule(), loader(20))
    assert caught.value.code == 143
    assert trainer.global_step == 3
    assert [each.name for each in (tmp_path / "checkpoints").iterdir()] == ["interrupted.ckpt"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_without_checkpointing_saves_nothing(tmp_path: Path) -> None:
    trainer = pl.Trainer(
        callbacks=[Sender(signal.SIGTERM)], default_root_dir=tmp_path, enable_checkpointing=False, **QUIET
    )
    with pytest.raises(pl.utilities.exceptions.SIGTERMException):
        trainer.fit(TinyModule(), loader(20))
    assert list(tmp_path.iterdir()) == []


def test_a_handler_of_the_users_own_stays() -> None:
    calls: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    try:
        trainer = pl.Trainer(callbacks=[Sender(signal.SIGINT)], enable_checkpointing=False, **QUIET)
        trainer.fit(TinyModule(), loader(20))
    finally:
        signal.signal(signal.SIGINT, previous)
    assert calls == [signal.SIGINT]
    assert trainer.global_step == 10


SCRIPT = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import jaxlightning as pl
from support.tracing import TinyModule, loader

class Sender(pl.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 1:
            os.kill(os.getpid(), signal.{name})

pl.Trainer(callbacks=[Sender()], accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, logger=False,
           limit_val_batches=0, max_epochs=1).fit(TinyModule(), loader(20))
print("REACHED")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 1), ("SIGTERM", 143)])
def test_a_script_ends_with_the_right_exit_code(name: str, code: int, tmp_path: Path) -> None:
    text = SCRIPT.format(tests=str(Path(__file__).parents[1]), name=name)
    done = subprocess.run([sys.executable, "-c", text], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert "REACHED" not in done.stdout


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job of SLURM whose `scontrol` notes what it is asked."""
    command = tmp_path / "bin" / "scontrol"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")
    for name, value in {"SLURM_NTASKS": "1", "SLURM_JOB_ID": "123", "SLURM_JOB_NAME": "train"}.items():
        monkeypatch.setenv(name, value)
    return tmp_path


@pytest.mark.catalogue("RS25")
def test_a_slurm_job_saves_and_is_requeued_between_two_steps(slurm: Path) -> None:
    sender = Sender(signal.SIGUSR1)
    trainer = pl.Trainer(callbacks=[sender], default_root_dir=slurm, enable_checkpointing=False, **QUIET)
    trainer.fit(TinyModule(), loader(20))
    assert (slurm / "asked").read_text() == "requeue 123\n"
    assert trainer.global_step == 10  # SLURM ends the process, not we
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert (slurm / "hpc_ckpt_1.ckpt").is_dir()
    again = pl.Trainer(default_root_dir=slurm, enable_checkpointing=False, **QUIET)
    again.fit(TinyModule(), loader(20))  # the job runs again, with nothing changed
    assert again.ckpt_path == str(slurm / "hpc_ckpt_1.ckpt")
    assert again.global_step == 10


def test_an_array_job_and_a_missing_scontrol(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    options = {"default_root_dir": slurm, "enable_checkpointing": False, **QUIET}
    pl.Trainer(callbacks=[Sender(signal.SIGUSR1)], **options).fit(TinyModule(), loader(20))
    assert (slurm / "asked").read_text() == "requeue 7_2\n"
    (slurm / "bin" / "scontrol").write_text("#!/bin/sh\nexit 3\n")
    trainer = pl.Trainer(callbacks=[Sender(signal.SIGUSR1)], **{**options, "default_root_dir": slurm / "b"})
    with pytest.warns(UserWarning, match="failed with code 3"):
        trainer.fit(TinyModule(), loader(20))
    assert (slurm / "b" / "hpc_ckpt_1.ckpt").is_dir()


def test_outside_of_slurm_sigusr1_is_not_ours(tmp_path: Path) -> None:
    calls: list[int] = []
    previous = signal.signal(signal.SIGUSR1, lambda number, frame: calls.append(number))
    try:
        pl.Trainer(
            callbacks=[Sender(signal.SIGUSR1)], default_root_dir=tmp_path, enable_checkpointing=False, **QUIET
        ).fit(TinyModule(), loader(20))
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert calls == [signal.SIGUSR1]
