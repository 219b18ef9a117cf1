"""A stateful campaign: random saves, kills, stops and continues; what comes of them is compared with an oracle's log.

OMP_NUM_THREADS=1 python -m tests.campaign --states 5000 --seed 1
"""

import argparse
import dataclasses
import json
import pathlib
import random
import sys
import time

from tests.campaign.driver import Report, campaign
from tests.store.helpers import FAST_DIRECTORY


def main() -> int:
    """Run from the command line; each run tells a line, and the last line is the sum, as one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument(
        "--states", type=int, default=100, help="end when so many states became checkpoints"
    )
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no run after so long"
    )
    parser.add_argument(
        "--large", type=float, default=0.15, help="share of runs whose states are above 32 MiB"
    )
    parser.add_argument("--lives", type=int, default=9, help="how many lives a run has at most")
    parser.add_argument(
        "--torch", type=float, default=0.25, help="share of the states that tensors of torch hold"
    )
    parser.add_argument(
        "--keep", type=pathlib.Path, help="where the runs and logs of findings are left"
    )
    arguments = parser.parse_args()
    begin_s = time.monotonic()
    report = Report()
    rng = random.Random(arguments.seed)
    for share, frameworks in ((1 - arguments.torch, ("numpy",)), (1.0, ("torch", "module"))):
        campaign(
            report,
            rng,
            state_count=round(arguments.states * share),
            frameworks=frameworks,
            large=arguments.large,
            life_limit=arguments.lives,
            end_s=begin_s + arguments.seconds * share,
            directory=FAST_DIRECTORY,
            keep=arguments.keep,
        )
    summary = {
        "seed": arguments.seed,
        "seconds": round(time.monotonic() - begin_s),
        **dataclasses.asdict(report),
    }
    sys.stdout.write(f"{json.dumps(summary)}\n")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
