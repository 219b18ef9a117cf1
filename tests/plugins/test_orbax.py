"""The table of docs/moving.md: everyday calls of Orbax's CheckpointManager, and the same with ckptfmt."""

import datetime as dt
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.errors import CkptError
from tests.plugins import rebound_orbax

jax: Any = pytest.importorskip("jax")
jnp: Any = pytest.importorskip("jax.numpy")
optax: Any = pytest.importorskip("optax")
ocp: Any = pytest.importorskip("orbax.checkpoint")

PAGE = Path(__file__).parents[2] / "docs" / "moving.md"
ADAM = optax.adam(0.1)
STEPS = 9


def begin():
    params = {"w": jnp.arange(8.0), "b": jnp.ones(3)}
    return params, ADAM.init(params)


@jax.jit
def train_step(params, opt_state):
    def loss_of(params):
        # Smallest at the fourth step: the best checkpoint is neither the first nor the newest.
        return jnp.abs(opt_state[0].count - 3) + sum((leaf**2).sum() for leaf in params.values())

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, opt_state = ADAM.update(grads, opt_state, params)
    return (
        optax.apply_updates(params, updates),
        opt_state,
        0 * loss + jnp.abs(opt_state[0].count - 4),
    )


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree_util.tree_leaves(tree)]


@pytest.fixture(scope="module")
def managed(tmp_path_factory):
    """Return Orbax's manager after a training."""
    directory = tmp_path_factory.mktemp("orbax")
    options = ocp.CheckpointManagerOptions(save_interval_steps=2, max_to_keep=3)
    params, opt_state = begin()
    with ocp.CheckpointManager(directory / "run", options=options) as manager:
        for step in range(1, STEPS + 1):
            params, opt_state, loss = train_step(params, opt_state)
            tree = {"weights": params, "optimizer": opt_state}
            manager.save(
                step, args=ocp.args.StandardSave(tree), metrics={"loss": float(loss)},
                force=step == STEPS,
            )  # fmt: skip
        manager.wait_until_finished()
        yield manager


def page_code():
    section = PAGE.read_text().split("\n## From Orbax\n")[1].split("\n## ")[0]
    return re.findall(r"```python no-run\n(.*?)```", section, re.DOTALL)


def run_page(directory, total):
    """Run the page's loop, and return its names."""
    params, opt_state = begin()
    names = {
        "directory": directory, "total": total, "params": params, "opt_state": opt_state,
        "train_step": train_step, "jax": jax,
    }  # fmt: skip
    exec(page_code()[1], names)  # the page's own code
    return names


def test_the_loop_of_the_page_does_as_orbax_does(managed, tmp_path):
    names = run_page(tmp_path / "run", STEPS - 4)
    names = run_page(tmp_path / "run", STEPS)  # a second launch resumes
    run = ckptfmt.Run(tmp_path / "run")
    assert run.newest().step == managed.latest_step() - 1 == STEPS - 1
    kept = [entry.step for entry in run.list() if entry.state == "committed"]
    assert kept == [4, 6, 8]
    assert run.best("loss").step == 4
    assert run.find(8).metrics == {"loss": 4.0}

    abstract = jax.eval_shape(lambda: dict(zip(("weights", "optimizer"), begin(), strict=True)))
    saved = ckptfmt.State(weights=abstract["weights"], optimizer=abstract["optimizer"])
    ckptfmt.load(tmp_path / "run", saved)
    assert bits((names["target"].weights, names["target"].optimizer)) == bits(
        (saved.weights, saved.optimizer)
    )
    restored = managed.restore(STEPS, args=ocp.args.StandardRestore(abstract))
    ckptfmt.save(
        tmp_path / "orbax", ckptfmt.State(weights=restored["weights"], rng=False), step=STEPS
    )
    assert type(saved.optimizer) is type(restored["optimizer"])
    live = names["state"]
    assert bits((live.weights, live.optimizer)) == bits(
        (restored["weights"], restored["optimizer"])
    )
    assert bits(ckptfmt.load(tmp_path / "orbax", framework="jax")["weights"]) == bits(
        restored["weights"]
    )


def test_best_steps_and_deleted_steps(tmp_path):
    keep = ckptfmt.Retention(newest=1, best=("loss", "min", 3))
    options = ocp.CheckpointManagerOptions(
        max_to_keep=3, best_fn=lambda metrics: metrics["loss"], best_mode="min",
        keep_checkpoints_without_metrics=False,
    )  # fmt: skip
    losses = [5.0, 1.0, 4.0, 2.0, 3.0]
    state = ckptfmt.State(weights={"w": jnp.ones(2)})
    manager = ocp.CheckpointManager(tmp_path / "orbax", options=options)
    with (
        manager,
        ckptfmt.Checkpointer(tmp_path / "ours", state, every=1, keep=keep) as checkpointer,
    ):
        for step, loss in enumerate(losses, start=1):
            tree = ocp.args.StandardSave({"w": jnp.ones(2)})
            manager.save(step, args=tree, metrics={"loss": loss})
            handle = checkpointer.end_step(step, metrics={"loss": loss})
            assert handle is not None
            handle.wait()
        manager.wait_until_finished()
        assert manager.all_steps() == [2, 4, 5]
        best = manager.best_step()
        manager.delete(4)
        left = manager.all_steps()
        shapes = manager.item_metadata(2)
    run = ckptfmt.Run(tmp_path / "ours")
    assert [entry.step for entry in run.list() if entry.state == "committed"] == [2, 4, 5]
    assert run.best("loss").step == best
    run.delete(4)
    assert (
        [entry.step for entry in run.list() if entry.state == "committed"] == list(left) == [2, 5]
    )
    with run.open(2) as checkpoint:
        (tensor,) = checkpoint.tensors.values()
    assert tensor.global_shape == shapes["w"].shape
    assert tensor.dtype == np.dtype(shapes["w"].dtype).name


@pytest.mark.parametrize("small", ["int4", "uint4", "int2", "uint2"])
def test_the_remedy_for_dtypes_below_a_byte(tmp_path, small):
    array = jnp.asarray(np.arange(2), small)
    with pytest.raises(CkptError, match=r"astype\('u?int8'\)") as caught:
        ckptfmt.save(tmp_path / "refused", ckptfmt.State(weights={"w": array}), step=1)
    assert caught.value.code == "STATE_UNSUPPORTED"
    wide = "uint8" if small.startswith("u") else "int8"
    ckptfmt.save(tmp_path / "c", ckptfmt.State(weights={"w": array.astype(wide)}), step=1)
    loaded = ckptfmt.load(tmp_path / "c", framework="jax")["weights"]["w"].astype(small)
    assert loaded.dtype == array.dtype
    assert bits([loaded]) == bits([array])


def seen_by(manager_class, directory):
    """Return what a program sees of two managers, one after the other."""
    options = ocp.CheckpointManagerOptions(save_interval_steps=2, max_to_keep=2, keep_period=4)
    composite, save = ocp.args.Composite, ocp.args.StandardSave
    restore = composite(params=ocp.args.StandardRestore())

    def manage():
        return manager_class(directory, options=options, item_names=("params",))

    def tree(step):
        return {"w": jnp.arange(4.0) * step, "b": [jnp.full(2, step)]}

    with manage() as manager:
        seen = [
            manager.save(step, args=composite(params=save(tree(step))), force=step == 7)
            for step in range(8)
        ]
        manager.wait_until_finished()
        seen += [manager.all_steps(), manager.latest_step()]
    with manage() as manager:
        seen += [manager.all_steps(), manager.latest_step()]
        seen.append(bits(manager.restore(4, args=restore).params))
        seen.append(manager.save(8, args=composite(params=save(tree(8)))))
        manager.wait_until_finished()
        with pytest.raises(ValueError, match="8"):
            manager.save(8, args=composite(params=save(tree(9))), force=True)
        manager.delete(7)
        seen.append(manager.all_steps())
        seen.append(bits(manager.restore(None, args=restore).params))
        with pytest.raises(FileNotFoundError):
            manager.restore(5)
    return seen


def test_the_class_that_orbaxs_own_tests_get_does_as_orbaxs_manager(tmp_path):
    """`ORBAX.md` is made with this class."""
    theirs = seen_by(ocp.CheckpointManager, tmp_path / "orbax")
    assert theirs[:8] == [True, False] * 3 + [True, True]
    assert seen_by(rebound_orbax.ManagerByCkptfmt, tmp_path / "ours") == theirs
    options = ocp.CheckpointManagerOptions(keep_time_interval=dt.timedelta(hours=1))
    with pytest.raises(rebound_orbax.NotPromisedError, match="retention by time"):
        rebound_orbax.ManagerByCkptfmt(tmp_path / "more", options=options)


def test_a_failure_without_a_known_reason_is_no_difference():
    known = rebound_orbax.difference_of("test_file_format0", "failure: False is not true")
    assert known == "differs: names of directories"
    for name, outcome in (("test_save_interval", "failure: no"), ("test_file_format0", "passed")):
        assert rebound_orbax.difference_of(name, outcome) == outcome
    page = (PAGE.parents[1] / "tests" / "plugins" / "ORBAX.md").read_text()
    told = set(re.findall(r"differs: ([^|]+?)(?: \(\d+\))?[;|]", page.replace(" |", "|")))
    assert told == set(rebound_orbax.DIFFERENCES.values())
