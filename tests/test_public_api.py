"""What `import jaxlightning` offers, and what it leaves alone."""

from __future__ import annotations

import json
import subprocess
import sys

import jaxlightning

_CHECK = """
import json, logging, os, sys
before = dict(os.environ)
import jaxlightning as pl
{body}
import jax
print(json.dumps({{
    "modules": [m for m in ("torch", "torchvision", "tensorflow", "tensorboardX", "lightning", "orbax", "tqdm", "grain")
                if m in sys.modules],
    "environment": dict(os.environ) == before,
    "backends": len(jax._src.xla_bridge._backends),
    "handlers": len(logging.getLogger().handlers) + len(logging.getLogger("jaxlightning").handlers),
    "x64": jax.config.jax_enable_x64,
}}))
"""


def _run(body: str) -> dict[str, object]:
    out = subprocess.run([sys.executable, "-c", _CHECK.format(body=body)], capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    result: dict[str, object] = json.loads(out.stdout.strip().splitlines()[-1])
    return result


def test_importing_loads_nothing_heavy_and_changes_nothing() -> None:
    found = _run("pl.LightningModule, pl.Callback, pl.functionalize, pl.LightningDataModule, pl.seed_everything")
    assert found == {"modules": [], "environment": True, "backends": 0, "handlers": 0, "x64": False}


def test_a_trainer_starts_no_backend() -> None:
    found = _run("pl.Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False)")
    assert found["backends"] == 0
    assert found["environment"] is True
    assert found["x64"] is False
    assert not {"torch", "tensorflow", "lightning"} & set(found["modules"])  # type: ignore[call-overload]


def test_every_exported_name_exists() -> None:
    for name in jaxlightning.__all__:
        assert getattr(jaxlightning, name) is not None
    assert jaxlightning.LightningModule is jaxlightning.JaxLightningModule
    assert set(jaxlightning.__all__) <= set(dir(jaxlightning))
