"""A service that answers requests from an exported model, many requests in one call of the model.

A request posts `{"inputs": [[...], ...]}` to `/predict` and gets `{"outputs": [...]}`. Requests that arrive within a
few milliseconds of each other travel as one batch. The model is a StableHLO file of `module.export(path)`, read with
`jax.export` alone: the service does not import jaxlightning.

Example:
    python examples/serving/service.py model.stablehlo --port 8000
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route


class Model:
    """An exported function; batches are filled up to powers of two, so that few shapes are compiled."""

    def __init__(self, path: Path, max_batch: int = 64) -> None:
        self.exported = jax.export.deserialize(path.read_bytes())
        self.call = jax.jit(self.exported.call)
        (shape,) = self.exported.in_avals
        self.shape, self.dtype = tuple(shape.shape[1:]), shape.dtype
        self.max_batch = max_batch

    def warm_up(self) -> None:
        """Compile every size before the first request."""
        size = 1
        while size <= self.max_batch:
            self(np.zeros((size, *self.shape), self.dtype))
            size *= 2

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        size = 1 << (len(rows) - 1).bit_length()
        filled = np.concatenate([rows, np.zeros((size - len(rows), *self.shape), self.dtype)])
        return np.asarray(self.call(filled))[: len(rows)]


class Batcher:
    """Collects rows of several requests, and runs the model in a thread of its own.

    Args:
        model: The model.
        wait: How long the first request of a batch waits for others, in seconds.
    """

    def __init__(self, model: Model, wait: float = 0.003) -> None:
        self.model = model
        self.wait = wait
        self.calls = 0
        self._queue: asyncio.Queue[tuple[np.ndarray, asyncio.Future[np.ndarray]]] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1)
        self._held: tuple[np.ndarray, asyncio.Future[np.ndarray]] | None = None

    async def predict(self, rows: np.ndarray) -> np.ndarray:
        """Return the outputs for some rows."""
        future: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()
        await self._queue.put((rows, future))
        return await future

    async def run(self) -> None:
        """Make batches until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                waiting = [self._held or await self._queue.get()]
                self._held = None
                count, deadline = len(waiting[0][0]), loop.time() + self.wait
                while count < self.model.max_batch:
                    try:
                        item = await asyncio.wait_for(self._queue.get(), max(0.0, deadline - loop.time()))
                    except TimeoutError:
                        break
                    if count + len(item[0]) > self.model.max_batch:
                        self._held = item  # it begins the next batch
                        break
                    waiting.append(item)
                    count += len(item[0])
                await self._answer(loop, waiting)
        finally:
            self._thread.shutdown(wait=True)

    async def _answer(self, loop: asyncio.AbstractEventLoop, waiting: Sequence[Any]) -> None:
        rows = np.concatenate([part for part, _ in waiting])
        try:
            outputs = await loop.run_in_executor(self._thread, self.model, rows)
        except Exception as error:
            for _, future in waiting:
                if not future.done():
                    future.set_exception(error)
            return
        self.calls += 1
        start = 0
        for part, future in waiting:
            if not future.done():  # the client may have gone
                future.set_result(outputs[start : start + len(part)])
            start += len(part)


def make_app(model: Model, wait: float = 0.003) -> Starlette:
    """Return the web application."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.batcher = Batcher(model, wait)
        task = asyncio.create_task(app.state.batcher.run())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def predict(request: Request) -> JSONResponse:
        try:
            rows = np.asarray((await request.json())["inputs"], model.dtype)
        except (ValueError, KeyError, TypeError) as error:
            return JSONResponse({"error": f'the body must be {{"inputs": [rows]}}: {error}'}, 400)
        if rows.ndim == 0 or rows.shape[1:] != model.shape or not 0 < len(rows) <= model.max_batch:
            wanted = f"1 to {model.max_batch} rows of shape {model.shape}"
            return JSONResponse({"error": f"inputs have shape {rows.shape}; wanted are {wanted}"}, 400)
        outputs = await request.app.state.batcher.predict(rows)
        return JSONResponse({"outputs": outputs.tolist()})

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok", "batches": request.app.state.batcher.calls})

    routes = [Route("/predict", predict, methods=["POST"]), Route("/health", health)]
    return Starlette(routes=routes, lifespan=lifespan)


def main(argv: Sequence[str] | None = None) -> None:
    """Serve a model until interrupted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="a file of module.export(path)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (%(default)s)")
    parser.add_argument("--max-batch", type=int, default=64, help="most rows in one call of the model (%(default)s)")
    args = parser.parse_args(argv)
    model = Model(args.model, args.max_batch)
    model.warm_up()
    uvicorn.run(make_app(model), host=args.host, port=args.port)


if __name__ == "__main__":
    main()
