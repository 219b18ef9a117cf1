"""A training in JAX on several virtual devices, with dropout and shuffling; started and killed by test_jax.py.

Usage: jax_training.py RUN JOURNAL DEVICES [--lose-key]
"""

import os
import sys
from pathlib import Path
from typing import Any

run, journal_path, devices = sys.argv[1:4]
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"

import jax  # noqa: E402 - the framework's signature
import jax.numpy as jnp  # noqa: E402 - the framework's signature
import numpy as np  # noqa: E402 - the framework's signature
import optax  # noqa: E402 - the framework's signature
from flax import linen  # noqa: E402 - the framework's signature
from jax.sharding import NamedSharding  # noqa: E402 - the framework's signature
from jax.sharding import PartitionSpec as P  # noqa: E402 - the framework's signature

import ckptfmt  # noqa: E402 - the framework's signature
from tests.plugins.trainings import Journal  # noqa: E402 - the framework's signature

TOTAL = 45


class Net(linen.Module):  # type: ignore[misc]
    """Two layers with dropout between them."""

    @linen.compact  # type: ignore[misc]
    def __call__(self, x):
        hidden = linen.Dropout(0.3, deterministic=False)(jax.nn.gelu(linen.Dense(16)(x)))
        return linen.Dense(8)(hidden)


net = Net()
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
by_rows, copied = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
place = lambda leaf: jax.device_put(leaf, by_rows if leaf.ndim == 2 else copied)  # noqa: E731 - the framework's signature
transform = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.inject_hyperparams(optax.adamw)(
        learning_rate=optax.warmup_cosine_decay_schedule(0, 1e-2, 10, TOTAL)
    ),
)
params = jax.tree_util.tree_map(
    place, net.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, jnp.zeros((1, 8)))
)
opt_state = jax.tree_util.tree_map(place, transform.init(params))
np.random.seed(11)  # noqa: NPY002 - the framework's signature
samples = np.random.default_rng(0).standard_normal((96, 8)).astype(np.float32)


@jax.jit
def train_step(params, opt_state, key, batch):
    """Return the next parameters, optimizer state and key, and the loss."""
    key, dropout = jax.random.split(key)

    def loss_of(params):
        return ((net.apply(params, batch, rngs={"dropout": dropout}) - batch) ** 2).mean()

    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, opt_state = transform.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, key, loss


sampler = ckptfmt.Sampler(len(samples), global_batch=8, seed=3)
state: Any = ckptfmt.State(
    weights=params,
    optimizer=opt_state,
    data=sampler,
    extra={"key": jax.random.key(5)},
    config={"width": 16},
)
journal = Journal(journal_path)
with ckptfmt.Checkpointer(run, state, every=5) as checkpointer:
    if checkpointer.load_report is not None and "--lose-key" in sys.argv:
        state.extra["key"] = jax.random.key(6)
    batches = iter(sampler)
    for step in checkpointer.steps(TOTAL):
        ids = next(batches)
        batch = jax.device_put(samples[np.array(ids)], by_rows)
        state.weights, state.optimizer, state.extra["key"], loss = train_step(
            state.weights, state.optimizer, state.extra["key"], batch
        )
        checkpointer.observe(loss=loss)
        journal.note(
            step + 1,
            ids=list(ids),
            loss=loss,
            weights=state.weights,
            optimizer=jax.tree_util.tree_leaves(state.optimizer),
            learning_rate=state.optimizer[1].hyperparams["learning_rate"],
            key=jax.random.key_data(state.extra["key"]),
            noise=[np.random.random()],  # noqa: NPY002 - the framework's signature
        )
    report = checkpointer.load_report
Path(f"{journal_path}.claim").write_text(
    "" if report is None else f"{report.claim} {report.lowered_by}"
)
