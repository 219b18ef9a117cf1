"""Write a run with full checkpoints and deltas, and the digests of its tensors as JSON.

The runs beside this file were written by the last writer of each earlier version of the format:

    git worktree add OLD COMMIT
    PYTHONPATH=OLD python spec/kept/make_checkpoints.py spec/kept/VERSION

README.md names the commits.
"""

# ruff: noqa: INP001 - a script, which is run with the package of another commit
import json
import sys
from pathlib import Path

import torch
from blake3 import blake3

import ckptfmt
from ckptfmt import limits


def main(out: Path) -> None:
    """Train a small model for four steps, save each step, and write `out/run` and digests."""
    # Small blocks, so that a small model has several blocks for each tensor.
    limits.BLOCK_NBYTES = limits.BLOCK_NBYTES_MIN
    torch.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64), torch.nn.Linear(64, 8)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3])
    losses: list[float] = []
    state = ckptfmt.State(
        weights=model,
        optimizer=optimizer,
        extra={"scheduler": scheduler},
        data={"position": 0, "losses": losses, "seen": tuple(range(40))},
        config={"lr": 1e-3, "names": ["layer"] * 20},
    )
    run = str(out / "run")
    options = {"every": 1, "delta": "smallest", "saver": "thread"}
    with ckptfmt.Checkpointer(run, state, **options) as checkpointer:
        for _ in checkpointer.steps(4):
            optimizer.zero_grad()
            loss = model(torch.randint(0, 8, (16,))).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
    digests = {}
    for path in sorted((out / "run").glob("step-*")):
        checkpoint = ckptfmt.open(path)
        digests[path.name] = {
            f"{field}/{name}": blake3(checkpoint.read(field, name, scope).tobytes()).hexdigest()
            for field, name, scope in sorted(checkpoint.tensors)
        }
    (out / "digests.json").write_text(json.dumps(digests, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
