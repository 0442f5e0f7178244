"""`jax.debug.print` in a compiled step while a bar is on the terminal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pty = pytest.importorskip("pty")

SCRIPT = """
import flax.linen as nn, jax, jax.numpy as jnp, numpy as np, optax
import jaxlightning as jl

class Module(jl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Dense(1)
    def training_step(self, batch, batch_idx):
        jax.debug.print("step {i} says hello", i=jnp.asarray(batch_idx))
        return jnp.square(self.net(batch)).mean()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        jax.effects_barrier()
        print("and", "the hook", batch_idx)
    def configure_optimizers(self):
        return optax.sgd(0.1)

data = jl.ArrayLoader(np.ones((24, 2), np.float32), batch_size=4)
jl.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_model_summary=False).fit(Module(), data)
print("the end")
"""


def run_on_a_terminal(script: str, folder: Path) -> str:
    """Everything that a script writes to a terminal of 100 columns."""
    import fcntl
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env={**os.environ, "TERM": "xterm", "PYTHONWARNINGS": "ignore", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    os.close(theirs)
    written = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        written += part
    os.close(ours)
    assert process.wait() == 0
    return written.decode()


@pytest.mark.slow
def test_printed_lines_stand_above_the_bar_and_are_whole(tmp_path: Path) -> None:
    text = run_on_a_terminal(SCRIPT, tmp_path)
    lines = []
    for raw in text.replace("\r\n", "\n").split("\n"):
        # What a terminal shows of a line: each carriage return writes over it from the start.
        shown = ""
        for part in re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", raw).split("\r"):
            shown = part + shown[len(part) :]
        lines.append(shown.rstrip())
    for i in range(6):
        assert f"step {i} says hello" in lines
        assert f"and the hook {i}" in lines
    assert "the end" in lines
    assert any(line.startswith("Epoch 0: 100%") for line in lines)
