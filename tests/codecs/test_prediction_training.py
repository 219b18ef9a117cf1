"""Prediction on what torch's optimizers really compute, in each of their implementations, byte for byte."""

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckptfmt.codecs.optimizer_steps import check_float_environment
from ckptfmt.codecs.prediction import decode_member, encode_member
from ckptfmt.codecs.rule import FIRST_MOMENT, Rule, role_dtype, roles
from ckptfmt.codecs.rule_search import find_rule
from ckptfmt.errors import CkptError, Code

IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
GRADIENTS = ("float32", "bfloat16", "bfloat16 clipped", "float16", "float16 clipped")
CLIP_NORM = 0.05


def build():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(64, 64), nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64)
    )


def train(make, gradient, *, steps=6):
    """Train a few steps; return the two last states by parameter, with the options of both."""
    model = build()
    optimizer = make(model.parameters())
    batches = torch.Generator().manual_seed(1)
    states = []
    for step in range(steps):
        tokens = torch.randint(0, 64, (32, 9), generator=batches)
        optimizer.zero_grad()
        nn.functional.cross_entropy(
            model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        ).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            if gradient.startswith("bfloat16"):
                parameter.grad.copy_(parameter.grad.bfloat16())
            elif gradient.startswith("float16"):
                parameter.grad.copy_((parameter.grad * 4096).half()).div_(4096)
        if gradient.endswith("clipped"):
            norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            assert norm > CLIP_NORM
        optimizer.step()
        if step >= steps - 2:
            states.append(snapshot(model, optimizer))
    return states


def snapshot(model, optimizer):
    found = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        options = {
            key: value for key, value in optimizer.param_groups[0].items() if key != "params"
        }
        contents = {key: value.numpy().copy() for key, value in state.items() if key != "step"}
        contents["weight"] = parameter.detach().numpy().copy()
        step = {"step": state["step"].item()} if "step" in state else {}
        found[name] = {**options, **step}, contents
    return found


def views(contents):
    return {role: content.data.cast("B") for role, content in contents.items()}


def predict(kind, states, *, hint=None):
    """Encode and decode the last state, largest parameters first.

    Return their rules, and stored over raw bytes by role, of matrices.
    """
    rules: dict[str, Rule] = {}
    stored_nbytes: dict[str, int] = {}
    nbytes = 0
    for name in sorted(states[0], key=lambda each: -states[0][each][1]["weight"].size):
        (base_options, base), (options, new) = states[0][name], states[1][name]
        bases, news = views(base), views(new)
        samples = {role: (bases[role], news[role]) for role in news}
        rule = find_rule(kind, options, samples, base_options=base_options, hint=hint)
        assert rule is not None
        hint = hint or rule
        rules[name] = rule
        made: dict[str, memoryview] = {}
        for role in roles(rule):
            encoding, stored = encode_member(
                rule, role, news[role], bases=bases, news=news, dtype=role_dtype(rule, role)
            )
            out = memoryview(bytearray(news[role].nbytes))
            content = memoryview(stored) if encoding != "raw" else news[role]
            decode_member(rule, role, encoding, content, out, bases=bases, news=made, where=name)
            assert out == news[role]
            made[role] = out
            if new["weight"].ndim > 1:
                stored_nbytes[role] = stored_nbytes.get(role, 0) + content.nbytes
        nbytes += new["weight"].nbytes * (new["weight"].ndim > 1)
    return rules, {role: stored / nbytes for role, stored in stored_nbytes.items()}


def check(kind, states, gradient, *, later=0.005):
    rules, stored = predict(kind, states)
    precision, _, clipped = gradient.partition(" ")
    first = FIRST_MOMENT[kind]
    largest = next(iter(rules.values()))

    assert largest.gradient == precision
    assert (float(np.log2(largest.clip)) % 1 != 0) == bool(clipped)
    assert len({rule.clip for rule in rules.values() if rule.gradient == "bfloat16"}) <= 1
    assert stored.pop(first) < {"float32": 0.86, "bfloat16": 0.37, "float16": 0.47}[precision]
    assert max(stored.values()) < (later if precision != "float32" else 0.035), stored
    return largest


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rate", [1e-3, 1e-5])
def test_adamw(implementation, gradient, rate):
    """REQ-PRE-002, REQ-PRE-012: with a gradient of 16 bits next to nothing else is stored, whatever the kernel."""

    def make(parameters):
        return torch.optim.AdamW(
            parameters, lr=rate, weight_decay=0.1, **IMPLEMENTATIONS[implementation]
        )

    states = train(make, gradient)
    rule = check("adam", states, gradient)

    assert (rule.moment, rule.square, rule.arithmetic) == ("lerp", "gain_first", "fused")
    # Of a step as small as 1e-5 both ways often give the same weight: which predicts more of them
    # depends on the processor that trained.
    assert rule.update == "product" or (rate == 1e-5 and rule.update == "quotient")
    assert rule.l2 == 0


@pytest.mark.parametrize("gradient", GRADIENTS[:3])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (torch.optim.Adam, {"weight_decay": 0.01}),
        (torch.optim.Adam, {"amsgrad": True, "maximize": True, "weight_decay": 0.01}),
        (torch.optim.AdamW, {"amsgrad": True, "betas": (0.8, 0.95)}),
        (torch.optim.AdamW, {"maximize": True, "betas": (0.3, 0.99)}),
        (torch.optim.AdamW, {"betas": (0.0, 0.999), "eps": 1e-6}),
    ],
    ids=[
        "coupled",
        "amsgrad, coupled, maximised",
        "amsgrad",
        "maximised, most of the gradient",
        "no momentum",
    ],
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_adam(implementation, make, options, gradient):
    """REQ-PRE-001, REQ-PRE-010, REQ-PRE-011."""
    states = train(
        lambda parameters: make(parameters, lr=1e-3, **options, **IMPLEMENTATIONS[implementation]),
        gradient,
    )
    rule = check("adam", states, gradient, later=0.03)

    assert rule.amsgrad == options.get("amsgrad", False)
    assert (rule.l2 != 0) == (make is torch.optim.Adam and gradient != "float32")


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": True, "weight_decay": 0.01},
        {"dampening": 0.3, "weight_decay": 0.01, "maximize": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sgd(implementation, options, gradient):
    """REQ-PRE-012."""

    def make(parameters):
        return torch.optim.SGD(
            parameters, lr=0.05, momentum=0.9, **options, **IMPLEMENTATIONS[implementation]
        )

    rule = check("sgd", train(make, gradient), gradient)

    assert rule.nesterov == options.get("nesterov", False)


def test_a_scheduler_between_step_and_save():
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=20)
    states = []
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.arange(64)).square().mean().backward()
        optimizer.step()
        scheduler.step()
        states.append(snapshot(model, optimizer))
    rules, stored = predict("adam", states[-2:])

    assert states[-1]["1.weight"][0]["betas"] != states[-2]["1.weight"][0]["betas"]
    assert rules["1.weight"].decay == states[-2]["1.weight"][0]["betas"][0]
    assert max(stored["exp_avg_sq"], stored["weight"]) < 0.03


def test_two_steps_have_no_rule():
    states = train(torch.optim.AdamW, "float32")
    (base_options, base), (options, new) = states[0]["1.weight"], states[1]["1.weight"]
    samples = {role: (content, views(new)[role]) for role, content in views(base).items()}

    assert (
        find_rule(
            "adam", options, samples, base_options={**base_options, "step": options["step"] - 2}
        )
        is None
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "capability", ["default", pytest.param("avx2", marks=pytest.mark.exhaustive)]
)
def test_kernels_of_other_processors(capability):
    """REQ-PRE-002: without fused instructions the same torch rounds products on their own; the rule says so."""
    script = (
        "import torch, json\n"
        "from tests.codecs.test_prediction_training import train, check\n"
        "make = lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)\n"
        "rules = [check('adam', train(make, gradient), gradient) for gradient in ('float32',"
        " 'bfloat16')]\n"
        "make = lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9,"
        " weight_decay=0.01)\n"
        "rules.append(check('sgd', train(make, 'bfloat16 clipped'), 'bfloat16 clipped'))\n"
        "print(json.dumps([torch.backends.cpu.get_cpu_capability(), [rule.arithmetic for rule in"
        " rules]]))\n"
    )
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=250,
    )
    name, arithmetics = json.loads(done.stdout)
    if name.lower() != capability:
        pytest.skip(f"this processor's kernels are {name}")

    assert set(arithmetics) == {"separate" if capability == "default" else "fused"}


def test_flushed_denormals_are_refused():
    """REQ-PRE-003: torch switches them off for numpy too."""
    check_float_environment()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor can't")
    try:
        with pytest.raises(CkptError) as caught:
            check_float_environment()
    finally:
        torch.set_flush_denormal(False)
    assert caught.value.code == Code.FLOAT_ENVIRONMENT
    check_float_environment()


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_weights_beside_masters(precision):
    """REQ-PRE-012."""
    states = train(lambda parameters: torch.optim.AdamW(parameters, lr=1e-3), "bfloat16")
    for state in states:
        for name, (options, contents) in state.items():
            low = torch.from_numpy(contents["weight"]).to(getattr(torch, precision))
            state[name] = options, {**contents, "copy": low.view(torch.int16).numpy()}
    rules, stored = predict("adam", states)

    assert next(iter(rules.values())).copy == precision
    assert stored["copy"] < 0.001
