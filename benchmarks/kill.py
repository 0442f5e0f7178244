"""Kill a training process at random moments, restart it with `auto_resume`, and see whether anything is lost.

One run is left alone. A second one is killed with SIGKILL again and again, at moments drawn from a seed: some time
after a batch began, or after a checkpoint began to be written. After each kill the newest complete commit on disk is
noted; the restarted process has to continue exactly there. At the end the parameters, the CSV file and the set of
checkpoints have to be those of the run that was left alone, byte for byte.

Processes are forked from one that has imported everything and started nothing, so that a start is cheap.

    python benchmarks/kill.py --moments 60 --seed 0 --json benchmarks/results/kill.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import select
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from datetime import date
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The template must have one thread, or it could not be forked.
for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

BATCHES, EVERY = 8, 4
BATCH_EVENT, SAVE_EVENT = b"b", b"s"


def train(root: Path, epochs: int, cache: Path, events: int) -> None:
    """Train in this process; what a killed process had reached is continued.

    Args:
        root: The run's directory.
        epochs: Length of the run.
        cache: Where compiled steps are kept over the processes.
        events: File descriptor that gets a byte when a batch begins and when a checkpoint begins to be written.
    """
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jaxlightning as pl
    from jaxlightning.callbacks import ModelCheckpoint
    from jaxlightning.checkpoint import _io
    from jaxlightning.loggers import CSVLogger
    from jaxlightning.optim import Adam
    from jaxlightning.optim.lr_scheduler import StepLR

    for name, value in {
        "jax_compilation_cache_dir": str(cache),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }.items():
        jax.config.update(name, value)

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x: Any, train: bool) -> Any:
            x = nn.Dropout(0.2, deterministic=not train)(nn.relu(nn.Dense(16)(x)))
            return nn.Dense(3)(x)

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Network()

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            x, y = batch
            scale = 0.1 * random.random() if self.trainer.training else 0.0
            return (x + scale * np.random.randn(*x.shape)).astype(np.float32), y

        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            loss = self.loss(batch)
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: Any) -> None:
            self.log("vl", self.loss(batch))

        def loss(self, batch: Any) -> Any:
            logits = jax.nn.log_softmax(self.net(batch[0]))
            return -jnp.mean(jnp.take_along_axis(logits, batch[1][:, None], 1))

        def configure_optimizers(self) -> Any:
            optimizer = Adam(self.parameters(), lr=0.01)
            return [optimizer], [{"scheduler": StepLR(optimizer, 20, 0.9), "interval": "step"}]

    class Watch(pl.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            report = {"resumed": trainer.ckpt_path, "step": trainer.global_step}
            (root.parent / "start.json").write_text(json.dumps(report))

        def on_train_batch_start(self, *args: Any) -> None:
            os.write(events, BATCH_EVENT)

    commit = _io.commit

    def watched(*args: Any) -> None:
        os.write(events, SAVE_EVENT)
        commit(*args)

    _io.commit = watched
    pl.seed_everything(7, verbose=False)
    x = np.random.RandomState(0).randn(BATCHES * 8, 12).astype(np.float32)
    y = np.random.RandomState(1).randint(0, 3, len(x)).astype(np.int32)
    module = Classifier()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        auto_resume=True,
        default_root_dir=root,
        logger=CSVLogger(root, version=0),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            ModelCheckpoint(root / "steps", every_n_train_steps=EVERY, save_last=True),
            ModelCheckpoint(root / "best", monitor="vl", save_top_k=2),
            Watch(),
        ],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a killed process leaves a directory that is not empty
        trainer.fit(
            module, pl.ArrayLoader((x, y), batch_size=8, shuffle=True), pl.ArrayLoader((x[:16], y[:16]), batch_size=8)
        )
    flat = {name: np.asarray(value) for name, value in sorted(module.state_dict().items())}
    digest = hashlib.sha256(b"".join(name.encode() + value.tobytes() for name, value in flat.items()))
    (root.parent / "end.json").write_text(json.dumps({"parameters": digest.hexdigest(), "step": trainer.global_step}))


# --- processes ----------------------------------------------------------------------------------------------


def start(home: Path, epochs: int, cache: Path) -> tuple[int, int]:
    """Fork a training process; returns its id and the reading end of its events."""
    threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
    if threads > 1:
        raise RuntimeError(f"The template has {threads} threads and cannot be forked.")
    (home / "start.json").unlink(missing_ok=True)
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of forks; nothing of it runs yet
        child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    try:
        os.close(reading)
        log = os.open(home / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        train(home / "run", epochs, cache, writing)
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def wait_for(reading: int, kind: bytes, count: int) -> bool:
    """Wait for the n-th event of a kind; False when the process ends before."""
    while count > 0:
        select.select([reading], [], [])
        data = os.read(reading, 1)
        if not data:
            return False
        count -= data == kind
    return True


def drain(reading: int) -> None:
    """Read events until the process ends."""
    while os.read(reading, 4096):
        pass
    os.close(reading)


def newest_commit(run: Path) -> int:
    """The step of the newest complete commit on disk, 0 if there is none; found without the library."""
    found = []
    for marker in run.glob("*/*.ckpt/_CHECKPOINT_METADATA"):
        metadata = marker.parent / "metadata" / "metadata.json"
        stamp = json.loads(marker.read_text())["commit_timestamp_nsecs"]
        found.append((stamp, json.loads(metadata.read_text())["checkpoint"]["global_step"]))
    for marker in run.glob("*/*.ckpt.replaced-*/_CHECKPOINT_METADATA"):  # killed between two renames
        original = marker.parent.with_name(marker.parent.name.partition(".replaced-")[0])
        if not original.exists():
            metadata = marker.parent / "metadata" / "metadata.json"
            stamp = json.loads(marker.read_text())["commit_timestamp_nsecs"]
            found.append((stamp, json.loads(metadata.read_text())["checkpoint"]["global_step"]))
    return max(found)[1] if found else 0


def result_of(home: Path) -> dict[str, Any]:
    """What has to be equal."""
    run = home / "run"
    rows = (run / "lightning_logs" / "version_0" / "metrics.csv").read_bytes()
    return {
        **json.loads((home / "end.json").read_text()),
        "csv": hashlib.sha256(rows).hexdigest(),
        "rows": rows.count(b"\n") - 1,
        "checkpoints": sorted(str(path.relative_to(run)) for path in run.glob("*/*.ckpt*")),
    }


# --- the experiment -----------------------------------------------------------------------------------------


def experiment(moments: int, seed: int, epochs: int, directory: Path) -> dict[str, Any]:
    """Run both runs.

    Args:
        moments: How often the second one is killed.
        seed: Of the moments.
        epochs: Length of a run.
        directory: Where everything goes.

    Returns:
        The result, with a list of problems that is empty when all is well.
    """
    draw = random.Random(seed)
    cache, alone, home = directory / "compiled", directory / "alone", directory / "killed"
    for folder in (cache, alone, home):
        folder.mkdir(parents=True)
    child, reading = start(alone, epochs, cache)
    drain(reading)
    problems: list[str] = []
    if os.waitpid(child, 0)[1] != 0:
        return {"problems": ["the run that was left alone failed:\n" + (alone / "log.txt").read_text()[-3000:]]}
    kills: list[dict[str, Any]] = []
    expected, starts = 0, []
    finished = False
    while not finished:
        began = time.monotonic()
        child, reading = start(home, epochs, cache)
        if len(kills) < moments:
            kind = draw.choice([BATCH_EVENT, SAVE_EVENT, SAVE_EVENT])
            count = draw.randint(1, 12) if kind == BATCH_EVENT else draw.randint(1, 6)
            delay = draw.uniform(0.0, 0.002 if kind == BATCH_EVENT else 0.06)
            if wait_for(reading, kind, count):
                time.sleep(delay)
                os.kill(child, signal.SIGKILL)
        drain(reading)
        code = os.waitpid(child, 0)[1]
        report = home / "start.json"
        if report.exists():
            starts.append(time.monotonic() - began)
            resumed = json.loads(report.read_text())["step"]
            if resumed != expected:
                problems.append(f"start {len(kills)}: resumed at step {resumed}, but step {expected} was committed")
        elif code != signal.SIGKILL:
            problems.append(f"start {len(kills)} failed:\n{(home / 'log.txt').read_text()[-3000:]}")
            break
        if code == signal.SIGKILL:
            expected = newest_commit(home / "run")
            writing = list((home / "run").glob("*/*.saving-*"))
            kills.append({"at": "batch" if kind == BATCH_EVENT else "save", "step": expected, "writing": bool(writing)})
            continue
        finished = True
        if code != 0:
            problems.append(f"the last process ended with code {code}:\n{(home / 'log.txt').read_text()[-3000:]}")
    want = result_of(alone)
    got = result_of(home) if (home / "end.json").exists() else {}
    problems += [
        f"{name}: {got.get(name)} instead of {value}" for name, value in want.items() if got.get(name) != value
    ]
    if len(kills) < moments and not problems:
        problems.append(f"the run ended after {len(kills)} kills; use more --epochs")
    return {
        "kills": len(kills),
        "killed while a checkpoint was being written": sum(kill["writing"] for kill in kills),
        "steps of the run": want["step"],
        "rows of the CSV file": want["rows"],
        "restarts": len(starts),
        "seconds per killed process": round(statistics.median(starts), 2) if starts else None,
        "identical": {name: got.get(name) == value for name, value in want.items()},
        "problems": problems,
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 0 when nothing was lost."""
    parser = argparse.ArgumentParser(description="Kill a training run at random moments and let it resume.")
    parser.add_argument("--moments", type=int, default=60, help="how often it is killed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=None, help="length of the run; by default enough for all kills")
    parser.add_argument("--json", type=Path, help="where the result is written")
    parser.add_argument("--keep", type=Path, help="a directory for both runs, which are kept")
    options = parser.parse_args(arguments)
    epochs = options.epochs or 4 + options.moments
    directory = options.keep or Path(tempfile.mkdtemp(prefix="kill-"))

    import orbax.checkpoint  # noqa: F401

    import jaxlightning  # noqa: F401

    try:
        result = experiment(options.moments, options.seed, epochs, directory)
    finally:
        if options.keep is None:
            shutil.rmtree(directory, ignore_errors=True)
    result = {"date": date.today().isoformat(), "seed": options.seed, "python": platform.python_version(), **result}
    print(json.dumps(result, indent=2))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
