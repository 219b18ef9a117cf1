"""Write the vectors, or see that they are up to date: `python -m conformance.generate [--check] [--out DIR]`."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from conformance.generate.cases import write_all
from conformance.generate.coverage import write_table
from conformance.generate.fields import write_fields
from conformance.generate.kept import edited_versions, is_kept
from conformance.generate.pages import all_cases

ROOT = Path(__file__).parents[1] / "vectors"


def differences(root: Path) -> list[str]:
    """Return the files below `root` that aren't what is generated."""
    made = {path: content for case in all_cases() for path, content in case.contents().items()}
    there = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}
    there = {name: path for name, path in there.items() if "/" in name and not is_kept(name.partition("/")[0])}
    wrong = [name for name in made.keys() & there.keys() if there[name].read_bytes() != made[name]]
    return sorted(made.keys() ^ there.keys()) + sorted(wrong)


def main(argv: list[str] | None = None) -> int:
    """Generate, or check; return 1 if something is out of date."""
    parser = argparse.ArgumentParser(prog="python -m conformance.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; say what is out of date, and exit with 1")
    parser.add_argument("--out", type=Path, default=ROOT, metavar="DIR", help="folder of the vectors")
    arguments = parser.parse_args(argv)
    if arguments.check:
        wrong = differences(arguments.out)
        for name in wrong[:20]:
            print(f"{name} isn't what is generated")
        if wrong:
            print(f"{len(wrong)} files are out of date; run `python -m conformance.generate`")
            return 1
        edited = edited_versions(ROOT) if arguments.out == ROOT else []
        for version in edited:
            print(
                f"the vectors of {version} are others than they were; they are kept as they are, so take the edit back"
            )
        return int(bool(edited)) | write_fields(check=True) | write_table(check=True)
    cases = all_cases()  # before anything is deleted: where one can't be made, all stays
    for folder in arguments.out.iterdir() if arguments.out.is_dir() else ():
        if folder.is_dir() and not is_kept(folder.name):
            shutil.rmtree(folder)
    write_all(cases, arguments.out)
    return write_fields(check=False) | write_table(check=False) if arguments.out == ROOT else 0


if __name__ == "__main__":
    sys.exit(main())
