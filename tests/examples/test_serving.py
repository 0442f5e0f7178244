"""The service of `examples/serving` on a loopback address: right answers, many requests in one call, clear refusals."""

from __future__ import annotations

import importlib
import json
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("starlette")
uvicorn = pytest.importorskip("uvicorn")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "serving"
WEIGHTS = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(EXAMPLES)
    yield importlib.import_module("service"), importlib.import_module("load_test")
    for name in ("service", "load_test"):
        sys.modules.pop(name, None)


@pytest.fixture
def url(modules: Any, tmp_path: Path) -> Iterator[str]:
    """A running service."""
    from jaxlightning.export import export_function

    path = export_function(lambda x: jnp.tanh(x @ WEIGHTS), np.zeros((1, 6), np.float32), tmp_path / "m.stablehlo")
    service, _ = modules
    model = service.Model(path, max_batch=16)
    model.warm_up()
    config = uvicorn.Config(service.make_app(model, wait=0.02), host="127.0.0.1", port=0, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.slow
def test_many_clients_get_their_own_answers_in_few_calls_of_the_model(modules: Any, url: str) -> None:
    _, load = modules
    rng = np.random.default_rng(1)
    inputs = [rng.normal(size=(1 + i % 3, 6)).astype(np.float32) for i in range(120)]
    answers, seconds, _ = load.load_test(url, inputs, clients=8)
    for rows, answer in zip(inputs, answers, strict=True):
        np.testing.assert_allclose(answer, np.tanh(rows @ WEIGHTS), rtol=0, atol=1e-5)
    assert max(seconds) < 30
    with urllib.request.urlopen(f"{url}/health", timeout=30) as response:
        batches = json.loads(response.read())["batches"]
    assert batches < len(inputs) / 2  # requests travelled together


@pytest.mark.slow
def test_a_wrong_request_gets_an_answer_that_says_what_is_wanted(modules: Any, url: str) -> None:
    _, load = modules
    for rows in (np.zeros((1, 5)), np.zeros((17, 6)), np.zeros((0, 6))):
        with pytest.raises(urllib.error.HTTPError) as refused:
            load.ask(url, rows)
        assert refused.value.code == 400
        assert "1 to 16 rows of shape (6,)" in json.loads(refused.value.read())["error"]
    request = urllib.request.Request(f"{url}/predict", b"{}", {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=30)
    assert "inputs" in json.loads(refused.value.read())["error"]
    np.testing.assert_allclose(load.ask(url, np.ones((1, 6))), np.tanh(np.ones((1, 6)) @ WEIGHTS), atol=1e-5)
