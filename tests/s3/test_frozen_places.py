"""The recorded place of a frozen base: a bucket that the caller hasn't named gets no request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptfmt
from ckptfmt.__main__ import main
from tests.builders import error_of
from tests.s3.fixtures import Bucket
from tests.s3.proxy import Proxy

ROOM = "weights/base"


@pytest.fixture
def bucket(s3_bucket: Bucket, s3_proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty bucket; its requests are counted by `s3_proxy`."""
    for name, value in s3_bucket.through(s3_proxy).endpoint.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{s3_bucket.name}"


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    model[0].requires_grad_(requires_grad=False)
    return model


def weight_of(model: nn.Module) -> torch.Tensor:
    return model.get_parameter("0.weight")


def save_adapters(path: str | Path, base: str) -> nn.Module:
    model = make_model()
    ckptfmt.save(base, ckptfmt.State(weights=make_model()), step=0)
    ckptfmt.save(path, ckptfmt.State(weights=model, frozen_base=base), step=1)
    return model


def read(path: str | Path, **options: Any) -> torch.Tensor:
    with ckptfmt.open(path, **options) as checkpoint:
        return torch.from_numpy(checkpoint.read("weights", "0.weight"))


def test_another_bucket_gets_no_request_unless_the_caller_names_it(
    tmp_path: Path, bucket: str, s3_proxy: Proxy
) -> None:
    base = f"{bucket}/{ROOM}"
    path = tmp_path / "adapters"
    model = save_adapters(path, base)
    other = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    refused: list[Callable[[], object]] = [
        lambda: read(path),
        lambda: ckptfmt.load(path),
        lambda: ckptfmt.load(path, ckptfmt.State(weights=other, rng=False)),
    ]
    s3_proxy.requests.clear()
    for action in refused:
        error = error_of(action)
        assert error.code == "FROZEN_BASE_MISSING"
        assert base in error.detail
    assert not ckptfmt.validate(path, bases=[tmp_path])
    assert s3_proxy.requests == []
    # The ways out that the error names.
    assert torch.equal(read(path, bases=[base]), weight_of(model))
    assert ckptfmt.validate(path, bases=[base])
    ckptfmt.load(path, ckptfmt.State(weights=other, rng=False, frozen_base=base))
    assert torch.equal(weight_of(other), weight_of(model))
    whole = tmp_path / "whole.safetensors"
    assert main(["convert", str(path), str(whole)]) != 0
    assert main(["convert", str(path), str(whole), "--base", base]) == 0


def test_a_base_in_the_bucket_of_the_checkpoint_is_found(bucket: str) -> None:
    model = save_adapters(f"{bucket}/runs/adapters", f"{bucket}/{ROOM}")
    assert torch.equal(read(f"{bucket}/runs/adapters"), weight_of(model))


def test_a_checkpoint_in_a_bucket_finds_its_base_on_this_machine(
    tmp_path: Path, bucket: str
) -> None:
    model = save_adapters(f"{bucket}/runs/adapters", str(tmp_path / "base"))
    assert torch.equal(read(f"{bucket}/runs/adapters"), weight_of(model))
