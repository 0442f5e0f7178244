"""Other libraries' networks, graphs, rematerialised and scanned layers, and static arguments.

Example:
    python examples/other_networks.py --network haiku --epochs 5
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import _data
import jaxlightning as jl


class Classifier(jl.LightningModule):
    """Cross-entropy of whatever network it is given."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def logits(self, x: Any) -> jax.Array:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> jax.Array:
        x, y = batch
        loss = optax.softmax_cross_entropy_with_integer_labels(self.logits(x), y).mean()
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_acc", jnp.mean(self.logits(x).argmax(-1) == y), prog_bar=True)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-3)


def haiku_network() -> Classifier:
    """A dm-haiku function with BatchNorm, whose statistics are state, and dropout, whose key comes by itself."""
    import haiku as hk

    def forward(x: jax.Array, is_training: bool) -> jax.Array:
        x = hk.Linear(128)(x.reshape(len(x), -1))
        x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x, is_training))
        if is_training:
            x = hk.dropout(hk.next_rng_key(), 0.2, x)
        return hk.Linear(10)(x)

    return Classifier(hk.transform_with_state(forward))


def equinox_network() -> Classifier:
    """An Equinox module; it sees one example, so that the step maps it over the batch."""
    import equinox as eqx

    class OverTheBatch(Classifier):
        def logits(self, x: Any) -> jax.Array:
            return jax.vmap(self.net)(x.reshape(len(x), -1))

    return OverTheBatch(eqx.nn.MLP(784, 10, 128, 1, key=jax.random.key(0)))


def pure_network() -> Classifier:
    """A pair of functions `init` and `apply`, here of `jax.example_libraries.stax`."""
    from jax.example_libraries import stax

    init, apply = stax.serial(stax.Flatten, stax.Dense(128), stax.Relu, stax.Dense(10))
    return Classifier(jl.PureNetwork(init, apply, by_shape=True))


class Block(nn.Module):
    """A residual block in the form that `nn.scan` wants: it carries `x` on and gives nothing else."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        return x + nn.Dense(self.features)(nn.relu(nn.LayerNorm()(x))), None


class Rematerialised(nn.Module):
    """Blocks whose intermediate values are computed again for the gradient, which saves memory."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(64)(x.reshape(len(x), -1))
        for _ in range(4):
            x, _ = nn.remat(Block)(64)(x)
        return nn.Dense(10)(x)


class Scanned(nn.Module):
    """Eight blocks compiled as one, with their parameters stacked on axis 0."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(64)(x.reshape(len(x), -1))
        blocks = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=8)
        x, _ = blocks(64)(x, None)
        return nn.Dense(10)(x)


@partial(jax.jit, static_argnums=(1, 2))
def patches(x: jax.Array, size: int, flat: bool) -> jax.Array:
    """Cut images (n, 28, 28, 1) into squares; `size` and `flat` decide about shapes, so that they are static."""
    n, side = len(x), 28 // size
    x = x.reshape(n, side, size, side, size).swapaxes(2, 3)
    return x.reshape(n, -1) if flat else x.reshape(n, side * side, size * size)


class WithStaticArguments(nn.Module):
    """A network whose `__call__` has a static argument, and which calls a function with static arguments."""

    @nn.compact
    def __call__(self, x: jax.Array, size: int = 7) -> jax.Array:
        x = nn.relu(nn.Dense(64)(patches(x, size, False)))
        return nn.Dense(10)(x.reshape(len(x), -1))


def static_network() -> Classifier:
    """A network that is called with a Python number which decides about its shapes."""

    class Static(Classifier):
        def logits(self, x: Any) -> jax.Array:
            return self.net(x, size=4)

    return Static(WithStaticArguments())


def graph_network() -> Classifier:
    """A graph network on batches of `jraph.GraphsTuple`."""
    import jraph

    class GraphNet(nn.Module):
        @nn.compact
        def __call__(self, graph: Any) -> jax.Array:
            for features in (32, 32):
                layer = jraph.GraphConvolution(update_node_fn=nn.Dense(features), add_self_edges=True)
                graph = graph._replace(nodes=nn.relu(layer(graph).nodes))
            number = len(graph.n_node)
            of_graph = jnp.repeat(jnp.arange(number), graph.n_node, total_repeat_length=len(graph.nodes))
            return nn.Dense(2)(jraph.segment_mean(graph.nodes, of_graph, number))

    class GraphClassifier(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> jax.Array:
            graph, label = batch
            real = jraph.get_graph_padding_mask(graph)
            losses = optax.softmax_cross_entropy_with_integer_labels(self.net(graph), label)
            loss = jnp.sum(losses * real) / jnp.sum(real)
            self.log("train_loss", loss, prog_bar=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            graph, label = batch
            real = jraph.get_graph_padding_mask(graph)
            right = (self.net(graph).argmax(-1) == label) * real
            self.log("val_acc", jnp.sum(right) / jnp.sum(real), batch_size=len(label) - 1, prog_bar=True)

        def configure_optimizers(self) -> optax.GradientTransformation:
            return optax.adam(1e-2)

    return GraphClassifier(GraphNet())


class Graphs:
    """Generated graphs: rings and chains of six nodes, to be told apart by who is whose neighbour."""

    def __init__(self, number: int, batch_size: int, seed: int) -> None:
        import jraph

        rng = np.random.default_rng(seed)
        self.batches = []
        for _ in range(number // batch_size):
            labels = rng.integers(0, 2, batch_size)
            graphs = []
            for ring in labels:
                first = np.arange(6 if ring else 5)
                second = (first + 1) % 6
                degree = np.bincount(np.append(first, second), minlength=6)[:, None]
                graphs.append(
                    jraph.GraphsTuple(
                        nodes=np.concatenate([degree, rng.normal(size=(6, 3))], 1).astype(np.float32),
                        edges=None,
                        senders=np.append(first, second),
                        receivers=np.append(second, first),
                        globals=None,
                        n_node=np.array([6]),
                        n_edge=np.array([2 * len(first)]),
                    )
                )
            # One graph more fills the arrays up to a size that all batches share.
            batch = jraph.pad_with_graphs(jraph.batch_np(graphs), 6 * batch_size + 1, 12 * batch_size, batch_size + 1)
            self.batches.append((batch, np.append(labels, 0)))

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        return iter(self.batches)


NETWORKS: dict[str, Callable[[], Classifier]] = {
    "haiku": haiku_network,
    "equinox": equinox_network,
    "pure": pure_network,
    "graph": graph_network,
    "remat": lambda: Classifier(Rematerialised()),
    "scan": lambda: Classifier(Scanned()),
    "static": static_network,
}


def main(argv: Sequence[str] | None = None) -> float:
    """Train one of the networks, and return its validation accuracy."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    _data.add_arguments(parser)
    parser.add_argument("--network", choices=tuple(NETWORKS), default="haiku", help="which one (%(default)s)")
    args = parser.parse_args(argv)
    if args.network == "graph":
        number = args.limit or 2000
        train: Any = Graphs(number, args.batch_size, args.seed)
        val: Any = Graphs(max(number // 5, args.batch_size), args.batch_size, args.seed + 1)
    else:
        train, val, _ = _data.array_loaders(args)
    jl.seed_everything(args.seed)
    trainer = jl.Trainer(
        max_epochs=args.epochs,
        default_root_dir=args.output,
        log_every_n_steps=10,
        enable_progress_bar=not args.quiet,
        enable_model_summary=not args.quiet,
    )
    trainer.fit(NETWORKS[args.network](), train, val)
    accuracy = float(trainer.callback_metrics["val_acc"])
    print(f"val_acc={accuracy:.4f}")
    return accuracy


if __name__ == "__main__":
    main()
