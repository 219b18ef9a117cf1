"""Write or check the vectors: `python -m conformance.generate [--check] [--out DIR]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from conformance.generate.areas import find_differences, write_areas
from conformance.generate.coverage import write_table
from conformance.generate.fields import write_fields
from conformance.generate.kept import edited_versions
from conformance.generate.pages import all_cases

ROOT = Path(__file__).parents[1] / "vectors"


def main(argv: list[str] | None = None) -> int:
    """Generate or check the vectors, and return 1 if a file is out of date."""
    parser = argparse.ArgumentParser(prog="python -m conformance.generate", description=__doc__)
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; say what is out of date, and exit with 1",
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT, metavar="DIR", help="folder of the vectors"
    )
    arguments = parser.parse_args(argv)
    if arguments.check:
        wrong = find_differences(all_cases(), arguments.out)
        for line in wrong[:20]:
            print(line)
        if wrong:
            print(
                f"{len(wrong)} cases or files are out of date; run `python -m conformance.generate`"
            )
            return 1
        edited = edited_versions(ROOT) if arguments.out == ROOT else []
        for version in edited:
            print(
                f"the vectors of {version} are others than they were; they are kept as they"
                " are,"
                " so take the edit back"
            )
        return int(bool(edited)) | write_fields(check=True) | write_table(check=True)
    write_areas(all_cases(), arguments.out)
    return write_fields(check=False) | write_table(check=False) if arguments.out == ROOT else 0


if __name__ == "__main__":
    sys.exit(main())
