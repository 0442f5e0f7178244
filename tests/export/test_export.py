"""Every format is written from linen and from NNX, and run by its own runtime to the module's own numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxlightning
from jaxlightning import ArrayLoader, LightningModule, Trainer
from jaxlightning.utilities.exceptions import MisconfigurationException


class Cnn(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = nn.Conv(4, (3, 3))(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.5)(x))
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = nn.Dropout(0.5, deterministic=not train)(x.reshape(x.shape[0], -1))
        return nn.Dense(10)(x)


def nnx_cnn() -> Any:
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(4, momentum=0.5, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)
            self.out = nnx.Linear(64, 10, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = nnx.relu(self.norm(self.conv(x)))
            x = nnx.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
            return self.out(self.drop(x.reshape(x.shape[0], -1)))

    return Net()


class Module(LightningModule):
    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net
        self.example_input_array = np.zeros((1, 8, 8, 1), np.float32)

    def forward(self, x: Any) -> Any:
        return jax.nn.softmax(self.net(x))

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        x, y = batch
        return optax.softmax_cross_entropy_with_integer_labels(self.net(x), y).mean()

    def configure_optimizers(self) -> Any:
        return optax.adam(1e-2)


X = np.random.default_rng(0).normal(size=(7, 8, 8, 1)).astype(np.float32)


@pytest.fixture(scope="module", params=["linen", "nnx"])
def module(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Module:
    module = Module(Cnn() if request.param == "linen" else nnx_cnn())
    trainer = Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path_factory.mktemp("run"),
    )  # fmt: skip
    trainer.fit(module, ArrayLoader(X, np.arange(7), batch_size=7))
    return module


@pytest.fixture(scope="module")
def want(module: Module) -> np.ndarray:
    """What the module gives in evaluation mode."""
    trainer = Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    (out,) = trainer.predict(module, ArrayLoader(X, batch_size=7))
    return np.asarray(out)


@pytest.fixture(autouse=True)
def _no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSSIBLE_USER_WARNINGS", "off")


def close(got: Any, want: Any) -> None:
    np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=1e-5)


def test_stablehlo_is_read_by_jax_alone_for_any_batch(module: Module, want: np.ndarray, tmp_path: Path) -> None:
    path = module.export(tmp_path / "deep" / "model.stablehlo")
    exported = jax.export.deserialize(path.read_bytes())
    assert set(exported.platforms) == {"cpu", "cuda", "tpu"}
    close(exported.call(X), want)
    close(exported.call(X[:3]), want[:3])
    assert module.training  # the module stays in the mode in which it was


def test_a_fixed_batch_is_kept(module: Module, want: np.ndarray, tmp_path: Path) -> None:
    exported = jax.export.deserialize(module.export(tmp_path / "m", batch=7).read_bytes())
    close(exported.call(X), want)
    with pytest.raises(ValueError, match="shape"):
        exported.call(X[:3])


@pytest.mark.slow
@pytest.mark.tf
def test_tensorflow_loads_and_runs_a_saved_model(module: Module, want: np.ndarray, tmp_path: Path) -> None:
    tf = pytest.importorskip("tensorflow")
    for _ in range(2):  # the second replaces the first
        module.export(tmp_path / "saved", format="saved_model")
    loaded = tf.saved_model.load(str(tmp_path / "saved"))
    close(loaded.f(X), want)
    (served,) = loaded.signatures["serving_default"](x0=tf.constant(X[:2])).values()
    close(served, want[:2])


@pytest.mark.slow
@pytest.mark.tf
def test_a_folder_that_is_no_saved_model_is_left_alone(module: Module, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(FileExistsError):
        module.export(tmp_path, format="saved_model")
    assert (tmp_path / "mine.txt").exists()


@pytest.mark.slow
@pytest.mark.tf
def test_litert_runs_the_flat_buffer(module: Module, want: np.ndarray, tmp_path: Path) -> None:
    litert = pytest.importorskip("ai_edge_litert.interpreter")
    path = module.export(tmp_path / "model.tflite", format="tflite")
    interpreter = litert.Interpreter(model_path=str(path))
    (given,) = interpreter.get_input_details()
    interpreter.resize_tensor_input(given["index"], X.shape)
    interpreter.allocate_tensors()
    interpreter.set_tensor(given["index"], X)
    interpreter.invoke()
    (made,) = interpreter.get_output_details()
    close(interpreter.get_tensor(made["index"]), want)


@pytest.mark.slow
# jax2onnx imports names that flax and jax have moved.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_onnxruntime_runs_the_graph(module: Module, want: np.ndarray, tmp_path: Path) -> None:
    pytest.importorskip("jax2onnx")
    runtime = pytest.importorskip("onnxruntime")
    path = module.export(tmp_path / "model.onnx", format="onnx")
    session = runtime.InferenceSession(str(path))
    (given,) = session.get_inputs()
    for rows in (7, 2):
        (out,) = session.run(None, {given.name: X[:rows]})
        close(out, want[:rows])


def test_safetensors_hold_the_weights_by_name(module: Module, tmp_path: Path) -> None:
    files = pytest.importorskip("safetensors.numpy")
    loaded = files.load_file(module.export(tmp_path / "w.safetensors", format="safetensors"))
    own = module.state_dict()
    assert set(loaded) == set(own)
    for name, value in own.items():
        np.testing.assert_array_equal(loaded[name], value)
    with pytest.raises(ValueError, match="weights"):
        jaxlightning.export.export_function(lambda x: x, X, tmp_path / "f", format="safetensors")


def test_the_weights_come_back_from_safetensors(module: Module, want: np.ndarray, tmp_path: Path) -> None:
    files = pytest.importorskip("safetensors.numpy")
    path = module.export(tmp_path / "w.safetensors", format="safetensors")
    fresh = Module(Cnn() if hasattr(module.net, "_path") else nnx_cnn())
    fresh.init((X, np.arange(7)))
    fresh.load_state_dict(files.load_file(path))
    close(jax.export.deserialize(fresh.export(tmp_path / "m").read_bytes()).call(X), want)


def test_a_function_is_exported_without_a_module(tmp_path: Path) -> None:
    path = jaxlightning.export.export_function(
        lambda x, y: x @ x.T + y.sum(), (X[:, 0, :, 0], X[:, 0, 0, 0]), tmp_path / "f"
    )
    got = jax.export.deserialize(path.read_bytes()).call(X[:, 0, :, 0], X[:, 0, 0, 0])
    close(got, X[:, 0, :, 0] @ X[:, 0, :, 0].T + X[:, 0, 0, 0].sum())


@pytest.mark.parametrize(
    ("kind", "package"),
    [
        ("saved_model", "tensorflow"),
        ("tflite", "tensorflow"),
        ("onnx", "jax2onnx"),
        ("safetensors", "safetensors.numpy"),
    ],
)
def test_a_missing_package_is_named_with_the_way_to_get_it(
    kind: str, package: str, module: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=rf"needs `{package.partition('.')[0]}`.*pip install 'jaxlightning\["):
        module.export(tmp_path / "m", format=kind)
    assert not (tmp_path / "m").exists()


def test_what_cannot_be_exported_says_why(tmp_path: Path) -> None:
    class NoForward(LightningModule):
        pass

    with pytest.raises(ValueError, match=r"formats are \['stablehlo'"):
        Module(Cnn()).export(tmp_path / "m", format="torchscript")
    with pytest.raises(MisconfigurationException, match="no weights yet"):
        Module(Cnn()).export(tmp_path / "m")
    with pytest.raises(MisconfigurationException, match="no weights yet"):
        Module(Cnn()).export(tmp_path / "m", format="safetensors")
    with pytest.raises(MisconfigurationException, match="no `forward`"):
        NoForward().export(tmp_path / "m", inputs=X)
    with pytest.raises(MisconfigurationException, match="example_input_array"):
        NoForward().export(tmp_path / "m")
    with pytest.raises(MisconfigurationException, match="single number"):
        jaxlightning.export.export_function(lambda x: x, np.float32(1), tmp_path / "m")


def test_a_batch_that_cannot_be_any_size_points_to_the_argument(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="shape") as caught:
        jaxlightning.export.export_function(lambda x: x.reshape(7, -1), X, tmp_path / "m")
    assert any("`batch=`" in note for note in caught.value.__notes__)
    assert jnp.shape(jax.export.deserialize(
        jaxlightning.export.export_function(lambda x: x.reshape(7, -1), X, tmp_path / "m", batch=7).read_bytes()
    ).call(X)) == (7, 64)  # fmt: skip
